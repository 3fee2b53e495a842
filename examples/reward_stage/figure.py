"""Draw when each rank of a run sampled and scored: ``python examples/reward_stage/figure.py OUT.png RUN [RUN]``.

One round of each run, the last of its largest: a step's. Runs of one pipeline with ``logging.timeline=true``, such as
this example with and without its reward stage. Prints how much of the scoring lay inside the sampling.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {"sample": "#9db4c8", "score": "#c8553d"}

Note = dict[str, Any]


def last_round(run: Path) -> list[list[Note]]:
    """What each rank did in it."""
    files = sorted((run / "timeline").glob("rank*.jsonl"))
    ranks = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    rounds = [note for note in ranks[0] if note["what"] == "round"]
    most = max(note["sequences"] for note in rounds)
    number = max(index for index, note in enumerate(rounds) if note["sequences"] == most)
    begin = rounds[number]["start"]
    end = rounds[number + 1]["start"] if number + 1 < len(rounds) else float("inf")
    return [[note for note in rank if note["what"] != "round" and begin <= note["start"] < end] for rank in ranks]


def share_inside(ranks: list[list[Note]]) -> float:
    """Of the seconds of scoring, those before the last column was sampled."""
    over = max(note["end"] for rank in ranks for note in rank if note["what"] == "sample")
    scored = [(note["start"], note["end"]) for rank in ranks for note in rank if note["what"] == "score"]
    return sum(max(0.0, min(end, over) - start) for start, end in scored) / sum(end - start for start, end in scored)


def draw(axes: Axes, ranks: list[list[Note]], title: str) -> None:
    """A line for each rank, milliseconds from the first column on."""
    begin = min(note["start"] for rank in ranks for note in rank)
    for number, rank in enumerate(ranks):
        for what, colour in COLOURS.items():
            bars = [
                (1e3 * (note["start"] - begin), 1e3 * (note["end"] - note["start"]))
                for note in rank
                if note["what"] == what
            ]
            axes.broken_barh(bars, (number - 0.35, 0.7), color=colour, linewidth=0)
    stages = sum(any(note["what"] == "sample" for note in rank) for rank in ranks)
    names = [f"policy stage {number}" for number in range(stages)] + ["reward stage"] * (len(ranks) - stages)
    axes.set_yticks(range(len(ranks)), names)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    rounds = [last_round(run) for run in args.runs]
    figure, panels = pyplot.subplots(
        len(rounds), 1, sharex=True, squeeze=False, figsize=(9, 0.7 + 0.55 * sum(len(ranks) + 1 for ranks in rounds)),
        layout="constrained", height_ratios=[len(ranks) for ranks in rounds],
    )  # fmt: skip
    for axes, run, ranks in zip(panels[:, 0], args.runs, rounds, strict=True):
        share = share_inside(ranks)
        print(f"{run}: {share:.1%} of scoring inside sampling")
        has = (
            "with a reward stage" if any({note["what"] for note in rank} == {"score"} for rank in ranks) else "without"
        )
        draw(axes, ranks, f"{has}: {share:.0%} of scoring lies inside sampling")
    panels[-1, 0].set_xlabel("milliseconds of one step's rollout")
    handles = [Patch(color=colour, label=what) for what, colour in COLOURS.items()]
    panels[0, 0].legend(handles=handles, loc="upper right", frameon=False, ncols=2, bbox_to_anchor=(1.0, 1.25))
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
