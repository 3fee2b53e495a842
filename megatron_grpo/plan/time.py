"""How long a step takes: the schedule's own order, a device's speed, and the links' rates. Times are seconds.

What is left out: scoring, coding and decoding payloads (fitted overheads hold it), validation, checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, inf

from megatron_grpo.config import DIRECTIONS, Config, Direction
from megatron_grpo.conversion.families import ModelShape

from .network import Line, Network
from .schedule import StageTimes, pass_seconds, prefill_seconds, round_seconds
from .sizes import BYTES, StageSize, read_shape, stage_sizes
from .sums import gradient_payload, tensor_basis_bytes, tensor_row
from .traffic import (
    ID_BYTES,
    Lengths,
    PassBytes,
    basis_traffic,
    longest_lengths,
    row_bytes,
    samples_by_codec,
    step_bytes,
    training_passes,
)
from .zero import Engine, read_engine

ADAM_BYTES = 28
"""An element's traffic at an update: gradient, weight and two moments read, the last three written, in float32."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes with.

    Attributes:
        flop_s: operations a second that its products reach.
        memory_byte_s: bytes a second of its memory: a sampled column reads every weight once.
        host_byte_s: of the host's memory, for an optimizer that was moved there.
        overhead_s: a layer and micro-batch of a training forward, whatever its size; twice as much backward.
        decode_overhead_s: a layer and micro-batch of a sampled column.
        pass_overhead_s: a training pass with gradients, for what the engine does after it.
    """

    flop_s: float
    memory_byte_s: float = inf
    host_byte_s: float = inf
    overhead_s: float = 0.0
    decode_overhead_s: float = 0.0
    pass_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step, in seconds by part; they add up to :attr:`total`.

    Attributes:
        data: gradients and weights between replicas, tied embeddings between stages.
        basis: sums and fits at its refreshes, and checks of the backward budget, spread over all steps.
        compute: the whole step were every link perfect; the rest of it is ``wire``.
        bytes: payloads of a step over all boundaries and replicas: ``fast_fwd``, ``fast_bwd``, ``old_logprob``,
            ``anchor``, ``basis``, ``rollout`` and ``ids`` (the last two are the ledger's rollout).
    """

    rollout: float
    old_logprobs: float
    fast: float
    anchor: float
    data: float
    basis: float
    optimizer: float
    compute: float
    bytes: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def wire(self) -> float:
        """What the links add to :attr:`compute`."""
        return self.total - self.compute

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("compute", "bytes")}


def predict(
    config: Config,
    *,
    link_bit_s: float,
    device_flop_s: float,
    latency_s: float,
    overhead_s: float = 0.0,
    decode_overhead_s: float | None = None,
    pass_overhead_s: float = 0.0,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    longest_response: float | None = None,
) -> StepTime:
    """A step of ``config`` where all pipeline links have one rate and all others are perfect.

    Args:
        link_bit_s: of each link, frames included.
        device_flop_s: of a rank, as reached.
        latency_s: until a message begins to arrive.
        overhead_s, decode_overhead_s, pass_overhead_s: see :class:`Device`; left out, the second is the first.
        prompt_tokens, response_tokens: means; the longest allowed where they are left out.
        longest_response: of a batch, which is how many columns are sampled; ``rollout.max_response`` by default.

    Raises:
        ConfigError: the model or the DeepSpeed file cannot be read.
    """
    most = longest_lengths(config)
    lengths = Lengths(prompt_tokens or most.prompt, response_tokens or most.response, longest_response or most.longest)
    decode = overhead_s if decode_overhead_s is None else decode_overhead_s
    device = Device(device_flop_s, overhead_s=overhead_s, decode_overhead_s=decode, pass_overhead_s=pass_overhead_s)
    line = Line(link_bit_s, latency_s)
    network = Network((line,) * (config.pipeline_ranks - 1), embedding=line)
    return step_time(config, read_shape(config), lengths, network, device)


def step_time(config: Config, shape: ModelShape, lengths: Lengths, network: Network, device: Device) -> StepTime:
    """A step on any network; see :func:`predict`."""
    whole = _Step(config, shape, lengths, network, device)
    perfect = _Step(config, shape, lengths, Network.perfect(config.pipeline_ranks), device)
    return StepTime(**whole.parts(), compute=sum(perfect.parts().values()), bytes=step_bytes(config, shape, lengths))


