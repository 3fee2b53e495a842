"""What the figures show, for the page and the PNGs alike: panels, curves over ticks, bytes by kind, colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_grpo.training.metrics import BYTE_KINDS, Row

from .arms import Arm
from .runs import Run
from .stats import estimate

MOST_POINTS = 400
"""Points of one curve; of longer runs neighbouring ticks are averaged."""
MOST_BARS = 70

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
"""Okabe and Ito's, which colour-blind readers tell apart, without black and yellow, which vanish on dark or white."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""The next round of colours gets the next dash."""

KIND_LABELS = {
    "fast": "fast",
    "old_logprob": "old log-probs",
    "anchor": "anchor",
    "basis": "basis",
    "rollout": "sampling",
}
KIND_COLORS = {
    "fast": "#0072b2",
    "old_logprob": "#56b4e9",
    "anchor": "#d55e00",
    "basis": "#cc79a7",
    "rollout": "#a6a6a6",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric over ticks.

    Attributes:
        unit: label of the vertical axis.
        from_zero: the axis starts at zero.
        level: a value to compare with, drawn as a thin line, and what it means.
    """

    key: str
    title: str
    unit: str
    from_zero: bool = True
    level: tuple[float, str] | None = None


PANELS: dict[str, tuple[Panel, ...]] = {
    "learning": (
        Panel("reward/mean", "Training reward", "mean reward", from_zero=False),
        Panel("val/score", "Validation, greedy", "score", from_zero=False),
        Panel("val/score_sampled", "Validation, sampled at temperature 1", "score", from_zero=False),
        Panel("val/score_codec", "Validation through the codec, greedy", "score", from_zero=False),
        Panel("val/score_sampled_codec", "Validation through the codec, sampled", "score", from_zero=False),
    ),
    "telemetry": (
        Panel("boundary/q_error_fwd", "Q error, forward", "relative norm dropped"),
        Panel("boundary/q_error_bwd", "Q error, backward", "relative norm dropped"),
        Panel("policy/clip_frac", "Clip fraction", "share of tokens"),
        Panel("rollout/response_length", "Response length", "tokens"),
        Panel("rollout/truncated_frac", "Truncated responses", "share of responses"),
        Panel("rollout/logprob_gap_median", "Log-prob gap, median", "nats a token"),
        Panel("rollout/logprob_gap", "Log-prob gap, mean", "nats a token"),
    ),
    "anchor": (
        Panel("anchor/age", "Age of M", "ticks"),
        Panel("anchor/sign_agreement", "Sign agreement of M", "share of elements", False, (0.5, "chance")),
        Panel("anchor/cos_fast", "Cosine of M with the fast gradient", "cosine", False, (0.0, "unrelated")),
        Panel("merger/weight", "Weight of M", "weight"),
        Panel("merger/gate_cos", "Cosine that gates M", "cosine", False, (0.0, "unrelated")),
        Panel("alarm/score", "Collapse alarm", "score"),
    ),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one arm: mean and standard error (None for one seed) over the ``n`` seeds with a value there."""

    ticks: list[float]
    mean: list[float]
    stderr: list[float | None]
    n: list[int]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Mean bytes a tick of one arm, seeds and boundaries and replicas as the metrics count them.

    Attributes:
        ticks: centres of the bars, ``width`` ticks wide.
        by_kind: kind to bytes a tick in each bar.
        equivalent, total: bytes a tick of the dense equivalent and the dense total in each bar.
    """

    ticks: list[float]
    width: int
    by_kind: dict[str, list[float]]
    equivalent: list[float]
    total: list[float]


def curve(arm: Arm, key: str, longest: int) -> Curve | None:
    """One metric of an arm over ticks; None where no run has it. ``longest``: ticks of the longest run shown."""
    width = max(1, math.ceil(longest / MOST_POINTS))
    runs = [_bins(run, width) for run in arm.runs]
    result = Curve([], [], [], [])
    for index in sorted({index for run in runs for index in run}):
        known = [[value for row in run.get(index, ()) if (value := row.get(key)) is not None] for run in runs]
        point = estimate(fmean(values) for values in known if values)
        if point is not None:
            result.ticks.append(_centre(index, width))
            result.mean.append(point.mean)
            result.stderr.append(point.stderr)
            result.n.append(point.n)
    return result if result.ticks else None


def bytes_over_ticks(arm: Arm) -> Bytes | None:
    """Bytes a tick of an arm in at most MOST_BARS bars; None where nothing is counted.

    A bar is whole steps wide, since sampling is counted once a step.
    """
    ticks = max(run.ticks for run in arm.runs)
    a_step = max([1, *(run.ticks // run.steps for run in arm.runs if run.steps > 0)])
    width = a_step * max(1, math.ceil(ticks / a_step / MOST_BARS))
    runs = [_bins(run, width) for run in arm.runs]
    bars = sorted({index for run in runs for index in run})

    def means(name: str) -> list[float]:
        key = f"boundary/bytes_{name}"
        return [
            fmean(fmean(row.get(key) or 0.0 for row in run[index]) for run in runs if index in run) for index in bars
        ]

    result = Bytes(
        [_centre(index, width) for index in bars],
        width,
        {kind: means(kind) for kind in BYTE_KINDS},
        means("dense_equivalent"),
        means("dense_total"),
    )
    return result if any(any(values) for values in (*result.by_kind.values(), result.total)) else None


def bytes_a_tick(arm: Arm) -> dict[str, float]:
    """Mean bytes a tick of whole runs: every kind, ``dense_equivalent`` and ``dense_total``; empty without ticks."""
    known = [summary for summary in arm.summaries if summary["ticks"]]
    if not known:
        return {}
    by_kind = {kind: fmean(summary["bytes"][kind] / summary["ticks"] for summary in known) for kind in BYTE_KINDS}
    dense = ("dense_equivalent", "dense_total")
    return by_kind | {name: fmean(summary[name] / summary["ticks"] for summary in known) for name in dense}


def byte_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the unit in which ``largest`` bytes read well."""
    for divisor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, name
    return 1.0, "bytes"


def line_style(index: int) -> tuple[str, str]:
    """Colour and dash of the arm at ``index``."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]


def longest_run(arms: Sequence[Arm]) -> int:
    """Ticks of the longest run."""
    return max(run.ticks for arm in arms for run in arm.runs)


def _bins(run: Run, width: int) -> dict[int, list[Row]]:
    """The rows of every ``width`` ticks."""
    bins: dict[int, list[Row]] = {}
    for row in run.rows:
        bins.setdefault(int(row["tick"] or 0) // width, []).append(row)
    return bins


def _centre(index: int, width: int) -> float:
    return index * width + (width - 1) / 2
