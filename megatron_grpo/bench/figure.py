"""The picture of a gap measurement: forward gap against bytes with its limits, and backward cosines of each stage."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

INK, GREY, GRID = "#1f2933", "#67737f", "#e3e8ee"
COLOURS = (
    *("#8d99a6", "#c2571a", "#d99a2b", "#7b5ea7", "#b0487c", "#5f7a2c", "#7fb2dd", "#1769aa", "#0b3c66"),
    *("#2a9d8f", "#135e54"),
)
MARKERS = "osD^vPX*h<>"
STAGES = ("#0b3c66", "#1769aa", "#7fb2dd", "#c9dff0", "#e3e8ee")
LIMITS = {"none": (":", "limit"), "embedding+previous": ("--", "limit, predicted")}
FLOOR = 1e-4
"""Gaps below it, in nats, are drawn on it."""
WIDTH, HEIGHT, PIXELS_PER_INCH = 14.0, 7.0, 130

Row = Mapping[str, Any]


def draw_gap(result: Mapping[str, Any], file: Path) -> None:
    """Write the figure of a result of ``run_gap``; the suffix of ``file`` chooses the format."""
    shares = result["settings"]["shares"]
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(shares), 2, width_ratios=(1.15, 1.0))
    _forward(figure.add_subplot(grid[:, 0]), result["forward"], result["limits"])
    panels = [figure.add_subplot(grid[row, 1]) for row in range(len(shares))]
    for panel, share in zip(panels, shares, strict=True):
        _backward(panel, [row for row in result["backward"] if row["share"] == share], share)
    panels[0].legend(
        [f"layers {start + 1} to {stop}" for start, stop in pairwise([0, *result["after"]])],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.12),
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    cuts = ", ".join(map(str, result["after"]))
    name = Path(result["model"]).resolve().name
    figure.suptitle(f"{name}: boundaries after layers {cuts} of {result['layers']}", color=INK, fontsize=13)
    figure.savefig(file)


def _forward(axes: Axes, rows: Sequence[Row], limits: Sequence[Row]) -> None:
    sized = [row for row in rows if row["share"] is not None]
    for number, name in enumerate(dict.fromkeys(row["codec"] for row in sized)):
        points = sorted((row["bytes"], row["gap_median"]) for row in sized if row["codec"] == name)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(*_xy(points), color=colour, marker=marker, linewidth=1.6, markersize=6, label=name)
    for predict, (style, label) in LIMITS.items():
        points = sorted((row["share"], row["gap_median"]) for row in limits if row["predict"] == predict)
        axes.plot(*_xy(points), linestyle=style, color=INK, linewidth=1.4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes, share of a bfloat16 crossing", ylabel="nats")
    ticks = sorted({row["share"] for row in sized})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))
    axes.set_title("Activations coded: median |difference of log-prob|", loc="left", color=INK, fontsize=11)
    axes.grid(True, which="both", color=GRID, linewidth=0.7)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False, fontsize=9)
    _plain(axes)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [max(y, FLOOR) for _, y in points]


def _backward(axes: Axes, rows: Sequence[Row], share: float) -> None:
    stages = len(rows[0]["cosine"]) if rows else 0
    width = 0.8 / max(stages, 1)
    for stage in range(stages):
        left = [number + (stage - (stages - 1) / 2) * width for number in range(len(rows))]
        heights = [row["cosine"][stage] for row in rows]
        bars = axes.bar(left, heights, width * 0.94, color=STAGES[stage % len(STAGES)])
        if stages * len(rows) <= 20:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, color=GREY)
    axes.set_ylim(min(0.0, *(value for row in rows for value in row["cosine"])), 1.12)
    axes.set_xticks(range(len(rows)), [f"{row['codec']}\n{100 * row['bytes']:.2g} %" for row in rows], fontsize=8)
    title = f"Gradients coded to {100 * share:g} %: cosine of each stage's parameter gradient"
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.grid(True, axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)
