"""The signs of sharded tensors at a bit an element."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from megatron_grpo.ops.bits import pack_bits, unpack_bits

Signal = Sequence[torch.Tensor]
"""A gradient, shard by shard: fp32, or its signs alone."""


class PackedSigns(Sequence[torch.Tensor]):
    """The signs of shards at one bit an element, 1/32 of fp32; an item is a shard's -1, 0 and 1, fp32, made when read.

    sign(0) is 0 and stays so: a shard with an exact zero in it (the embedding of a token that did not occur) keeps a
    second bit an element, which tells where. What is merged is bit for bit what the unpacked M gives.
    """

    def __init__(self, shards: Signal) -> None:
        self._shapes = [list(shard.shape) for shard in shards]
        self._above = [_packed(shard > 0) for shard in shards]
        self._nonzero = [None if bool((shard != 0).all()) else _packed(shard != 0) for shard in shards]

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Signal: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Signal:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        shape, nonzero = self._shapes[index], self._nonzero[index]
        signs = _unpacked(self._above[index], shape) * 2.0 - 1.0
        return signs if nonzero is None else signs * _unpacked(nonzero, shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def state_dict(self) -> dict[str, Any]:
        return {"shapes": self._shapes, "above": self._above, "nonzero": self._nonzero}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device | None = None) -> "PackedSigns":
        """What ``state_dict`` wrote, on ``device`` or where it lies."""
        signs = cls([])
        above = [packed.to(device) for packed in state["above"]]
        nonzero = [None if packed is None else packed.to(device) for packed in state["nonzero"]]
        signs._shapes, signs._above, signs._nonzero = state["shapes"], above, nonzero
        return signs


def _packed(flags: torch.Tensor) -> torch.Tensor:
    return pack_bits(flags.to(torch.uint8).flatten(), 1)


def _unpacked(packed: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return unpack_bits(packed, torch.Size(shape).numel(), 1).float().view(shape)
