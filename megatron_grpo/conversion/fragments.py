"""Shards of a rank as ranges of its stage's parameters: the one thing that ZeRO stages differ in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["gradients", "weights"]
"""Two lists of shards that a rank has, each in a fixed order."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One shard.

    Attributes:
        name: the parameter on its stage; ``None``: padding alone.
        start, numel: the range of the parameter's flattened tensor-parallel slice that the shard begins with.
        shape: of the shard; what is in it beyond ``numel`` is padding.
    """

    name: str | None
    start: int
    numel: int
    shape: torch.Size

    def cut(self, slice_: torch.Tensor) -> torch.Tensor:
        """The shard out of its parameter's slice: a fresh tensor, padded with zeros."""
        shard = slice_.new_zeros(self.shape.numel())
        shard[: self.numel] = slice_.flatten()[self.start : self.start + self.numel]
        return shard.view(self.shape)

    def put(self, shard: torch.Tensor, flat: torch.Tensor) -> None:
        """The inverse of :meth:`cut`: enter the shard into the flattened slice."""
        flat[self.start : self.start + self.numel] = shard.flatten()[: self.numel]


def plain_fragments(fragments: Mapping[Kind, Sequence[Fragment]]) -> dict[str, Any]:
    """As a checkpoint holds them: tuples."""
    return {kind: [(x.name, x.start, x.numel, list(x.shape)) for x in some] for kind, some in fragments.items()}


def fragments_of(plain: Mapping[str, Any], kind: Kind) -> list[Fragment]:
    """The inverse of :func:`plain_fragments`."""
    return [Fragment(name, start, numel, torch.Size(shape)) for name, start, numel, shape in plain[kind]]
