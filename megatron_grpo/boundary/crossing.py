"""One boundary as one rank sees it: coding, learning, measuring and counting, whatever wire lies between the ends.

Legend: N rows, H hidden.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch

from megatron_grpo.boundary.build import BoundaryCodecs, build_codecs
from megatron_grpo.boundary.cache import CacheSettings, RowCache
from megatron_grpo.boundary.codec import Codec, Encoded, Learner
from megatron_grpo.boundary.tensor import TensorBases
from megatron_grpo.config import DIRECTIONS, BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import error_sums
from megatron_grpo.ops.rows import Rows, all_rows
from megatron_grpo.parallel.link import Kind

Measured = Literal["forward", "backward", "drift"]
MEASURED: tuple[Measured, ...] = (*DIRECTIONS, "drift")
"""What errors are added up of: what crossed, or served in its place, by direction; and of rows that served, how far the
sender's had moved away."""


@dataclass(slots=True)
class Pass:
    """What the next schedule run is for, and how its boundaries cross.

    Attributes:
        kind: the ledger's kind.
        rows: one entry a micro-batch, in order; ``None`` means every row.
        dense: cross uncompressed.
        observe: who learns from this pass: ``both`` ends, from the rows that both hold after a dense crossing; the
            ``sender``, from its own; both from the ``gradients`` alone, which then cross dense; or nobody.
        keeps: step whose rollout this is; both ends keep the rows that cross forward.
        reuses: step whose kept rows serve in place of those that would cross forward; a dense pass is served by rows
            that crossed dense, or not at all.
        delta: of the rows that serve so, what they have moved since crosses (uncompressed in a dense pass), and both
            ends keep that.
        dense_gradients: gradients cross uncompressed between stages, whatever else does not.
    """

    kind: Kind = "fast"
    rows: Sequence[Rows] | None = None
    dense: bool = False
    observe: Literal["both", "sender", "gradients"] | None = None
    keeps: int | None = None
    reuses: int | None = None
    delta: bool = False
    dense_gradients: bool = False
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
    """The codecs of one boundary at work.

    Attributes:
        caches: by step, what both ends keep of its rollout; see :mod:`megatron_grpo.boundary.cache`.
    """

    def __init__(self, codecs: BoundaryCodecs) -> None:
        self.codecs = codecs
        self.caches: dict[int, RowCache] = {}
        self._sums: dict[Measured, torch.Tensor] = {}  # on the rows' device: reading one would wait for it

    def codec(self, direction: Direction, plan: Pass) -> Codec:
        """The codec that rows cross by."""
        cache = self._cache(direction, plan)
        if direction == "backward" and plan.kind == "anchor":
            return self.codecs.anchor_backward
        if direction == "backward" and plan.dense_gradients:
            return self.codecs.dense_backward
        dense = plan.dense_in(direction) if cache is None else cache.dense
        return self.codecs.choose(direction, dense=dense, fast=plan.kind == "fast")

    def encode(self, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass) -> Encoded:
        """The sender's part: code, measure, keep, learn."""
        cache = self._cache(direction, plan)
        wants = plan.kind == "fast" or plan.teaches_both(direction) or self._keeper(direction, plan) is not None
        if cache is not None:
            encoded = self._encode_rest(cache, direction, x_NH, rows, plan)
        else:
            encoded = self._encode_all(direction, x_NH, rows, plan, decoded=wants)
        learner = self._learner(direction)
        if encoded.decoded_NH is not None and wants:
            self._keep(direction, encoded.decoded_NH, rows, plan)
            if plan.kind == "fast":
                self._measure(direction, x_NH, encoded.decoded_NH)
            if plan.teaches_both(direction):
                if learner is not None:
                    learner.observe(encoded.decoded_NH, rows)
                self.learn_gradient(direction, encoded.decoded_NH, plan)
        if plan.observe == "sender" and learner is not None:
            learner.observe(x_NH, rows)
        return encoded

    def _encode_all(
        self, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass, *, decoded: bool
    ) -> Encoded:
        codec = self.codec(direction, plan)
        encoded = codec.encode(x_NH, rows)
        if decoded and encoded.decoded_NH is None:
            return Encoded(encoded.payload, codec.decode(encoded.payload, rows, x_NH.dtype))
        return encoded

    def _encode_rest(
        self, cache: RowCache, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass
    ) -> Encoded:
        """What crosses where the other end holds most rows already, and what it then has."""
        held_N = cache.holds(rows)
        rest = rows.where(~held_N)
        parts: list[torch.Tensor] = []
        decoded_NH = torch.empty_like(x_NH)
        if len(rest):
            encoded = self._encode_all(direction, x_NH[~held_N], rest, plan, decoded=True)
            assert encoded.decoded_NH is not None
            decoded_NH[~held_N] = encoded.decoded_NH
            parts.append(encoded.payload)
        held = rows.where(held_N)
        if len(held):
            before_nH = cache.get(held, x_NH.dtype)
            if plan.kind == "fast" and cache.dense:
                self._measure("drift", x_NH[held_N], before_nH)
            if plan.delta:
                moved = self._delta(plan).encode(x_NH[held_N] - before_nH, held)
                parts.append(moved.payload)
                before_nH = self._moved(cache, before_nH, moved.payload, held, plan)
            decoded_NH[held_N] = before_nH
        return Encoded(joined(parts, x_NH.device), decoded_NH)

    def decode(
        self, direction: Direction, payload: torch.Tensor, rows: Rows, plan: Pass, dtype: torch.dtype
    ) -> torch.Tensor:
        """The receiver's part: decode, keep and learn."""
        cache = self._cache(direction, plan)
        if cache is None:
            decoded_NH = self.codec(direction, plan).decode(payload, rows, dtype)
        else:
            decoded_NH = self._decode_rest(cache, direction, payload, rows, plan, dtype)
        self._keep(direction, decoded_NH, rows, plan)
        learner = self._learner(direction)
        if plan.teaches_both(direction) and learner is not None:
            learner.observe(decoded_NH, rows)
        self.learn_gradient(direction, decoded_NH, plan)
        return decoded_NH

    def _decode_rest(
        self,
        cache: RowCache,
        direction: Direction,
        payload: torch.Tensor,
        rows: Rows,
        plan: Pass,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        held_N = cache.holds(rows)
        rest, held = rows.where(~held_N), rows.where(held_N)
        decoded_NH = torch.empty(len(rows), self.codecs.hidden, dtype=dtype, device=rows.index_N.device)
        parts = parted(payload, self._blanks(cache, direction, rows, plan))
        if len(rest):
            decoded_NH[~held_N] = self.codec(direction, plan).decode(parts.pop(0), rest, dtype)
        if len(held):
            before_nH = cache.get(held, dtype)
            if plan.delta:
                before_nH = self._moved(cache, before_nH, parts.pop(0), held, plan)
            decoded_NH[held_N] = before_nH
        return decoded_NH

    def _delta(self, plan: Pass) -> Codec:
        """What the movement of rows crosses by."""
        return self.codecs.dense_forward if plan.dense else self.codecs.delta

    def _moved(
        self, cache: RowCache, before_nH: torch.Tensor, payload: torch.Tensor, held: Rows, plan: Pass
    ) -> torch.Tensor:
        """Rows as both ends hold them from now on."""
        cache.replace(held, before_nH + self._delta(plan).decode(payload, held, before_nH.dtype))
        return cache.get(held, before_nH.dtype)

    def _cache(self, direction: Direction, plan: Pass) -> RowCache | None:
        """What serves in place of a crossing; ``None`` where rows cross."""
        if direction == "backward" or plan.reuses is None:
            return None
        cache = self.caches.get(plan.reuses)
        return None if cache is not None and plan.dense and not cache.dense else cache

    def _keeper(self, direction: Direction, plan: Pass) -> RowCache | None:
        return None if direction == "backward" or plan.keeps is None else self.caches[plan.keeps]

    def _keep(self, direction: Direction, decoded_NH: torch.Tensor, rows: Rows, plan: Pass) -> None:
        keeper = self._keeper(direction, plan)
        if keeper is not None:
            # A dense row is worth what its payload is; a coded one is whatever the codec makes of it.
            keeper.put(rows, decoded_NH, self.codecs.dense_forward.dtype if keeper.dense else decoded_NH.dtype)

    def learn_gradient(self, direction: Direction, decoded_NH: torch.Tensor, plan: Pass) -> None:
        """What a gradient that crossed says of the rows that cross forward: of their sender, or of both ends."""
        learner = self._learner("forward")
        if direction == "backward" and plan.observe is not None and learner is not None:
            learner.observe_gradient(decoded_NH)

    def _learner(self, direction: Direction) -> Learner | None:
        """What rows of ``direction`` teach: a shared basis learns from the forward ones alone."""
        return next((learner for way, learner in self.codecs.learners() if way == direction), None)

    def _measure(self, what: "Measured", x_NH: torch.Tensor, other_NH: torch.Tensor) -> None:
        sums = error_sums(x_NH, other_NH)
        self._sums[what] = self._sums[what] + sums if what in self._sums else sums

    def take_errors(self) -> torch.Tensor:
        """fp64 ``[3, 2]`` since the last call, of ``MEASURED``: squared error and squared norm of the fast rows sent
        here."""
        zero = torch.zeros(2, dtype=torch.float64)
        sums = torch.stack([self._sums.get(what, zero).cpu() for what in MEASURED])
        self._sums.clear()
        return sums

    def blank(self, direction: Direction, rows: Rows, plan: Pass) -> torch.Tensor:
        """An empty payload for the receiver; one of no bytes does not cross."""
        cache = self._cache(direction, plan)
        if cache is None:
            return self.codec(direction, plan).payload(rows)
        return joined(self._blanks(cache, direction, rows, plan), rows.index_N.device)

    def _blanks(self, cache: RowCache, direction: Direction, rows: Rows, plan: Pass) -> list[torch.Tensor]:
        """Of the rows that are not held, and of what the others have moved."""
        held_N = cache.holds(rows)
        rest, held = rows.where(~held_N), rows.where(held_N)
        blanks = [self.codec(direction, plan).payload(rest)] if len(rest) else []
        return [*blanks, self._delta(plan).payload(held)] if plan.delta and len(held) else blanks


def joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Payloads as one, uint8."""
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def parted(payload: torch.Tensor, blanks: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of :func:`joined`: parts like ``blanks``."""
    sizes = [blank.nbytes for blank in blanks]
    ends = list(accumulate(sizes))
    return [
        payload[end - size : end].clone().view(blank.dtype).view(blank.shape)
        for size, end, blank in zip(sizes, ends, blanks, strict=True)
    ]


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

    def set_backward_budget(self, share: float) -> None:
        """Gradients cross in ``share`` of a bfloat16 crossing from now on; both ends call it at the same moment."""
        for crossing in self.crossings.values():
            crossing.codecs.set_backward_budget(share)

    def open_caches(self, step: int, settings: CacheSettings, *, dense: bool) -> None:
        """Begin to keep the rollout of ``step``, which crosses dense or not."""
        for crossing in self.crossings.values():
            crossing.caches[step] = RowCache(settings, dense=dense)

    def drop_caches(self, needed: Container[int]) -> None:
        """Let go of all rollouts but those of the steps that an anchor needs and that can serve one: dense ones."""
        for crossing in self.crossings.values():
            caches = crossing.caches.items()
            crossing.caches = {step: cache for step, cache in caches if step in needed and cache.dense}

    def forget(self, step: int, owners: Sequence[int]) -> None:
        """Let go of sequences of the rollout of ``step`` that were drawn and will not be trained on."""
        for crossing in self.crossings.values():
            crossing.caches[step].forget(owners)

    def caches_dict(self, steps: Container[int]) -> dict[str, Any]:
        """What is kept of the rollouts of ``steps``, for a checkpoint."""
        return {
            str(index): {step: cache.state_dict() for step, cache in crossing.caches.items() if step in steps}
            for index, crossing in self.crossings.items()
        }

    def load_caches(self, state: dict[str, Any], settings: CacheSettings, device: torch.device) -> None:
        """Inverse of :meth:`caches_dict`."""
        for index, crossing in self.crossings.items():
            for step, saved in state[str(index)].items():
                crossing.caches[step] = cache = RowCache(settings, dense=saved["dense"])
                cache.load_state_dict(saved, device)

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
        """fp64 ``[boundaries, 3, 2]`` since the last call, what this rank sent entered: they add up."""
        table = torch.zeros(max(self._total, 1), len(MEASURED), 2, dtype=torch.float64)
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
