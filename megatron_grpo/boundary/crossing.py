"""One boundary as one rank sees it: coding, learning, measuring and counting, whatever wire lies between the ends.

Legend: N rows, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_grpo.boundary.build import BoundaryCodecs, build_codecs
from megatron_grpo.boundary.codec import Codec, Encoded, Learner
from megatron_grpo.boundary.tensor import TensorBases
from megatron_grpo.config import DIRECTIONS, BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import error_sums
from megatron_grpo.ops.rows import Rows, all_rows
from megatron_grpo.parallel.link import Kind


@dataclass(slots=True)
class Pass:
    """What the next schedule run is for, and how its boundaries cross.

    Attributes:
        kind: the ledger's kind.
        rows: one entry a micro-batch, in order; ``None`` means every row.
        dense: cross uncompressed.
        observe: who learns from this pass: ``both`` ends, from the rows that both hold after a dense crossing; the
            ``sender``, from its own; both from the ``gradients`` alone, which then cross dense; or nobody.
    """

    kind: Kind = "fast"
    rows: Sequence[Rows] | None = None
    dense: bool = False
    observe: Literal["both", "sender", "gradients"] | None = None
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.observe != "both" or self.dense, "both ends hold the same rows only where they cross dense"

    def dense_in(self, direction: Direction) -> bool:
        """Whether rows of ``direction`` cross uncompressed."""
        return self.dense or (self.observe == "gradients" and direction == "backward")

    def teaches_both(self, direction: Direction) -> bool:
        """Whether both ends learn from the rows of ``direction``."""
        return self.observe is not None and self.observe != "sender" and self.dense_in(direction)

    def next_rows(self, stream: str, columns: int, batch: int, device: torch.device) -> Rows:
        """Rows of the micro-batch that ``stream`` carries next: micro-batches pass each stream in order."""
        number = self.seen.get(stream, 0)
        self.seen[stream] = number + 1
        return all_rows(columns, batch, device) if self.rows is None else self.rows[number]


class Crossing:
    """The codecs of one boundary at work."""

    def __init__(self, codecs: BoundaryCodecs) -> None:
        self.codecs = codecs
        self._errors: dict[Direction, torch.Tensor] = {}  # on the rows' device: reading one would wait for it

    def codec(self, direction: Direction, plan: Pass) -> Codec:
        """The codec that rows cross by."""
        return self.codecs.choose(direction, dense=plan.dense_in(direction), fast=plan.kind == "fast")

    def encode(self, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass) -> Encoded:
        """The sender's part: code, measure, learn."""
        codec = self.codec(direction, plan)
        encoded = codec.encode(x_NH, rows)
        learner = self._learner(direction)
        if plan.kind == "fast" or plan.teaches_both(direction):
            if encoded.decoded_NH is None:
                encoded = Encoded(encoded.payload, codec.decode(encoded.payload, rows, x_NH.dtype))
            assert encoded.decoded_NH is not None
            if plan.kind == "fast":
                sums = error_sums(x_NH, encoded.decoded_NH)
                self._errors[direction] = self._errors[direction] + sums if direction in self._errors else sums
            if plan.teaches_both(direction):
                if learner is not None:
                    learner.observe(encoded.decoded_NH, rows)
                self.learn_gradient(direction, encoded.decoded_NH, plan)
        if plan.observe == "sender" and learner is not None:
            learner.observe(x_NH, rows)
        return encoded

    def decode(
        self, direction: Direction, payload: torch.Tensor, rows: Rows, plan: Pass, dtype: torch.dtype
    ) -> torch.Tensor:
        """The receiver's part: decode and learn."""
        decoded_NH = self.codec(direction, plan).decode(payload, rows, dtype)
        learner = self._learner(direction)
        if plan.teaches_both(direction) and learner is not None:
            learner.observe(decoded_NH, rows)
        self.learn_gradient(direction, decoded_NH, plan)
        return decoded_NH

    def learn_gradient(self, direction: Direction, decoded_NH: torch.Tensor, plan: Pass) -> None:
        """What a gradient that crossed says of the rows that cross forward: of their sender, or of both ends."""
        learner = self._learner("forward")
        if direction == "backward" and plan.observe is not None and learner is not None:
            learner.observe_gradient(decoded_NH)

    def _learner(self, direction: Direction) -> Learner | None:
        """What rows of ``direction`` teach: a shared basis learns from the forward ones alone."""
        return next((learner for way, learner in self.codecs.learners() if way == direction), None)

    def take_errors(self) -> torch.Tensor:
        """fp64 ``[2 directions, 2]`` since the last call: squared error and squared norm of the fast rows sent here."""
        zero = torch.zeros(2, dtype=torch.float64)
        sums = torch.stack([self._errors.get(way, zero).cpu() for way in DIRECTIONS])
        self._errors.clear()
        return sums

    def blank(self, direction: Direction, rows: Rows, plan: Pass) -> torch.Tensor:
        """An empty payload for the receiver."""
        return self.codec(direction, plan).payload(rows)


