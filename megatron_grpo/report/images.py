"""The figures as PNGs, for READMEs and papers."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .arms import Arm
from .figures import (
    KIND_COLORS,
    KIND_LABELS,
    PANELS,
    Curve,
    Panel,
    byte_unit,
    bytes_a_tick,
    bytes_over_ticks,
    curve,
    line_style,
    longest_run,
)

INK, GREY = "#1f2933", "#67737f"
DASHES: dict[str, Literal["-", "--", ":", "-."]] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PIXELS_PER_INCH = 150
PANEL_INCHES = (3.5, 2.4)
MOST_COLUMNS = 3
MOST_BANDS = 6
"""Arms beyond which bands would hide the curves."""
LONGEST_NAME = 44


def write_images(arms: Sequence[Arm], out: Path) -> list[Path]:
    """Write ``STEM-learning.png``, ``-telemetry``, ``-bytes`` and ``-anchor`` beside ``out``, those with values."""
    figures = {name: _panels(arms, panels) for name, panels in PANELS.items()} | {"bytes": _bytes(arms)}
    written = []
    for name in ("learning", "telemetry", "bytes", "anchor"):
        figure = figures[name]
        if figure is not None:
            path = out.with_name(f"{out.stem}-{name}.png")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script the font lacks
                figure.savefig(path, dpi=PIXELS_PER_INCH, facecolor="white")
            written.append(path)
    return written


def _panels(arms: Sequence[Arm], panels: Sequence[Panel]) -> Figure | None:
    """One small plot a metric, all arms in each; None where no metric has values."""
    longest = longest_run(arms)
    curves = {panel: [curve(arm, panel.key, longest) for arm in arms] for panel in panels}
    drawn = [panel for panel in panels if any(curves[panel])]
    if not drawn:
        return None
    columns = min(MOST_COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    names = [_short(arm.name) for arm in arms] if len(arms) > 1 else []
    legend_columns, legend_height = _legend_size(names, columns * PANEL_INCHES[0])
    figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + legend_height), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flat
    for axes in list(all_axes)[len(drawn) :]:
        axes.set_axis_off()
    for axes, panel in zip(figure.axes, drawn, strict=False):
        _panel(axes, panel, curves[panel], longest)
    if names:
        handles = [_line(index) for index in range(len(arms))]
        _legend(figure, handles, names, legend_columns)
    return figure


def _panel(axes: Axes, panel: Panel, curves: Sequence[Curve | None], longest: int) -> None:
    for index, found in enumerate(curves):
        if found is None:
            continue
        color, dash = line_style(index)
        marker = "o" if len(found.ticks) <= 40 else ""
        axes.plot(found.ticks, found.mean, DASHES[dash] + marker, color=color, linewidth=1.3, markersize=2.2)
        banded = [at for at, stderr in enumerate(found.stderr) if stderr is not None]
        if banded and len(curves) <= MOST_BANDS:
            low = [found.mean[at] - (found.stderr[at] or 0.0) for at in banded]
            high = [found.mean[at] + (found.stderr[at] or 0.0) for at in banded]
            axes.fill_between([found.ticks[at] for at in banded], low, high, color=color, alpha=0.16, linewidth=0)
    _plain(axes, panel.title, "tick", panel.unit)
    last = max(longest - 1, 1)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    if panel.from_zero:
        top = max(max(found.mean) for found in curves if found is not None)
        axes.set_ylim(bottom=-0.03 * (top or 1.0), top=None if top > 0 else 1.0)  # a line at zero stays off the frame
    if panel.level is not None:
        value, meaning = panel.level
        axes.axhline(value, color=GREY, linewidth=0.8, linestyle=":")
        axes.text(0.0, value, meaning, transform=axes.get_yaxis_transform(), ha="left", va="bottom", color=GREY, size=7)


def _bytes(arms: Sequence[Arm]) -> Figure | None:
    """One arm over its ticks, or several side by side."""
    counted = [(arm, means) for arm in arms if any((means := bytes_a_tick(arm)).values())]
    if not counted:
        return None
    if len(arms) == 1:
        figure = Figure(figsize=(7.0, 3.2), layout="constrained")
        _bytes_over_ticks(figure.subplots(), arms[0])
    else:
        figure = Figure(figsize=(7.0, 1.4 + 0.27 * len(counted)), layout="constrained")
        _bytes_by_arm(figure.subplots(), [arm.name for arm, _ in counted], [means for _, means in counted])
    handles = [Patch(color=KIND_COLORS[kind]) for kind in KIND_LABELS]
    names = list(KIND_LABELS.values())
    if len(arms) == 1:
        dense = [Line2D([], [], color=INK, linewidth=1.2), Line2D([], [], color=INK, linewidth=1.2, linestyle=":")]
    else:
        dense = [
            Line2D([], [], color=INK, linestyle="", marker="|", markersize=11, markeredgewidth=1.6),
            Line2D([], [], color=INK, linestyle="", marker="d", markersize=5, markerfacecolor="white"),
        ]
    _legend(figure, [*handles, *dense], [*names, "dense equivalent", "dense total"], 4)
    return figure


def _bytes_over_ticks(axes: Axes, arm: Arm) -> None:
    found = bytes_over_ticks(arm)
    assert found is not None
    divisor, unit = byte_unit(max(max(values) for values in (*found.by_kind.values(), found.total)))
    edges = [*(tick - found.width / 2 for tick in found.ticks), found.ticks[-1] + found.width / 2]
    bottom = [0.0] * len(found.ticks)
    for kind, values in found.by_kind.items():
        top = [low + value / divisor for low, value in zip(bottom, values, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=KIND_COLORS[kind])
        bottom = top
    for values, style in ((found.equivalent, "-"), (found.total, ":")):
        axes.stairs(
            [value / divisor for value in values], edges, baseline=None, linestyle=style, color=INK, linewidth=1.2
        )
    _plain(axes, "", "tick", f"{unit} a tick")
    axes.margins(x=0.01)


def _bytes_by_arm(axes: Axes, names: Sequence[str], means: Sequence[dict[str, float]]) -> None:
    divisor, unit = byte_unit(max(max(mean.values()) for mean in means))
    places = list(range(len(names)))
    left = [0.0] * len(names)
    for kind in KIND_LABELS:
        lengths = [mean[kind] / divisor for mean in means]
        axes.barh(places, lengths, 0.7, left, color=KIND_COLORS[kind], linewidth=0)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    equivalent = [mean["dense_equivalent"] / divisor for mean in means]
    total = [mean["dense_total"] / divisor for mean in means]
    axes.plot(equivalent, places, "|", color=INK, markersize=12, markeredgewidth=1.6)
    axes.plot(total, places, "d", color=INK, markersize=5, markerfacecolor="white")
    _plain(axes, "", f"{unit} a tick", "")
    axes.set_xlim(left=0.0)
    axes.set_yticks(places, [_short(name) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _plain(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and a quiet frame."""
    axes.set_title(title, loc="left", size=9, color=INK)
    axes.set_xlabel(x_label, size=8, color=INK)
    axes.set_ylabel(y_label, size=8, color=INK)
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.locator_params(nbins=6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def _line(index: int) -> Line2D:
    color, dash = line_style(index)
    return Line2D([], [], color=color, linestyle=DASHES[dash], linewidth=1.6)


def _legend_size(names: Sequence[str], width: float) -> tuple[int, float]:
    """Columns and height, in inches, of a legend below a figure ``width`` inches wide."""
    if not names:
        return 1, 0.0
    columns = max(1, min(len(names), int(width / (0.55 + 0.065 * max(map(len, names))))))
    return columns, 0.15 + 0.16 * math.ceil(len(names) / columns)


def _legend(figure: Figure, handles: Sequence[Line2D | Patch], names: Sequence[str], columns: int) -> None:
    """Names are text: neither formulas nor, by a leading underscore, hidden."""
    legend = figure.legend(
        handles, [""] * len(names), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
