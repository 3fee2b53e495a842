"""The bases of the tensor link: ranks that sum partial results sum the coordinates of these instead.

Projection is linear, so sum(X_i Q) Q^T = (sum X_i) Q Q^T. There are four such sums in a layer: forward the outputs of
the row-parallel weights, backward the gradients of the inputs of the column-parallel ones.
Legend: H hidden, r rank.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.build import DTYPES
from megatron_grpo.config import DIRECTIONS, BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import seed_of

Place = Literal["linear_proj", "linear_fc2", "linear_qkv", "linear_fc1"]
WAYS: Mapping[Place, Direction] = {
    "linear_proj": "forward",
    "linear_fc2": "forward",
    "linear_qkv": "backward",
    "linear_fc1": "backward",
}
"""The sums of a layer, by Megatron's name of the weight, and the direction in which each is made."""


class TensorBases:
    """Q ``[H, r]`` of every place of some layers. Every tensor rank and every replica holds the same.

    Rows count by their energy, whatever ``boundary.weighting`` says: no rank knows the norm of a row that it holds a
    part of.

    Args:
        layers: their numbers in the whole model: a basis belongs to a layer, wherever that lies.
    """

    def __init__(self, cfg: BoundaryConfig, *, layers: Iterable[int], hidden: int, seed: int) -> None:
        rank, learns = cfg.tensor_rank_of(hidden), cfg.basis != "random"
        self._bases = {
            (layer, place): Basis(hidden, rank, seed_of(seed, layer, place), learns=learns)
            for layer in layers
            for place in WAYS
        }
        self._dtypes = {way: DTYPES[cfg.dense_payload(way)] for way in DIRECTIONS}

    def basis(self, layer: int, place: Place) -> Basis:
        return self._bases[layer, place]

    def dtype(self, way: Direction) -> torch.dtype:
        """Number format of what is summed."""
        return self._dtypes[way]

    def all(self) -> list[tuple[Direction, Basis]]:
        """Every basis with the direction that teaches it, in one order on every rank of a stage."""
        return [(WAYS[place], basis) for (_, place), basis in self._bases.items()]

    def state_dict(self) -> dict[str, Any]:
        return {f"{layer} {place}": basis.state_dict() for (layer, place), basis in self._bases.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the states of these layers; others may be there."""
        for (layer, place), basis in self._bases.items():
            basis.load_state_dict(state[f"{layer} {place}"])