class Boundaries:
    """The boundaries that a rank is an end of, and the pass that is under way. See :func:`build_boundaries`.

    Args:
        crossings: by index; boundary ``i`` joins stage ``i`` to ``i + 1``.
        total: boundaries of the whole pipeline.
        tensor: the bases of the tensor link of this rank's layers, where that is compressed, too.
    """

    def __init__(self, crossings: dict[int, Crossing], total: int, tensor: TensorBases | None = None) -> None:
        self.crossings = crossings
        self.tensor = tensor
        self._total = total
        self.current = Pass()

    @contextmanager
    def running(self, plan: Pass) -> Iterator[None]:
        """Boundaries inside the block cross as ``plan`` says; afterwards as before."""
        before, self.current = self.current, plan
        try:
            yield
        finally:
            self.current = before

    def begin_step(self, step: int) -> None:
        """Tell every codec of this rank that a step starts."""
        for crossing in self.crossings.values():
            for codec in crossing.codecs.coding():
                codec.begin_step(step)

    def commit(self) -> None:
        """Put what is staged to use, on every stage at the same moment."""
        for _, learner in self._learners():
            learner.commit()

    def _learners(self) -> list[tuple[Direction, Learner]]:
        pairs = [pair for crossing in self.crossings.values() for pair in crossing.codecs.learners()]
        return pairs if self.tensor is None else [*pairs, *self.tensor.all()]

    @property
    def learns(self) -> bool:
        """Whether anything is fitted, here or elsewhere: codecs are alike at every boundary."""
        return bool(self._learners())

    @property
    def learns_backward(self) -> bool:
        """Whether gradients are coded by something fitted to them."""
        return any(way == "backward" for way, _ in self._learners())

    @property
    def learns_from_gradients(self) -> bool:
        """Whether forward rows are coded by what their gradients say of them."""
        return any(way == "forward" and learner.wants_gradients for way, learner in self._learners())

    def take_errors(self) -> torch.Tensor:
        """fp64 ``[boundaries, 2 directions, 2]`` since the last call, what this rank sent entered: they add up."""
        table = torch.zeros(max(self._total, 1), len(DIRECTIONS), 2, dtype=torch.float64)
        for index, crossing in self.crossings.items():
            table[index] += crossing.take_errors()
        return table

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {str(index): crossing.codecs.state_dict() for index, crossing in self.crossings.items()}
        return state if self.tensor is None else state | {"tensor": self.tensor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.tensor is not None:
            self.tensor.load_state_dict(state["tensor"])
        for index, crossing in self.crossings.items():
            crossing.codecs.load_state_dict(state[str(index)])


def build_boundaries(
    cfg: BoundaryConfig,
    *,
    stages: int,
    stage: int | None,
    hidden: int,
    seed: int,
    embedding_VH: torch.Tensor | None = None,
    layers: range | None = None,
) -> Boundaries:
    """The boundaries of a pipeline of ``stages`` that ``stage`` is an end of; all of them for ``None``.

    Args:
        layers: those of this stage, where the tensor link is compressed.
    """
    total = stages - 1
    indices = range(total) if stage is None else [index for index in (stage - 1, stage) if 0 <= index < total]
    crossings = {
        index: Crossing(build_codecs(cfg, hidden=hidden, index=index, seed=seed, embedding_VH=embedding_VH))
        for index in indices
    }
    tensor = None if layers is None else TensorBases(cfg, layers=layers, hidden=hidden, seed=seed)
    return Boundaries(crossings, total, tensor)
