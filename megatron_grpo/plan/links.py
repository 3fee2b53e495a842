"""Which link carries what: every boundary, the tensor groups, the data groups, the tied embedding."""

from dataclasses import dataclass
from itertools import groupby
from math import ceil

from megatron_grpo.config import DIRECTIONS, Config
from megatron_grpo.conversion.families import ModelShape

from .network import Line, Placement, Rates
from .sizes import BYTES, StageSize
from .sums import gradient_payload, tensor_basis_bytes, tensor_row
from .traffic import Lengths, basis_traffic, samples_by_codec, step_bytes, training_passes
from .zero import Engine


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What one kind of link carries in a tick.

    Attributes:
        name: which link or links, and ``where`` they are.
        carries: in words.
        line: its rate for one pair of ranks.
        bytes: payload a tick: of a boundary all replicas', of a group what each rank hands in.
        seconds: that the bytes alone take, one after the other.
    """

    name: str
    where: str
    carries: str
    line: Line
    bytes: float
    seconds: float


def link_loads(
    config: Config,
    *,
    shape: ModelShape,
    sizes: list[StageSize],
    lengths: Lengths,
    engine: Engine,
    placement: Placement,
    rates: Rates,
) -> list[LinkLoad]:
    """Every link that carries anything, boundaries first; neighbours alike in all are one entry."""
    network, ticks, parallel = placement.network(rates), config.grpo.minibatches, config.parallel
    loads = []
    total = sum(step_bytes(config, shape, lengths).values()) / ticks
    places = [(_hosts(placement, stage), line) for stage, line in enumerate(network.boundaries)]
    for (where, line), stages in groupby(range(len(places)), key=lambda stage: places[stage]):
        numbers = list(stages)
        each = total / len(places)
        carries = "activations, their gradients, sampled ids"
        loads.append(_load(_boundaries(numbers), where, carries, line, each, each / parallel.data))
    if parallel.tensor > 1:
        summed = max(tensor_bytes(config, shape, size, lengths) for size in sizes) / ticks
        seconds = network.tensor.ring(summed, parallel.tensor)
        loads.append(
            LinkLoad("tensor groups", "inside hosts", "sums of partial outputs", network.tensor, summed, seconds)
        )
    if parallel.data > 1:
        averaged = max(data_bytes(config, size, engine, shape) for size in sizes) / ticks
        where = "between hosts" if placement.data_shared() else "inside hosts"
        seconds = network.data.gather(averaged, parallel.data)
        carries = {0: "gradients", 3: "gradients, gathered weights"}.get(engine.stage, "gradients, updated weights")
        loads.append(LinkLoad("data groups", where, carries, network.data, averaged, seconds))
    if shape.tied and config.pipeline_ranks > 1:
        passes = sum(part.count for part in training_passes(config, shape.hidden) if part.backward is not None)
        size = passes / ticks * sizes[-1].vocab * shape.hidden * BYTES[config.model.dtype]
        where = "between hosts" if placement.boundary_shared(0, len(sizes) - 1) else "inside a host"
        carries = "gradients of the tied embedding"
        loads.append(_load("first and last stage", where, carries, network.embedding, size, size))
    return loads


def _load(name: str, where: str, carries: str, line: Line, size: float, alone: float) -> LinkLoad:
    """``alone``: of the bytes, those of one pair of ranks; the line's rate is its own."""
    return LinkLoad(name, where, carries, line, size, line.seconds(alone))


def _boundaries(stages: list[int]) -> str:
    first, last = stages[0], stages[-1]
    return f"boundary {first}>{first + 1}" if first == last else f"boundaries {first}>{first + 1} to {last}>{last + 1}"


def _hosts(placement: Placement, stage: int) -> str:
    """Where the boundary behind ``stage`` is."""
    if not placement.names:
        return "between hosts"
    lower, upper = ([placement.names[rank] for rank in placement.ranks(number)] for number in (stage, stage + 1))
    pairs = dict.fromkeys(zip(lower, upper, strict=True))
    crossing = [f"{low} to {high}" for low, high in pairs if low != high]
    return ", ".join(crossing) if crossing else "inside a host"


def tensor_bytes(config: Config, shape: ModelShape, size: StageSize, lengths: Lengths) -> float:
    """What a tensor rank hands into sums in one step: two a layer forward and two backward, on every column."""
    hidden, rows = shape.hidden, config.rows_per_minibatch * lengths.columns
    total = 0.0
    for part in training_passes(config, hidden):
        forward, backward = (tensor_row(config, hidden, side, coded=part.coded) for side in DIRECTIONS)
        trains = part.backward is not None
        total += part.count * rows * (forward * (1 + (trains and config.model.recompute)) + backward * trains)
    batch = ceil(config.sequences_per_step / config.parallel.data / config.sampling_micro_batches)
    sampled = batch * config.sampling_micro_batches * lengths.columns
    total += sampled * tensor_row(config, hidden, "forward", coded=samples_by_codec(config))
    learned = basis_traffic(config, hidden).refreshes * tensor_basis_bytes(config.boundary, size, hidden)
    return 2 * len(size.layers) * total + learned


def data_bytes(config: Config, size: StageSize, engine: Engine, shape: ModelShape) -> float:
    """What a ring moves for a rank in one step, in halves: a gradient's sum is two, a gather or a scatter one.

    Multiply by (ranks - 1) / ranks for the bytes that really leave a rank.
    """
    weights, ticks = size.parameters * BYTES[config.model.dtype], config.grpo.minibatches
    passes = training_passes(config, shape.hidden)
    halves = 1 if engine.stage > 1 else 2
    trains = [part for part in passes if part.backward is not None]
    total = sum(part.count * halves * gradient_payload(config, size, engine, part) for part in trains)
    if engine.stage in (1, 2):
        total += ticks * weights
    if engine.stage == 3:
        gathers = sum(part.count for part in [*passes, *trains]) * config.micro_batches
        total += (gathers + 1) * weights
    return total
