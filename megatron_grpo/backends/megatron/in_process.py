"""All stages in one process: the boundaries are crossed inside the model, through the same codecs as between ranks.

For research on one device. A hook after the last layer of every stage but the last puts the rows through ``encode`` and
``decode``, forward and backward, and the ledger counts what would have crossed.
Legend: S columns, B micro-batch, N rows, H hidden.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.boundary.crossing import Boundaries, Pass
from megatron_grpo.config import Direction
from megatron_grpo.ops.lowrank import digest
from megatron_grpo.ops.rows import Rows
from megatron_grpo.parallel.link import BFLOAT16_BYTES, Kind, Ledger


class _Cross(torch.autograd.Function):
    """What the next stage would receive; backward what the stage before would."""

    @staticmethod
    def forward(ctx: Any, x_SBH: torch.Tensor, link: "InProcessLink", index: int) -> torch.Tensor:
        ctx.link, ctx.index, ctx.plan = link, index, link.boundaries.current
        return link.cross(index, "forward", x_SBH.detach(), ctx.plan)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.link.cross(ctx.index, "backward", grads[0], ctx.plan), None, None


class InProcessLink:
    """The same seam as ``CodecP2PCommunicator`` for a model that holds every stage.

    Args:
        boundaries: all of the pipeline's.
        ledger: counts what would have crossed, as the ranks would count it.
    """

    def __init__(self, boundaries: Boundaries, ledger: Ledger) -> None:
        self.boundaries = boundaries
        self.ledger = ledger

    def install(self, module: torch.nn.Module, cuts: dict[int, int]) -> None:
        """Cross boundary ``cuts[layer]`` after each such layer of a Megatron model."""
        for layer, index in cuts.items():

            def hook(_module: torch.nn.Module, _inputs: Any, output: Any, index: int = index) -> Any:
                hidden_SBH, *rest = output
                return (_Cross.apply(hidden_SBH, self, index), *rest)

            module.decoder.layers[layer].register_forward_hook(hook)

    @property
    def kind(self) -> Kind:
        return self.boundaries.current.kind

    def cross(self, index: int, direction: Direction, x_SBH: torch.Tensor, plan: Pass) -> torch.Tensor:
        """A boundary tensor as the other side would hold it."""
        columns, batch, _ = x_SBH.shape
        rows = plan.next_rows(f"{direction} {index}", columns, batch, x_SBH.device)
        return rows.scatter(self.cross_rows(index, direction, rows.select(x_SBH), rows, plan), columns)

    def cross_rows(self, index: int, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass) -> torch.Tensor:
        """Rows as the other side would hold them: ``[N, H]``."""
        crossing = self.boundaries.crossings[index]
        encoded = crossing.encode(direction, x_NH, rows, plan)
        self.ledger.add(
            "pipeline",
            plan.kind,
            direction,
            sent=encoded.payload.nbytes,
            dense=x_NH.numel() * BFLOAT16_BYTES,
        )
        decoded_NH = encoded.decoded_NH  # what the receiver makes of it, where the sender had to work that out
        if decoded_NH is None:
            decoded_NH = crossing.codec(direction, plan).decode(encoded.payload, rows, x_NH.dtype)
        if plan.observe == "sender":  # of the rows that go the other way: this end is one, too
            crossing.learn_gradient(direction, decoded_NH, plan)
        return decoded_NH

    def refresh(self, dp_group: dist.ProcessGroup) -> None:
        """See ``CodecP2PCommunicator.refresh``: both ends are one here, and would exchange a digest each."""
        for crossing in self.boundaries.crossings.values():
            for way, learner in crossing.codecs.learners():
                if learner.is_open:
                    learner.stage()
                    self.ledger.add("pipeline", "basis", way, sent=2 * digest(learner.flat()).nbytes)

    def refresh_from_sender(self, dp_group: dist.ProcessGroup) -> None:
        """See ``CodecP2PCommunicator.refresh_from_sender``."""
        for crossing in self.boundaries.crossings.values():
            for way, learner in crossing.codecs.learners():
                learner.stage()
                self.ledger.add("pipeline", "basis", way, sent=learner.flat().nbytes)
