"""Bytes that a rank of each stage holds, by part, and which of them are in the host's memory.

Legend: L layers, H hidden, Q queries, K keys, F feed-forward, V vocabulary (each as one tensor rank holds it), B
sequences of a micro-batch, T columns, b bytes of a number of the model.
"""

from dataclasses import dataclass, field
from math import ceil

from megatron_grpo.anchor.schedule import AnchorSchedule
from megatron_grpo.config import DIRECTIONS, BoundaryConfig, Config, Direction
from megatron_grpo.conversion.families import ModelShape

from .sizes import BYTES, StageSize, stage_sizes
from .sums import residual_bytes, tensor_basis_bytes
from .traffic import PACKED_BITS, fit_size, longest_lengths, moments_size, waterfill_channels
from .zero import Engine, read_engine

FP32 = 4
CACHE_BLOCK = 2**22
"""``boundary.store.BLOCK_BYTES``, without torch."""
STATIC = ("weights", "optimizer", "snapshots", "M", "reference", "codecs", "kept rows", "buffers")
SAMPLING = ("gathered weights", "KV cache")
TRAINING = ("live weights", "gradients", "averaged gradients", "compared gradients", "activations", "logits")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one rank of a stage, in bytes, at the longest lengths.

    Attributes:
        parts: on the device, by part; those of ``SAMPLING`` and of ``TRAINING`` are never there at once.
        host: moved to the host's memory, by part.
        disk: bytes of files, by part.
    """

    parts: dict[str, float]
    host: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """The most that is there at once on the device."""
        sampling, training = (sum(self.parts.get(name, 0.0) for name in phase) for phase in (SAMPLING, TRAINING))
        return sum(self.parts.get(name, 0.0) for name in STATIC) + max(sampling, training)


def stage_memory(config: Config, shape: ModelShape) -> list[StageMemory]:
    """Every stage, first to last; with all stages in one process one entry."""
    engine = read_engine(config)
    sizes = stage_sizes(shape, pipeline=config.pipeline_ranks, tensor=config.parallel.tensor)
    return [_Stage(config, shape, engine, sizes, number).memory() for number in range(len(sizes))]


class _Stage:
    """The parts of one stage's rank."""

    def __init__(self, config: Config, shape: ModelShape, engine: Engine, sizes: list[StageSize], number: int) -> None:
        self._config, self._shape, self._engine = config, shape, engine
        self._size, self._number, self._stages = sizes[number], number, len(sizes)
        self._b = BYTES[config.model.dtype]
        self._shard = self._size.parameters / (config.parallel.data if engine.stage else 1)
        self._held = self._size.parameters if engine.stage < 3 else self._shard

    def memory(self) -> StageMemory:
        engine = self._engine
        parts = {
            "weights": self._held * self._b,
            "optimizer": self._shard * FP32 * (3 if engine.stage else 2),
            **self._anchor(),
            "reference": self._held * self._b if self._config.grpo.kl_coef > 0 else 0.0,
            "codecs": self._codecs(),
            "kept rows": self._kept_rows(),
            "buffers": float(engine.bucket * self._b) if engine.stage == 3 else 0.0,
            **self._gathered(),
            "KV cache": self._cache(),
            "gradients": float(self._size.parameters * self._b),
            "averaged gradients": self._averaged(),
            "compared gradients": self._compared(),
            "activations": self._activations(),
            "logits": self._logits(),
        }
        place = self._config.boundary.cache_place
        moved = [
            *(("optimizer", "averaged gradients", "compared gradients") if engine.optimizer_on_host else ()),
            *(("weights",) if engine.weights_on_host else ()),
            *engine.anchor_on_host,
            *(("kept rows",) if place == "host" else ()),
        ]
        there = {name: size for name, size in parts.items() if size}
        files = {name: there.pop(name) for name in ("kept rows",) if place == "disk" and name in there}
        return StageMemory(
            {name: size for name, size in there.items() if name not in moved},
            {name: size for name, size in there.items() if name in moved},
            files,
        )

    def _averaged(self) -> float:
        """Shards as the optimizer takes them; ZeRO 3 moves a second copy of them to the host."""
        engine = self._engine
        copies = 2 if engine.stage == 3 and engine.optimizer_on_host else min(engine.stage, 1)
        return copies * self._shard * engine.gradient_bytes

    def _compared(self) -> float:
        """What a check of the backward budget compares coded gradients with, of stages before the last boundary."""
        before = self._number < self._stages - 1 or self._config.parallel.placement == "one_process"
        checks = self._config.boundary.budgets_itself and before
        return float(self._shard * self._engine.gradient_bytes) if checks else 0.0

    def _gathered(self) -> dict[str, float]:
        """ZeRO 3: whole weights beside the shares, of the stage or of a layer."""
        if self._engine.stage < 3:
            return {}
        size = self._size
        live = min(size.parameters, self._engine.max_live)
        sampling = size.largest if self._engine.gathers_layers else size.parameters
        return {"gathered weights": float(sampling * self._b), "live weights": float(live * self._b)}

    def _anchor(self) -> dict[str, float]:
        """Weights of the ticks that a later anchor replays, M, and what merger and gate keep, all in shards."""
        anchor, merger = self._config.anchor, self._config.merger
        if not anchor.enabled:
            return {}
        corrects = merger.kind == "delayed_ef"
        each = self._held * self._b + (FP32 * self._shard if corrects else 0.0)
        m = self._shard / 8 if merger.packed_signs else self._shard * FP32
        kept = corrects + (merger.gate != "none")
        return {"snapshots": snapshots(anchor.cadence, anchor.delay) * each, "M": m + kept * self._shard * FP32}

    def _cache(self) -> float:
        """2 L K T for every sequence in flight."""
        config, lengths = self._config, longest_lengths(self._config)
        batch = ceil(config.sequences_per_step / config.parallel.data / config.sampling_micro_batches)
        layers = len(self._size.layers)
        return 2 * layers * self._size.keys * lengths.columns * batch * config.in_flight * self._b

    def _activations(self) -> float:
        """What the backward pass needs of all micro-batches that 1F1B has under way on this stage."""
        config, size, columns = self._config, self._size, longest_lengths(self._config).columns
        tokens = config.train.micro_batch * columns
        whole = tokens * self._layer(columns)
        under_way = min(self._stages - self._number, config.micro_batches)
        if config.model.recompute:
            return under_way * len(size.layers) * tokens * self._shape.hidden * self._b + whole
        return under_way * len(size.layers) * whole

    def _layer(self, columns: float) -> float:
        """Bytes a token and layer: two norms in float32 (in and out), and in the model's format their outputs, queries,
        repeated keys and values, what attention returns, and five of the MLP; and a row of scores for every head."""
        size, hidden, b = self._size, self._shape.hidden, self._b
        heads = size.queries // self._shape.head_dim
        scores = heads * columns * (FP32 + (b if b != FP32 else 0))
        return 4 * hidden * FP32 + b * (2 * hidden + 4 * size.queries + 5 * size.ffn) + scores

    def _logits(self) -> float:
        """Of all columns, with their gradient; and three float32 copies of those that predict the response."""
        config, lengths = self._config, longest_lengths(self._config)
        rows = config.train.micro_batch * self._size.vocab
        return rows * (2 * self._b * lengths.columns + 3 * FP32 * lengths.longest)

    def _ends(self) -> int:
        """Boundaries that this rank is an end of."""
        if self._config.parallel.placement == "one_process":
            return self._config.parallel.pipeline - 1
        return (self._number > 0) + (self._number < self._stages - 1)

    def _kept_rows(self) -> float:
        """``boundary.send_once``: rows of a replica's rollout, and of those that an anchor will replay, in blocks."""
        config, boundary, anchor = self._config, self._config.boundary, self._config.anchor
        if boundary.send_once == "off":
            return 0.0
        coded, dense = self._b, BYTES[boundary.dense_payload("forward")]
        row = self._shape.hidden * {"codec": coded, "dense": dense, "auto": max(coded, dense)}[config.rollout.path]
        # A replica whose groups all live draws along with one that samples anew.
        spare = config.grpo.dead_groups == "resample" and config.parallel.data > 1
        sequences = config.sequences_per_step // config.parallel.data + spare
        block = max(1, CACHE_BLOCK // row)
        held = ceil(sequences * longest_lengths(config).rows / block) * block * row
        if boundary.cache_limit is not None:
            held = min(held, boundary.cache_limit)
        rollouts = 1
        if anchor.enabled:  # which replays none that is coded
            only_first = config.rollout.path == "codec"
            rollouts += int(anchor.bootstrap == "dense") if only_first else snapshots(anchor.cadence, anchor.delay)
        return float(self._ends() * held * rollouts)

    def _codecs(self) -> float:
        """Of the boundaries that this rank is an end of, of its sums over tensor ranks and of its gradients."""
        config = self._config
        ends = self._ends() * (1 + (config.parallel.placement == "one_process"))
        rows = config.train.micro_batch * longest_lengths(config).columns
        links = tensor_basis_bytes(config.boundary, self._size, self._shape.hidden)
        return (
            ends * codec_bytes(config.boundary_at_work, self._shape, rows)
            + links
            + residual_bytes(config.boundary, self._size)
        )


def codec_bytes(boundary: BoundaryConfig, shape: ModelShape, rows: float) -> float:
    """What an end of a boundary keeps: the embedding that rows are predicted from, fits, sums over rows, remainders."""
    total = 0.0
    if boundary.prediction != "none":
        total += FP32 * shape.vocab * shape.hidden
    if boundary.feeds_back:
        total += FP32 * rows * shape.hidden
    return total + sum(_fit_state(boundary, side, shape.hidden) for side in DIRECTIONS)


def _fit_state(boundary: BoundaryConfig, side: Direction, hidden: int) -> float:
    """A fit as it crosses and in float32; second moments twice, those of now and those of before."""
    if boundary.codec_of(side) != "lowrank":
        return 0.0
    if not boundary.packed(side) or (side == "backward" and boundary.payload_of(side) in PACKED_BITS):
        return 3.0 * FP32 * (hidden + 1) * boundary.rank_of(hidden)
    packed = boundary.payload_of(side) in PACKED_BITS
    kept = boundary.rank_of(hidden) if packed else waterfill_channels(boundary, side, hidden)
    moments = 2 * FP32 * moments_size(boundary, side, hidden) if boundary.basis != "random" else 0
    return (2 + FP32) * fit_size(boundary, side, hidden) + FP32 * hidden * kept + moments


def snapshots(cadence: int, delay: int) -> int:
    """The most ticks remembered at once."""
    schedule = AnchorSchedule(cadence, delay)
    held, most = 0, 0
    for tick in range(schedule.first + 2 * cadence * (delay + 1)):
        held += schedule.remembers(tick)
        most = max(most, held)
        held -= schedule.fires(tick)
    return most
