"""The seam every codec implements, and the one place where a codec is chosen.

Legend: N rows (tokens that are not padding), H hidden, r rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_grpo.config import BoundaryConfig
from megatron_grpo.ops.lowrank import seed_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Codec(Protocol):
    """Tensor -> payload -> tensor for one direction of one boundary. Both ends hold equal state.

    A codec never talks: it is given rows and returns numbers. ``positions_N`` is each row's column, known to both
    ends, for codecs that choose by place. Coding is per row, so that a row codes alike in any batch.
    """

    def payload(self, rows: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """An empty payload for ``rows`` rows, to receive into (device of ``like``)."""
        ...

    def encode(self, x_NH: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """What crosses: contiguous, of the shape and dtype of :meth:`payload`."""
        ...

    def decode(self, payload: torch.Tensor, positions_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``[N, H]`` of ``dtype`` from what crossed."""
        ...

    def observe(self, x_NH: torch.Tensor) -> None:
        """See the rows of an uncompressed pass, as both ends hold them. Default: nothing to learn."""

    def begin_step(self, step: int) -> None:
        """A step starts: the one moment at which coding may change (``boundary.commit: step``)."""

    def commit(self) -> None:
        """Put staged state to use. Called at a step boundary, or wherever ``boundary.commit: tick`` says."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""


@dataclass(frozen=True, slots=True)
class BoundaryCodecs:
    """The codecs of one boundary: ``forward``/``backward`` as configured, ``dense_*`` the uncompressed crossing."""

    index: int
    forward: Codec
    backward: Codec
    dense_forward: Codec
    dense_backward: Codec

    def choose(self, direction: str, *, dense: bool) -> Codec:
        if direction == "forward":
            return self.dense_forward if dense else self.forward
        return self.dense_backward if dense else self.backward

    def learners(self) -> list[Codec]:
        return [self.forward, self.backward]


def build_codecs(cfg: BoundaryConfig, *, hidden: int, index: int, seed: int) -> BoundaryCodecs:
    """Both directions of boundary ``index`` (it joins stage ``index`` to ``index + 1``)."""
    from megatron_grpo.boundary.identity import IdentityCodec
    from megatron_grpo.boundary.lowrank import Basis, LowRankCodec
    from megatron_grpo.boundary.mask import MaskCodec

    def basis(direction: str) -> Basis:
        return Basis(hidden, cfg.rank, seed_of(seed, index, direction))

    shared = basis("forward") if cfg.shared_basis else None

    def build(direction: str) -> Codec:
        dtype = DTYPES[cfg.payload_of(direction)]
        kind = cfg.codec_of(direction)
        if kind == "identity":
            return IdentityCodec(hidden, dtype)
        if kind == "mask":
            return MaskCodec(hidden, cfg.rank, dtype, seed_of(seed, index, direction))
        if shared is not None:
            return LowRankCodec(shared, dtype, learns=direction == "forward")
        return LowRankCodec(basis(direction), dtype, learns=cfg.basis == "anchor")

    return BoundaryCodecs(
        index=index,
        forward=build("forward"),
        backward=build("backward"),
        dense_forward=IdentityCodec(hidden, DTYPES[cfg.payload_of("forward")]),
        dense_backward=IdentityCodec(hidden, DTYPES[cfg.payload_of("backward")]),
    )
