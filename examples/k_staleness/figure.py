"""Draws a sweep's results.json: sampled and greedy validation of every arm, and the bytes that it took.

python examples/k_staleness/figure.py runs/k_staleness/results.json study.png
python examples/k_staleness/figure.py runs/send_once/results.json send_once.png
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, GRID, SAMPLED, GREEDY = "#1f2933", "#67737f", "#e3e8ee", "#1769aa", "#d99a2b"
WIDTH, ROW, PIXELS_PER_INCH = 12.5, 0.27, 130
SHARES = (("training_share", "Training bytes, % of dense"), ("traffic_share", "All traffic, % of dense"))
BOLD = ("dense ", "default ", "k5 ", "k20 ", "k50 ")
METRICS = (("val/score_sampled/last3", SAMPLED, "sampled"), ("val/score/last3", GREEDY, "greedy"))


def draw(results: Mapping[str, Any], file: Path) -> None:
    """One row an arm, best sampled score first; bars are standard errors, small dots single runs."""
    arms = {name: arm["metrics"] for name, arm in results["arms"].items() if arm["n"]}
    names = sorted(arms, key=lambda name: arms[name]["val/score_sampled/last3"]["mean"])
    figure = Figure((WIDTH, 1.6 + ROW * len(names)), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    scores, *shares = figure.subplots(1, 3, sharey=True, width_ratios=(3, 1, 1))
    for metric, colour, label in METRICS:
        for place, name in enumerate(names):
            found = arms[name][metric]
            scores.plot(found["values"], [place] * found["n"], ".", color=colour, alpha=0.35, markersize=4)
            scores.errorbar(found["mean"], place, xerr=found["stderr"] or 0.0, fmt="o", color=colour, markersize=5)
        scores.plot([], [], "o", color=colour, label=label)
    best = arms[results["reference"]]["val/score_sampled/last3"]["mean"]
    scores.axvline(best, color=SAMPLED, linewidth=0.8, linestyle=":")
    scores.set_ylim(-0.8, len(names) - 0.2)
    scores.set_yticks(range(len(names)), [f"{name}  (n={results['arms'][name]['n']})" for name in names], fontsize=8)
    scores.set_title("Validation, mean of the last three", loc="left", color=INK, fontsize=11)
    scores.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9)
    for axes, (metric, title) in zip(shares, SHARES, strict=True):
        values = [100 * arms[name][metric]["mean"] for name in names]
        axes.barh(range(len(names)), values, color=GREY, height=0.6)
        for place, value in enumerate(values):
            axes.text(value * 1.06, place, f"{value:.3g}", va="center", color=INK, fontsize=7)
        axes.set(xscale="log", xlim=(min(values) / 2, 400))
        axes.set_title(title, loc="left", color=INK, fontsize=11)
    for axes in (scores, *shares):
        _plain(axes)
    for label in scores.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(BOLD) else "normal")
    figure.savefig(file)


def _plain(axes: Axes) -> None:
    axes.grid(True, axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", colors=GREY)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
