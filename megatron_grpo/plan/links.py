"""Which link carries what: every boundary, the tensor groups, the data groups, the tied embedding."""

from dataclasses import dataclass
from itertools import groupby
from math import ceil

from megatron_grpo.config import Config
from megatron_grpo.conversion.families import ModelShape

from .network import Line, Placement, Rates
from .sizes import BYTES, StageSize
from .traffic import Lengths, step_bytes, training_passes
from .zero import Engine


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What one kind of link carries in a tick.

    Attributes:
        name: which link or links, and ``where`` they are.
        carries: in words.
        path: its rate for one pair of ranks.
        bytes: payload a tick: of a boundary all replicas', of a group what each rank hands in.
        seconds: that the bytes alone take, one after the other.
    """

    name: str
    where: str
    carries: str
    path: Line
    bytes: float
    seconds: float


def link_loads(
    config: Config,
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
    places = [(_hosts(placement, stage), path) for stage, path in enumerate(network.boundaries)]
    for (where, path), stages in groupby(range(len(places)), key=lambda stage: places[stage]):
        numbers = list(stages)
        each = total / len(places)
        carries = "activations, their gradients, sampled ids"
        loads.append(_load(_boundaries(numbers), where, carries, path, each, each / parallel.data))
    if parallel.tensor > 1:
        summed = max(tensor_bytes(config, shape, size, lengths) for size in sizes) / ticks
        seconds = network.tensor.ring(summed, parallel.tensor)
        loads.append(
            LinkLoad("tensor groups", "inside hosts", "sums of partial outputs", network.tensor, summed, seconds)
        )
    if parallel.data > 1:
        averaged = data_bytes(config, max(size.parameters for size in sizes), engine, shape) / ticks
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


def _load(name: str, where: str, carries: str, path: Line, size: float, alone: float) -> LinkLoad:
    """``alone``: of the bytes, those of one pair of ranks; the path's rate is its own."""
    return LinkLoad(name, where, carries, path, size, path.seconds(alone))


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
    number = BYTES[config.model.dtype] * shape.hidden
    rows = config.rows_per_minibatch * lengths.columns
    again = config.model.recompute
    passes = training_passes(config, shape.hidden)
    trained = sum(part.count * (1 + (part.backward is not None) * (1 + again)) for part in passes) * rows
    batch = ceil(config.sequences_per_step / config.parallel.data / config.sampling_micro_batches)
    sampled = batch * config.sampling_micro_batches * lengths.columns
    return 2 * len(size.layers) * number * (trained + sampled)


def data_bytes(config: Config, parameters: int, engine: Engine, shape: ModelShape) -> float:
    """What a ring moves for a rank in one step, in halves: a gradient's sum is two, a gather or a scatter one.

    Multiply by (ranks - 1) / ranks for the bytes that really leave a rank.
    """
    weights, ticks = parameters * BYTES[config.model.dtype], config.grpo.minibatches
    gradients = parameters * engine.gradient_bytes * (1 if engine.stage > 1 else 2)
    passes = training_passes(config, shape.hidden)
    total = sum(part.count for part in passes if part.backward is not None) * gradients
    if engine.stage in (1, 2):
        total += ticks * weights
    if engine.stage == 3:
        gathers = sum(part.count * (1 + (part.backward is not None)) for part in passes) * config.micro_batches
        total += (gathers + 1) * weights
    return total
