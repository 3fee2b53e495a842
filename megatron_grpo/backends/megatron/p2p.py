"""The communication hook: Megatron's point-to-point communicator, with a codec at every boundary.

All public verbs of ``P2PCommunicator`` funnel through ``_communicate``; overriding that one method puts codecs between
the stage and the wire for any schedule that takes ``p2p_communicator=``. The method is private: its signature is pinned
by ``tests/contracts``. Legend: S sequence, B micro-batch, N rows, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_grpo.backends.megatron.tensor_link import TensorLink
from megatron_grpo.boundary.codec import Learner
from megatron_grpo.boundary.crossing import Boundaries, Crossing
from megatron_grpo.config import Direction
from megatron_grpo.ops.lowrank import digest
from megatron_grpo.ops.rows import Rows
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.link import BFLOAT16_BYTES, Kind, Ledger


class CodecP2PCommunicator(P2PCommunicator):
    """Sends payloads instead of boundary tensors, counts them, and refreshes the bases.

    Without sequence parallelism every tensor-parallel rank holds the whole boundary, so each sends 1/tp of the payload
    to its peer and the receiving stage gathers it.

    Args:
        pp_group: this rank's pipeline.
        config: the model's Megatron config; ``pipeline_dtype`` is the dtype that stages see.
        boundaries: those before and after this stage.
        stage: number of this stage.
        ledger: where bytes are counted.
        tp_group: tensor-parallel ranks of this stage, ``None`` for one.
        tensor_link: the compressed link between those, whose bases are refreshed with the boundaries'.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        *,
        boundaries: Boundaries,
        stage: int,
        ledger: Ledger,
        tp_group: dist.ProcessGroup | None = None,
        tensor_link: TensorLink | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        self.boundaries = boundaries
        self.ledger = ledger
        self.tp_group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self._tensor_link = tensor_link
        self._stage = stage

    @property
    def kind(self) -> Kind:
        """What the ledger calls the current pass."""
        return self.boundaries.current.kind

    def refresh(self, dp_group: dist.ProcessGroup) -> None:
        """Stage what both ends learned from a dense pass. Collective: every rank, after a pass that ``both`` observed.

        Sums go over ``dp_group``. Both ends of a boundary stage the same and compare a digest of it; if they differ (QR
        may, across hardware), the lower stage's is sent. Everything that crosses counts as basis.
        """
        for peer, lower, way, learner in self._learners():
            if learner.is_open:
                self._sum(learner, way, dp_group)
                learner.stage()
                self._agree(learner, peer, way, lower=lower)
        if self._tensor_link is not None:
            self._tensor_link.refresh(dp_group, parts=False)

    def refresh_from_sender(self, dp_group: dist.ProcessGroup) -> None:
        """Stage what the sender of each direction learned, and send it. Collective: every rank, after such a pass."""
        for peer, lower, way, learner in self._learners():
            if lower == (way == "forward"):
                self._sum(learner, way, dp_group)
                learner.stage()
                flat = learner.flat()
                self.ledger.add("pipeline", "basis", way, sent=flat.nbytes)
                dist.send(flat, dst=peer, group=self.pp_group)
            else:
                flat = torch.empty_like(learner.flat())
                dist.recv(flat, src=peer, group=self.pp_group)
                learner.stage_flat(flat)
        if self._tensor_link is not None:
            self._tensor_link.refresh(dp_group, parts=True)

    def _learners(self) -> Iterator[tuple[int, bool, Direction, Learner]]:
        """(peer, whether this is the lower end, direction, learner) of every boundary of this rank, in one order."""
        for index, peer in ((self._stage - 1, self.prev_rank), (self._stage, self.next_rank)):
            if index in self.boundaries.crossings:
                for way, learner in self.boundaries.crossings[index].codecs.learners():
                    yield peer, index == self._stage, way, learner

    def _sum(self, learner: Learner, way: Direction, dp_group: dist.ProcessGroup) -> None:
        if dp_group.size() == 1:
            return
        for part in learner.sums():
            self.ledger.add("data", "basis", way, sent=part.nbytes)
            sum_over(part, dp_group)

    def _agree(self, learner: Learner, peer: int, way: Direction, *, lower: bool) -> None:
        flat = learner.flat()
        mine = digest(flat)
        theirs = torch.empty_like(mine)
        self._swap(mine, theirs, peer)
        self.ledger.add("pipeline", "basis", way, sent=mine.nbytes)
        if torch.equal(mine, theirs):
            return
        if lower:
            self.ledger.add("pipeline", "basis", way, sent=flat.nbytes)
            dist.send(flat, dst=peer, group=self.pp_group)
        else:
            received = torch.empty_like(flat)
            dist.recv(received, src=peer, group=self.pp_group)
            learner.stage_flat(received)

    def _swap(self, outgoing: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
        operations = [
            dist.P2POp(dist.isend, outgoing, peer, self.pp_group),
            dist.P2POp(dist.irecv, incoming, peer, self.pp_group),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    def send_rows(self, x_NH: torch.Tensor, rows: Rows) -> dist.Work:
        """Send rows to the next stage outside any schedule (the sampler's way), coded as the current pass says.

        Returns at once; the caller waits for the returned work before the run of sends ends.
        """
        part = self._pack("forward", self._crossing("next"), x_NH, rows)
        work = dist.isend(part, dst=self.next_rank, group=self.pp_group)
        assert work is not None
        return work

    def receive_rows(self, rows: Rows) -> torch.Tensor:
        """Receive what the previous stage's :meth:`send_rows` sent for the same rows, decoded: ``[N, H]``."""
        crossing = self._crossing("prev")
        payload = crossing.blank("forward", rows, self.boundaries.current)
        part = self._own_part(payload)
        dist.recv(part, src=self.prev_rank, group=self.pp_group)
        return self._unpack("forward", crossing, payload, part, rows)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Megatron's one door to the wire. ``tensor_shape`` is ``None`` on a pure send."""
        parts = {
            stream: self._outgoing(stream, tensor)
            for stream, tensor in (("send_prev", tensor_send_prev), ("send_next", tensor_send_next))
            if tensor is not None
        }
        wanted = [stream for stream, wants in (("recv_prev", recv_prev), ("recv_next", recv_next)) if wants]
        messages = {stream: self._expect(stream, tensor_shape) for stream in wanted}
        # Receives first: gloo announces them on the connection that the sends fill, and a peer sends once it was told.
        # Where the other end holds every row already, a message is empty and does not cross.
        operations = [
            dist.P2POp(verb, part, self._peer(stream), self.pp_group)
            for verb, stream, part in (
                *((dist.irecv, stream, message.part) for stream, message in messages.items()),
                *((dist.isend, stream, part) for stream, part in parts.items()),
            )
            if part.numel()
        ]
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        arrived = {stream: self._arrive(stream, message) for stream, message in messages.items()}
        return arrived.get("recv_prev"), arrived.get("recv_next"), None

    def _peer(self, stream: str) -> int | None:
        return self.prev_rank if stream.endswith("prev") else self.next_rank

    def _crossing(self, side: Literal["prev", "next"]) -> Crossing:
        return self.boundaries.crossings[self._stage if side == "next" else self._stage - 1]

    def _route(self, stream: str) -> tuple[Direction, Crossing]:
        direction: Direction = "forward" if stream in ("send_next", "recv_prev") else "backward"
        return direction, self._crossing("next" if stream.endswith("next") else "prev")

    def _outgoing(self, stream: str, tensor_SBH: torch.Tensor) -> torch.Tensor:
        direction, crossing = self._route(stream)
        columns, batch, _ = tensor_SBH.shape
        rows = self.boundaries.current.next_rows(stream, columns, batch, tensor_SBH.device)
        return self._pack(direction, crossing, rows.select(tensor_SBH.detach()), rows)

    def _pack(self, direction: Direction, crossing: Crossing, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Code and count; returns what this rank puts on the wire."""
        plan = self.boundaries.current
        part = self._own_part(crossing.encode(direction, x_NH, rows, plan).payload)
        first = self.tp_group is None or self.tp_group.rank() == 0
        dense = x_NH.numel() * BFLOAT16_BYTES if first else 0
        self.ledger.add("pipeline", plan.kind, direction, sent=part.nbytes, dense=dense)
        return part

    def _unpack(
        self, direction: Direction, crossing: Crossing, payload: torch.Tensor, part: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        whole = self._gathered(payload, part, direction)
        return crossing.decode(direction, whole, rows, self.boundaries.current, self.config.pipeline_dtype)

    def _expect(self, stream: str, tensor_shape: Any) -> "_Incoming":
        direction, crossing = self._route(stream)
        columns, batch, _ = tensor_shape
        device = torch.device(torch.cuda.current_device())
        rows = self.boundaries.current.next_rows(stream, columns, batch, device)
        payload = crossing.blank(direction, rows, self.boundaries.current)
        return _Incoming(columns, rows, payload, self._own_part(payload))

    def _arrive(self, stream: str, message: "_Incoming") -> torch.Tensor:
        direction, crossing = self._route(stream)
        decoded_NH = self._unpack(direction, crossing, message.payload, message.part, message.rows)
        return message.rows.scatter(decoded_NH, message.columns).detach().requires_grad_(True)

    def _own_part(self, payload: torch.Tensor) -> torch.Tensor:
        """This tensor rank's equal share of the flattened payload, zero-padded at the end."""
        if self.tp_group is None:
            return payload
        size = self.tp_group.size()
        share = -(-payload.numel() // size)
        flat = torch.nn.functional.pad(payload.reshape(-1), (0, share * size - payload.numel()))
        start = self.tp_group.rank() * share
        return flat[start : start + share].contiguous()

    def _gathered(self, payload: torch.Tensor, part: torch.Tensor, direction: Direction) -> torch.Tensor:
        if self.tp_group is None or not payload.numel():
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp_group.size())]
        dist.all_gather(parts, part, group=self.tp_group)
        self.ledger.add("tensor", self.kind, direction, sent=part.nbytes)
        return torch.cat(parts)[: payload.numel()].view_as(payload)


@dataclass(frozen=True, slots=True)
class _Incoming:
    columns: int
    rows: Rows
    payload: torch.Tensor
    part: torch.Tensor
