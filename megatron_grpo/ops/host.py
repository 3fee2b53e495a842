"""Shards kept in host memory between uses; each is on its device only while it is read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import overload

import torch

from megatron_grpo.ops.signs import Signal

Keep = Callable[[Iterable[torch.Tensor]], Signal]
"""Puts shards where they stay until they are read again."""


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where ``tensor`` is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


class HostShards(Sequence[torch.Tensor]):
    """Shards in host memory; an item is on ``device`` and not to be changed: there it may be the shard itself.

    Attributes:
        kept: the shards where they lie.
    """

    def __init__(self, shards: Iterable[torch.Tensor], device: torch.device) -> None:
        self.kept = [host_copy(shard) for shard in shards]
        self._device = device

    def __len__(self) -> int:
        return len(self.kept)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Signal: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Signal:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self.kept[index].to(self._device, non_blocking=True)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))


def keeping(device: torch.device, *, on_host: bool) -> Keep:
    """How shards are kept that are read on ``device``: there, or in host memory."""
    if on_host:
        return partial(HostShards, device=device)
    return lambda shards: [shard.to(device) for shard in shards]


def stored(shards: Signal | None) -> list[torch.Tensor] | None:
    """The shards as they lie, for a checkpoint."""
    if shards is None:
        return None
    return shards.kept if isinstance(shards, HostShards) else list(shards)
