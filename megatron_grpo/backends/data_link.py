"""Gradients over the data link: low-rank with error feedback in fast passes, whole in all others.

Only what is whole on a rank can be factored, so this stands before the engine cuts gradients up (ZeRO 0 and 1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.boundary.gradients import GradientCodec
from megatron_grpo.config import BoundaryConfig
from megatron_grpo.ops.lowrank import seed_of, worth_compressing
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.link import Kind, Ledger

MIN_RATE = 2.0
"""A matrix is factored where that leaves less than half of its bytes."""


class DataLink:
    """Averages a stage's gradients over its replicas.

    Args:
        parameters: whose gradients cross, by name. Those of one shape begin with one Q: the two copies of a tied
            embedding have equal gradients, and stay equal.
        group: the replicas of this stage and tensor shard.
    """

    def __init__(
        self,
        cfg: BoundaryConfig,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        ledger: Ledger,
        seed: int,
    ) -> None:
        self._group, self._ledger, self._warmup, self._ticks = group, ledger, cfg.gradient_warmup, 0
        rank = cfg.gradient_rank
        self._codecs = {
            name: GradientCodec(parameter.shape, rank, seed_of(seed, parameter.shape[0], f"data {parameter.shape[1]}"))
            for name, parameter in parameters.items()
            if parameter.ndim == 2 and worth_compressing(*parameter.shape, rank, MIN_RATE)
        }

    def average(self, gradients: Mapping[str, torch.Tensor], plan: Pass) -> None:
        """Replace each gradient by the mean over replicas. Collective: every replica.

        A pass whose gradients nobody will use (neither fast nor an anchor's) changes nothing. Each rank counts what it
        contributes to a sum. After a fast pass comes :meth:`settle`.
        """
        if plan.kind not in ("fast", "anchor"):
            return
        fast = plan.kind == "fast"
        self._ticks += fast
        if fast:
            whole = sum(gradient.nbytes for gradient in gradients.values())
            self._ledger.add("data", "fast", "backward", sent=0, dense=whole)
        if plan.dense or not fast or self._ticks <= self._warmup:
            for gradient in gradients.values():
                self._mean([gradient], plan.kind)
            return
        raw = [gradient for name, gradient in gradients.items() if name not in self._codecs]
        lefts = [codec.left(gradients[name]).to(gradients[name].dtype) for name, codec in self._codecs.items()]
        self._mean([*raw, *lefts], "fast")
        rights = [
            codec.right(left.float()).to(left.dtype) for codec, left in zip(self._codecs.values(), lefts, strict=True)
        ]
        self._mean(rights, "fast")
        for (name, codec), right in zip(self._codecs.items(), rights, strict=True):
            gradients[name].copy_(codec.decode(right))

    def settle(self, *, used: bool) -> None:
        """Say whether the averaged gradients were used; if not, their remainders are what they were before."""
        for codec in self._codecs.values():
            codec.settle(used=used)

    def _mean(self, parts: Sequence[torch.Tensor], kind: Kind) -> None:
        """In-place means, as one message. Collective."""
        if not parts:
            return
        flat = parts[0].view(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        self._ledger.add("data", kind, "backward", sent=flat.nbytes)
        sum_over(flat, self._group).div_(self._group.size())
        if len(parts) > 1:
            for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(mean.view_as(part))

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self._ticks, "codecs": {name: codec.state_dict() for name, codec in self._codecs.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ticks = state["ticks"]
        for name, codec in self._codecs.items():
            codec.load_state_dict(state["codecs"][name])
