"""How long a pass takes in the pipeline: Megatron's 1F1B schedule and the sampler's rounds, with blocking links.

A message is under way from the moment when both ends have come to it, and both wait for its end, as with gloo and NCCL.
Nothing is sent ahead. Times are seconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Message = tuple[int, str, int]
"""Boundary, direction, micro-batch."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a micro-batch takes on each stage, and at each boundary behind it.

    Attributes:
        forward, backward: by stage.
        send, send_back: by boundary: activations, gradients.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    send: Sequence[float]
    send_back: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Step:
    """Work of a stage, or messages that it exchanges at the same time."""

    seconds: float = 0.0
    messages: tuple[Message, ...] = ()


def pass_seconds(times: StageTimes, micro_batches: int, *, backward: bool) -> float:
    """From the first forward to the last gradient (or log-prob) of one pass."""
    stages = len(times.forward)
    programs = [_program(stage, stages, micro_batches, times, backward=backward) for stage in range(stages)]
    costs = {"forward": times.send, "backward": times.send_back}
    clocks, places = [0.0] * stages, [0] * stages
    arrivals: dict[Message, dict[int, float]] = defaultdict(dict)
    while any(place < len(program) for place, program in zip(places, programs, strict=True)):
        for stage, program in enumerate(programs):
            while places[stage] < len(program):
                step = program[places[stage]]
                for message in step.messages:
                    arrivals[message][stage] = clocks[stage]
                if any(len(arrivals[message]) < 2 for message in step.messages):
                    break  # the other end is not there yet
                ends = [max(arrivals[m].values()) + costs[m[1]][m[0]] for m in step.messages]
                clocks[stage] = max([clocks[stage] + step.seconds, *ends])
                places[stage] += 1
    return max(clocks)


def _program(stage: int, stages: int, micro_batches: int, times: StageTimes, *, backward: bool) -> list[_Step]:
    """What Megatron's ``forward_backward_pipelining_without_interleaving`` has a stage do, in order."""
    warm = min(stages - stage - 1, micro_batches)
    forward, back = _Step(times.forward[stage]), _Step(times.backward[stage])

    def exchange(*wanted: tuple[int, str, int]) -> _Step:
        """Those messages that exist: (boundary, direction, micro-batch)."""
        return _Step(messages=tuple(m for m in wanted if 0 <= m[0] < stages - 1 and m[2] < micro_batches))

    steps = []
    for number in range(warm):
        steps += [exchange((stage - 1, "forward", number)), forward, exchange((stage, "forward", number))]
    steps.append(exchange((stage - 1, "forward", warm)))
    for number in range(micro_batches - warm):
        steps.append(forward)
        if not backward:
            sent, wanted = (stage, "forward", warm + number), (stage - 1, "forward", warm + number + 1)
            steps += [exchange(sent), exchange(wanted)]
            continue
        steps += [exchange((stage, "forward", warm + number), (stage, "backward", number)), back]
        steps.append(exchange((stage - 1, "backward", number), (stage - 1, "forward", warm + number + 1)))
    for number in range(micro_batches - warm, micro_batches if backward else 0):
        steps += [exchange((stage, "backward", number)), back, exchange((stage - 1, "backward", number))]
    return steps


def round_seconds(work: Sequence[float], send: Sequence[float], back: float, in_flight: int) -> float:
    """One column of every micro-batch in flight through the sampler's stages.

    A stage takes a micro-batch up when its rows have arrived, so each costs it the way here and the work. With few in
    flight the round is one micro-batch's own way through all stages and its ids' way ``back``.
    """
    arriving = [0.0, *send]
    each = [way + seconds for way, seconds in zip(arriving, work, strict=True)]
    return max(in_flight * max(each), sum(each) + back)


def prefill_seconds(work: Sequence[float], send: Sequence[float], in_flight: int) -> float:
    """The prompts of all micro-batches in flight through the sampler's stages, one behind the other."""
    each = [way + seconds for way, seconds in zip([0.0, *send], work, strict=True)]
    return sum(each) + (in_flight - 1) * max(each)
