"""The few collectives that the maths needs, with their gradients where they have one."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class _SumForward(torch.autograd.Function):
    """All-reduce forward, identity backward: each shard already has the gradient of the whole sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


@dataclass(frozen=True, slots=True)
class VocabShards:
    """``ops.logprobs.VocabReduce`` over a tensor-parallel group.

    Attributes:
        group: ranks that each hold a slice of the vocabulary.
        start: first vocabulary row of this rank's slice.
        valid: true vocabulary size; rows from there on are padding.
    """

    group: dist.ProcessGroup
    start: int
    valid: int

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the shards, without gradient. Collective over ``group``."""
        top = x.detach().clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        return top

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Differentiable sum over the shards. Collective over ``group``."""
        if self.group.size() == 1:
            return x
        result: torch.Tensor = _SumForward.apply(x, self.group)  # type: ignore[no-untyped-call]  # torch's
        return result


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """In-place sum over ``group``; returns ``x``. Collective."""
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def broadcast_from(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """In-place broadcast from global rank ``source``; returns ``x``. Collective over ``group``."""
    if group.size() > 1:
        dist.broadcast(x, src=source, group=group)
    return x


def gather_last_dim(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the shards of ``group`` along the last dimension (no gradient). Collective."""
    if group.size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
