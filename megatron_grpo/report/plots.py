"""The figures of the page: their frames in HTML, and as JSON what page.js draws into them."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .arms import Arm
from .figures import (
    KIND_COLORS,
    KIND_LABELS,
    PANELS,
    Bytes,
    Panel,
    byte_unit,
    bytes_a_tick,
    bytes_over_ticks,
    curve,
    longest_run,
)
from .markup import swatch, toggle

DENSE = {
    "equivalent": {"label": "dense equivalent", "color": "#7d6b00"},
    "total": {"label": "dense total", "color": "#8c8c8c"},
}

Plot = dict[str, Any]
"""The data of one figure; page.js has a builder for each ``type``."""


def build_figures(name: str, arms: Sequence[Arm], plots: list[Plot]) -> str:
    """The figures of a section as HTML, empty where none has values; their data is appended to ``plots``."""
    if name == "bytes":
        return _byte_figures(arms, plots)
    longest = longest_run(arms)
    frames = []
    for panel in PANELS[name]:
        plot = _curves_plot(panel, arms, longest)
        if plot["curves"]:
            frames.append(_frame(panel.title, len(plots)))
            plots.append(plot)
    return f'<div class="figures">{"".join(frames)}</div>' if frames else ""


def _curves_plot(panel: Panel, arms: Sequence[Arm], longest: int) -> Plot:
    curves = [
        {
            "arm": index,
            "ticks": found.ticks,
            "mean": _rounded(found.mean),
            "stderr": _rounded(found.stderr),
            "n": found.n,
        }
        for index, arm in enumerate(arms)
        if (found := curve(arm, panel.key, longest))
    ]
    return {
        "type": "curves",
        "unit": panel.unit,
        "fromZero": panel.from_zero,
        "level": panel.level,
        "curves": curves,
    }


def _byte_figures(arms: Sequence[Arm], plots: list[Plot]) -> str:
    """Bytes by kind: whole runs side by side, and one arm over its ticks."""
    over_ticks = [(index, found) for index, arm in enumerate(arms) if (found := bytes_over_ticks(arm))]
    if not over_ticks:
        return ""
    kinds = [toggle("kind", kind, label, swatch(KIND_COLORS[kind], "solid")) for kind, label in KIND_LABELS.items()]
    kinds += [toggle("kind", key, dense["label"], swatch(dense["color"], "dot")) for key, dense in DENSE.items()]
    figures = [f'<div class="legend kinds">{"".join(kinds)}</div>', '<div class="figures">']
    if len(arms) > 1:
        figures.append(_frame("Bytes a tick by kind, mean of the run", len(plots), wide=True))
        plots.append(_arms_plot(arms, [index for index, _ in over_ticks]))
    options = "".join(f'<option value="{index}">{escape(arms[index].name)}</option>' for index, _ in over_ticks)
    choice = f' <select aria-label="arm">{options}</select>' if len(over_ticks) > 1 else ""
    figures.append(_frame("Bytes a tick by kind, over the run", len(plots), wide=True, choice=choice))
    plots.append({"type": "ticks", "arms": [_ticks_plot(index, found) for index, found in over_ticks]})
    return "".join([*figures, "</div>"])


def _arms_plot(arms: Sequence[Arm], indices: Sequence[int]) -> Plot:
    means = [bytes_a_tick(arms[index]) for index in indices]
    divisor, unit = byte_unit(max(max(mean.values()) for mean in means))

    def values(name: str) -> list[float | None]:
        return _rounded(mean[name] / divisor for mean in means)

    return {
        "type": "arms",
        "arms": list(indices),
        "unit": unit,
        "byKind": {kind: values(kind) for kind in KIND_LABELS},
        "equivalent": values("dense_equivalent"),
        "total": values("dense_total"),
    }


def _ticks_plot(index: int, found: Bytes) -> Plot:
    divisor, unit = byte_unit(max(max(values) for values in (*found.by_kind.values(), found.total)))

    def scaled(values: Iterable[float]) -> list[float | None]:
        return _rounded(value / divisor for value in values)

    return {
        "arm": index,
        "unit": unit,
        "ticks": found.ticks,
        "width": found.width,
        "byKind": {kind: scaled(values) for kind, values in found.by_kind.items()},
        "equivalent": scaled(found.equivalent),
        "total": scaled(found.total),
    }


def _frame(title: str, plot: int, *, wide: bool = False, choice: str = "") -> str:
    size = ' class="wide"' if wide else ""
    return (
        f"<figure{size}><figcaption>{escape(title)}{choice}</figcaption>"
        f'<div class="plot" data-plot="{plot}" role="img" aria-label="{escape(title)}"></div></figure>'
    )


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Five significant digits, more than a screen shows: the page stays small."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
