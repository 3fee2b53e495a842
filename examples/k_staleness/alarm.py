"""Replays the collapse alarm on the runs of a sweep and compares it with the rule "M was held for more than 10 ticks".

    python examples/k_staleness/alarm.py runs/k_staleness > alarm.json

A run with an anchor has collapsed once its sampled validation is 0.10 below its best so far. Prints one JSON object:
for each arm the ticks of the drop and of the alarm by seed, and over all runs with an anchor the area under the curve
(AUC) of both rules, from what was known by tick 39.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.anchor.alarm import Alarm
from megatron_grpo.config import load_config

EARLY = 40
DROP = 0.10
Row = dict[str, Any]


def rows_of(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def first_drop(rows: Sequence[Row]) -> int | None:
    """The tick at which sampled validation was ``DROP`` below its best."""
    best = 0.0
    for row in rows:
        score = row.get("val/score_sampled")
        if score is not None:
            best = max(best, score)
            if score <= best - DROP:
                return int(row["tick"])
    return None


def judged(run: Path) -> dict[str, Any]:
    """What the alarm and the trivial rule say of one run."""
    config, rows = load_config(run / "config.yaml"), rows_of(run)
    alarm = Alarm(config.anchor, config.merger)
    states = [alarm.update(row) for row in rows]
    held = [row["anchor/age"] - config.anchor.delay for row in rows[:EARLY] if row.get("anchor/age") is not None]
    return {
        "anchor": config.anchor.enabled and config.merger.kind != "none",
        "drop": first_drop(rows),
        "fired": next((tick for tick, state in enumerate(states) if state.fired), None),
        "score": max(state.score for state in states[:EARLY]),
        "held": max(held, default=0),
    }


def auc(high: Sequence[float], low: Sequence[float]) -> float | None:
    """The share of pairs in which the collapsed run scores higher; ties count half."""
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in high for b in low]
    return sum(wins) / len(wins) if wins else None


def arms(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for arm in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs = [run for run in sorted(arm.iterdir()) if (run / "summary.json").is_file()]
        if runs:
            yield arm.name, [judged(run) for run in runs]


def main(folder: Path) -> dict[str, Any]:
    found = dict(arms(folder))
    anchored = [run for runs in found.values() for run in runs if run["anchor"]]
    rules = {
        rule: auc(
            [r[rule] for r in anchored if r["drop"] is not None], [r[rule] for r in anchored if r["drop"] is None]
        )
        for rule in ("score", "held")
    }
    table = {
        arm: {key: [run[key] for run in runs] for key in ("drop", "fired", "score")} for arm, runs in found.items()
    }
    return {"auc": rules, "runs": len(anchored), "arms": table}


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1])), sys.stdout, indent=1)