class _Step:
    """The parts of one step on one network."""

    def __init__(self, config: Config, shape: ModelShape, lengths: Lengths, network: Network, device: Device) -> None:
        self._config, self._shape, self._lengths = config, shape, lengths
        self._network, self._device = network, device
        self._engine: Engine = read_engine(config)
        self._sizes = stage_sizes(shape, pipeline=config.pipeline_ranks, tensor=config.parallel.tensor)

    def parts(self) -> dict[str, float]:
        config = self._config
        passes = training_passes(config, self._shape.hidden)
        seconds = dict.fromkeys(("fast", "old log-probs", "anchor", "checks"), 0.0)
        for part in passes:
            seconds[part.kind] += part.count * self._pass(part)
        share = config.parallel.data if self._engine.stage else 1
        rate = self._device.host_byte_s if self._engine.optimizer_on_host else self._device.memory_byte_s
        updates = config.grpo.minibatches * ADAM_BYTES * max(size.parameters for size in self._sizes) / share / rate
        return {
            "rollout": self._rollout(),
            "old_logprobs": seconds["old log-probs"],
            "fast": seconds["fast"],
            "anchor": seconds["anchor"],
            "data": self._data(passes),
            "basis": self._basis() + seconds["checks"],
            "optimizer": updates,
        }

    def _pass(self, part: PassBytes) -> float:
        """One training pass over a minibatch."""
        config, lengths = self._config, self._lengths
        tokens = config.train.micro_batch * lengths.columns
        forward = [self._work(size, tokens, lengths.columns) for size in self._sizes]
        summed, summed_back = (
            [self._tensor_sums(size, tokens, side, coded=part.coded) for size in self._sizes] for side in DIRECTIONS
        )
        again = config.model.recompute
        rows = config.train.micro_batch * lengths.rows
        after = self._device.pass_overhead_s if part.backward is not None else 0.0
        return after + pass_seconds(
            StageTimes(
                forward=[f + s for f, s in zip(forward, summed, strict=True)],
                backward=[
                    (2 + again) * f + again * s + b for f, s, b in zip(forward, summed, summed_back, strict=True)
                ],
                send=[line.seconds(rows * part.forward) if part.forward else 0.0 for line in self._network.boundaries],
                send_back=[line.seconds(rows * (part.backward or 0.0)) for line in self._network.boundaries],
            ),
            config.micro_batches,
            backward=part.backward is not None,
        )

    def _work(self, size: StageSize, tokens: float, columns: float) -> float:
        return size.flops(tokens, columns) / self._device.flop_s + len(size.layers) * self._device.overhead_s

    def _tensor_sums(self, size: StageSize, tokens: float, side: Direction, *, coded: bool) -> float:
        """All-reduces of one pass through a stage: two a layer."""
        payload = tokens * tensor_row(self._config, self._shape.hidden, side, coded=coded)
        return 2 * len(size.layers) * self._network.tensor.ring(payload, self._config.parallel.tensor)

    def _rollout(self) -> float:
        """Prompts, then one column of every micro-batch in flight a round; as often as it takes for all of them."""
        config, lengths = self._config, self._lengths
        sequences = config.sequences_per_step / config.parallel.data
        batch = ceil(sequences / config.sampling_micro_batches)
        row = row_bytes(config.boundary, "forward", self._shape.hidden, dense=not samples_by_codec(config))
        rounds = max(lengths.longest - 1, 0.0)
        live = batch * (lengths.response - 1) / rounds if rounds else 0.0
        ids = self._back(live * ID_BYTES)
        first = prefill_seconds(
            [self._column(size, batch, lengths.prompt, lengths.prompt) for size in self._sizes],
            [line.seconds(batch * lengths.prompt * row) for line in self._network.boundaries],
            config.in_flight,
        )
        seen = lengths.prompt + lengths.longest / 2
        later = round_seconds(
            [self._column(size, batch, 1, seen) for size in self._sizes],
            [line.seconds(live * row) for line in self._network.boundaries],
            ids,
            config.in_flight,
        )
        waves = config.sampling_micro_batches / config.in_flight
        return waves * (first + ids + rounds * later) + self._gathered(lengths.longest)

    def _back(self, payload: float) -> float:
        """The way of drawn ids from the last stage to the first."""
        return max((line.seconds(payload) for line in self._network.boundaries), default=0.0)

    def _column(self, size: StageSize, batch: int, columns: float, seen: float) -> float:
        """So many new columns of a micro-batch on one stage: products, or reading weights and caches if that is
        slower."""
        device, tokens, number = self._device, batch * columns, BYTES[self._config.model.dtype]
        cache = 2 * len(size.layers) * batch * size.keys * seen
        coded = samples_by_codec(self._config)
        work = max(size.flops(tokens, seen) / device.flop_s, number * (size.multiplied + cache) / device.memory_byte_s)
        return (
            work + len(size.layers) * device.decode_overhead_s + self._tensor_sums(size, tokens, "forward", coded=coded)
        )

    def _gathered(self, columns: float) -> float:
        """ZeRO 3: whole weights for sampling, once or for every column."""
        times = columns * self._config.sampling_micro_batches if self._engine.gathers_layers else 1.0
        return times * self._gather() if self._engine.stage == 3 else 0.0

    def _gather(self) -> float:
        """The weights of the largest stage, from the shares of its replicas."""
        payload = max(size.parameters for size in self._sizes) * BYTES[self._config.model.dtype]
        return self._network.data.gather(payload, self._config.parallel.data)

    def _data(self, passes: list[PassBytes]) -> float:
        """Averages of gradients and spread weights over replicas, and the sum of a tied embedding's two gradients."""
        config, engine, data = self._config, self._engine, self._config.parallel.data
        number = BYTES[config.model.dtype]
        total = config.grpo.minibatches * self._gather() if engine.stage in (1, 2) else 0.0
        for part in passes:
            trains = part.backward is not None
            if engine.stage == 3:
                total += part.count * config.micro_batches * (1 + trains) * self._gather()
            if trains:
                payload = max(gradient_payload(config, size, engine, part) for size in self._sizes)
                line = self._network.data
                total += part.count * (line.gather(payload, data) if engine.stage > 1 else line.ring(payload, data))
                if self._shape.tied and config.pipeline_ranks > 1:
                    payload = self._sizes[-1].vocab * self._shape.hidden * number
                    total += part.count * self._network.embedding.ring(payload, 2)
        return total

    def _basis(self) -> float:
        """Sums over replicas, then fits that cross one boundary after the other, once for every tensor rank."""
        config, network = self._config, self._network
        learned = basis_traffic(config, self._shape.hidden)
        crossing = sum(line.seconds(learned.fit * config.parallel.tensor) for line in network.boundaries)
        tensor = max(tensor_basis_bytes(config.boundary, size, self._shape.hidden) for size in self._sizes)
        sums = network.data.ring(learned.sums, config.parallel.data) if config.pipeline_ranks > 1 else 0.0
        return learned.refreshes * (crossing + sums + network.tensor.ring(tensor, config.parallel.tensor))
