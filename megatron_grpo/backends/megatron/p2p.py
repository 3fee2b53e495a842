"""The communication hook: Megatron's point-to-point communicator, with a codec at every boundary.

All public verbs of ``P2PCommunicator`` funnel through ``_communicate``; overriding that one method puts codecs between
the stage and the wire for any schedule that takes ``p2p_communicator=``. The method is private: its signature is pinned
by ``tests/contracts``. Legend: S sequence, B micro-batch, N rows, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_grpo.boundary.build import BoundaryCodecs
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.ops.lowrank import basis_digest, error_sums
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.link import BFLOAT16_BYTES, Direction, Kind, Ledger


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a ``[S, B, H]`` boundary carry tokens. Known to both ends, so padding never crosses.

    Attributes:
        index_N: row numbers in the flattened ``[S * B]`` order.
        positions_N: the place of each row in its sequence.
    """

    index_N: torch.Tensor
    positions_N: torch.Tensor


def all_rows(sequence: int, batch: int, device: torch.device) -> Rows:
    """Every row of ``[S, B]`` counts."""
    index = torch.arange(sequence * batch, device=device)
    return Rows(index, index // batch)


@dataclass(slots=True)
class Pass:
    """What the next schedule run is for, and how its boundaries cross.

    Attributes:
        kind: the ledger's kind.
        rows: one entry a micro-batch, in order; ``None`` means every row.
        dense: cross uncompressed.
        observe: let the codecs learn from this pass; only for dense ones, whose rows both ends hold.
    """

    kind: Kind = "fast"
    rows: Sequence[Rows] | None = None
    dense: bool = False
    observe: bool = False
    seen: dict[str, int] = field(default_factory=dict)

    def next_rows(self, stream: str, sequence: int, batch: int, device: torch.device) -> Rows:
        """Rows of the micro-batch that ``stream`` carries next: micro-batches pass each stream in order."""
        number = self.seen.get(stream, 0)
        self.seen[stream] = number + 1
        return all_rows(sequence, batch, device) if self.rows is None else self.rows[number]


class CodecP2PCommunicator(P2PCommunicator):
    """Sends payloads instead of boundary tensors, counts them, and refreshes the bases.

    Without sequence parallelism every tensor-parallel rank holds the whole boundary, so each sends 1/tp of the payload
    to its peer and the receiving stage gathers it.

    Args:
        pp_group: this rank's pipeline.
        config: the model's Megatron config; ``pipeline_dtype`` is the dtype that stages see.
        previous, following: codecs of the boundary before and after this stage, ``None`` at the ends.
        ledger: where bytes are counted.
        tp_group: tensor-parallel ranks of this stage, ``None`` for one.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        *,
        previous: BoundaryCodecs | None,
        following: BoundaryCodecs | None,
        ledger: Ledger,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        self.previous = previous
        self.following = following
        self.ledger = ledger
        self.tp_group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self.current = Pass()
        self.errors: dict[Direction, torch.Tensor] = {}

    @contextmanager
    def running(self, plan: Pass) -> Iterator[None]:
        """Boundaries inside the block cross as ``plan`` says; afterwards as before."""
        before, self.current = self.current, plan
        try:
            yield
        finally:
            self.current = before

    @property
    def kind(self) -> Kind:
        """What the ledger calls the current pass."""
        return self.current.kind

    def begin_step(self, step: int) -> None:
        """Tell every codec of this rank that a step starts."""
        for codec in self._codecs():
            codec.begin_step(step)

    def commit(self) -> None:
        """Put staged bases to use, on every stage at the same moment."""
        for codec in self._codecs():
            codec.commit()

    def take_errors(self) -> torch.Tensor:
        """fp64 ``[2 directions, 2]``: squared error and squared norm of what this rank sent since the last call."""
        zero = torch.zeros(2, dtype=torch.float64)
        sums = torch.stack([self.errors.get(way, zero).cpu() for way in ("forward", "backward")])
        self.errors.clear()
        return sums

    def refresh(self, dp_group: dist.ProcessGroup) -> None:
        """Stage new bases from what the codecs observed. Collective: every rank, after an observing pass.

        Sketches are summed over ``dp_group``. Both ends of a boundary compute the same Q and compare a digest of it; if
        they differ (QR may, across hardware), the lower stage's Q is sent. Everything that crosses counts as basis.
        """
        for boundary, peer, lower in (
            (self.previous, self.prev_rank, False),
            (self.following, self.next_rank, True),
        ):
            if boundary is None:
                continue
            directions: tuple[Direction, ...] = ("forward", "backward")
            for way, codec in zip(directions, boundary.learners(), strict=True):
                basis = codec.basis
                if basis is None or basis.sketch is None:
                    continue
                sketch = basis.sketch
                if dp_group.size() > 1:
                    self.ledger.add("data", "basis", way, sent=sketch.nbytes)
                    sum_over(sketch, dp_group)
                self._agree(basis.stage(sketch), peer, way, lower=lower)

    def _agree(self, basis_Hr: torch.Tensor, peer: int | None, way: Direction, *, lower: bool) -> None:
        mine = basis_digest(basis_Hr).to(basis_Hr.device)
        theirs = torch.empty_like(mine)
        self._swap(mine, theirs, peer)
        self.ledger.add("pipeline", "basis", way, sent=mine.nbytes)
        if torch.equal(mine, theirs):
            return
        if lower:
            self.ledger.add("pipeline", "basis", way, sent=basis_Hr.nbytes)
            dist.send(basis_Hr, dst=peer, group=self.pp_group)
        else:
            dist.recv(basis_Hr, src=peer, group=self.pp_group)

    def _swap(self, outgoing: torch.Tensor, incoming: torch.Tensor, peer: int | None) -> None:
        operations = [
            dist.P2POp(dist.isend, outgoing, peer, self.pp_group),
            dist.P2POp(dist.irecv, incoming, peer, self.pp_group),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    def _codecs(self) -> list[Codec]:
        return [codec for boundary in (self.previous, self.following) if boundary for codec in boundary.learners()]

    def send_rows(self, x_NH: torch.Tensor, positions_N: torch.Tensor) -> dist.Work:
        """Send rows to the next stage outside any schedule (the sampler's way), coded as the current pass says.

        Returns at once; the caller waits for the returned work before the run of sends ends.
        """
        part = self._pack("forward", self._boundary("following"), x_NH, positions_N)
        work = dist.isend(part, dst=self.next_rank, group=self.pp_group)
        assert work is not None
        return work

    def receive_rows(self, positions_N: torch.Tensor) -> torch.Tensor:
        """Receive what the previous stage's :meth:`send_rows` sent for the same rows, decoded: ``[N, H]``."""
        boundary = self._boundary("previous")
        payload, part = self._blank("forward", boundary, positions_N)
        dist.recv(part, src=self.prev_rank, group=self.pp_group)
        return self._unpack("forward", boundary, payload, part, positions_N)

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
        operations: list[dist.P2POp] = []
        for stream, tensor in (("send_prev", tensor_send_prev), ("send_next", tensor_send_next)):
            if tensor is not None:
                part = self._outgoing(stream, tensor)
                operations.append(dist.P2POp(dist.isend, part, self._peer(stream), self.pp_group))
        wanted = [stream for stream, wants in (("recv_prev", recv_prev), ("recv_next", recv_next)) if wants]
        messages = {stream: self._expect(stream, tensor_shape) for stream in wanted}
        for stream, message in messages.items():
            operations.append(dist.P2POp(dist.irecv, message.part, self._peer(stream), self.pp_group))
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        arrived = {stream: self._arrive(stream, message) for stream, message in messages.items()}
        return arrived.get("recv_prev"), arrived.get("recv_next"), None

    def _peer(self, stream: str) -> int | None:
        return self.prev_rank if stream.endswith("prev") else self.next_rank

    def _boundary(self, side: Literal["previous", "following"]) -> BoundaryCodecs:
        boundary: BoundaryCodecs | None = getattr(self, side)
        assert boundary is not None, f"no {side} boundary at this end of the pipeline"
        return boundary

    def _route(self, stream: str) -> tuple[Direction, BoundaryCodecs]:
        direction: Direction = "forward" if stream in ("send_next", "recv_prev") else "backward"
        return direction, self._boundary("following" if stream.endswith("next") else "previous")

    def _outgoing(self, stream: str, tensor_SBH: torch.Tensor) -> torch.Tensor:
        direction, boundary = self._route(stream)
        sequence, batch, hidden = tensor_SBH.shape
        rows = self.current.next_rows(stream, sequence, batch, tensor_SBH.device)
        x_NH = tensor_SBH.detach().reshape(sequence * batch, hidden)
        if len(rows.index_N) < len(x_NH):
            x_NH = x_NH[rows.index_N]
        return self._pack(direction, boundary, x_NH, rows.positions_N)

    def _pack(
        self, direction: Direction, boundary: BoundaryCodecs, x_NH: torch.Tensor, positions_N: torch.Tensor
    ) -> torch.Tensor:
        """Encode, learn, measure and count; returns what this rank puts on the wire."""
        plan = self.current
        codec = boundary.choose(direction, dense=plan.dense)
        payload = codec.encode(x_NH, positions_N)
        if plan.kind == "fast" or plan.observe:
            decoded_NH = codec.decode(payload, positions_N, x_NH.dtype)
            if plan.kind == "fast":
                self.errors[direction] = self.errors.get(direction, 0) + error_sums(x_NH, decoded_NH)
            if plan.observe:
                boundary.choose(direction, dense=False).observe(decoded_NH)
        part = self._own_part(payload)
        first = self.tp_group is None or self.tp_group.rank() == 0
        dense = x_NH.numel() * BFLOAT16_BYTES if first else 0
        self.ledger.add("pipeline", plan.kind, direction, sent=part.nbytes, dense=dense)
        return part

    def _blank(
        self, direction: Direction, boundary: BoundaryCodecs, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        payload = boundary.choose(direction, dense=self.current.dense).payload(len(positions_N), positions_N)
        return payload, self._own_part(payload)

    def _unpack(
        self,
        direction: Direction,
        boundary: BoundaryCodecs,
        payload: torch.Tensor,
        part: torch.Tensor,
        positions_N: torch.Tensor,
    ) -> torch.Tensor:
        codec = boundary.choose(direction, dense=self.current.dense)
        whole = self._gathered(payload, part, direction)
        decoded_NH = codec.decode(whole, positions_N, self.config.pipeline_dtype)
        if self.current.observe:
            boundary.choose(direction, dense=False).observe(decoded_NH)
        return decoded_NH

    def _expect(self, stream: str, tensor_shape: Any) -> "_Incoming":
        direction, boundary = self._route(stream)
        sequence, batch, hidden = tensor_shape
        rows = self.current.next_rows(stream, sequence, batch, torch.device(torch.cuda.current_device()))
        payload, part = self._blank(direction, boundary, rows.positions_N)
        return _Incoming((sequence, batch, hidden), rows, payload, part)

    def _arrive(self, stream: str, message: "_Incoming") -> torch.Tensor:
        direction, boundary = self._route(stream)
        rows = message.rows
        decoded_NH = self._unpack(direction, boundary, message.payload, message.part, rows.positions_N)
        sequence, batch, hidden = message.shape
        if len(decoded_NH) < sequence * batch:
            received_NH = decoded_NH
            decoded_NH = received_NH.new_zeros(sequence * batch, hidden)
            decoded_NH[rows.index_N] = received_NH
        return decoded_NH.view(sequence, batch, hidden).detach().requires_grad_(True)

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
        if self.tp_group is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp_group.size())]
        dist.all_gather(parts, part, group=self.tp_group)
        self.ledger.add("tensor", self.current.kind, direction, sent=part.nbytes)
        return torch.cat(parts)[: payload.numel()].view_as(payload)


@dataclass(frozen=True, slots=True)
class _Incoming:
    shape: tuple[int, int, int]
    rows: Rows
    payload: torch.Tensor
    part: torch.Tensor
