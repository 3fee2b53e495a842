"""results.json: the mean, standard error and n of every metric of every arm, and differences paired by seed. Pure,
but for ``run_metrics``, which reads one finished run."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_grpo.report.stats import student_quantile
from megatron_grpo.sweep.spec import Arm, Sweep

LAST_VALIDATIONS = 3
VALIDATION_KEYS = ("val/score", "val/score_sampled", "val/score_codec", "val/score_sampled_codec")
Reduce = Callable[[Sequence[float]], float]

OVER_THE_RUN: dict[str, tuple[str, Reduce]] = {
    "merger/weight": ("mean", fmean),
    "rollout/logprob_gap_median": ("mean", fmean),
    "policy/clip_frac": ("max", max),
    "boundary/drift": ("max", max),
    "boundary/backward_budget": ("mean", fmean),
}
AT_THE_END = ("rollout/response_length", "rollout/truncated_frac")

Metrics = Mapping[str, float]


def run_metrics(run_dir: Path) -> dict[str, float]:
    """Every number of a finished run's summary.json (nested keys joined by ``/``), and what its rows add.

    ``KEY/last3`` is the mean of the last three validations, ``KEY/last_tenth`` that of the last tenth of the ticks.
    """
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return flatten(summary) | row_metrics([json.loads(line) for line in lines])


def flatten(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested mappings, keys joined by ``/``; texts, lists, truth values and nulls are left out."""
    flat: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + key] = value
    return flat


def row_metrics(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """What a summary does not tell, from the rows of metrics.jsonl; a key without any value is absent."""
    found: dict[str, tuple[Reduce, list[float]]] = {
        f"{key}/last{LAST_VALIDATIONS}": (fmean, _values(rows, key)[-LAST_VALIDATIONS:]) for key in VALIDATION_KEYS
    }
    found |= {f"{key}/{name}": (reduce, _values(rows, key)) for key, (name, reduce) in OVER_THE_RUN.items()}
    late = rows[len(rows) - math.ceil(len(rows) / 10) :]
    found |= {f"{key}/last_tenth": (fmean, _values(late, key)) for key in AT_THE_END}
    return {name: reduce(values) for name, (reduce, values) in found.items() if values}


def _values(rows: Sequence[Mapping[str, float | None]], key: str) -> list[float]:
    return [value for row in rows if (value := row.get(key)) is not None]


def sweep_results(sweep: Sweep, finished: Mapping[str, Metrics]) -> dict[str, Any]:
    """What results.json holds.

    Args:
        finished: metrics of each finished run, by ``Run.name``.
    """
    results: dict[str, Any] = {
        "sweep": sweep.name,
        "reference": sweep.reference,
        "arms": {arm.name: _arm(arm, finished) for arm in sweep.arms},
    }
    if sweep.reference is not None:
        by_seed = {
            arm.name: {run.seed: finished[run.name] for run in arm.runs if run.name in finished} for arm in sweep.arms
        }
        reference = by_seed.pop(sweep.reference)
        results["paired"] = {name: _differences(seeds, reference) for name, seeds in by_seed.items()}
    return results


def _arm(arm: Arm, finished: Mapping[str, Metrics]) -> dict[str, Any]:
    """The finished runs of an arm; ``values`` of each metric are in the order of ``seeds``, null where absent."""
    runs = [run for run in arm.runs if run.name in finished]
    metrics = [finished[run.name] for run in runs]
    return {
        "overrides": arm.overrides,
        "planned": [run.seed for run in arm.runs],
        "seeds": [run.seed for run in runs],
        "n": len(runs),
        "runs": [run.name for run in runs],
        "metrics": {key: spread([each.get(key) for each in metrics]) for key in _keys(metrics)},
    }


def _differences(arm: Mapping[int, Metrics], reference: Mapping[int, Metrics]) -> dict[str, Any]:
    """Arm minus reference at the seeds that both have, for every metric: spread and 95 % interval."""
    seeds = [seed for seed in arm if seed in reference]
    paired = [
        {key: arm[seed][key] - reference[seed][key] for key in arm[seed] if key in reference[seed]} for seed in seeds
    ]
    metrics = {}
    for key in _keys(paired):
        statistics = spread([each.get(key) for each in paired])
        metrics[key] = statistics | {"interval": _interval(statistics)}
    return {"seeds": seeds, "metrics": metrics}


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, standard error (sample deviation / sqrt(n); null for one value) and n of the values that are there."""
    known = [value for value in values if value is not None]
    return {
        "mean": fmean(known),
        "stderr": stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None,
        "n": len(known),
        "values": list(values),
    }


def _interval(statistics: Mapping[str, Any]) -> list[float] | None:
    """95 % interval of the mean by Student's t; null for one value."""
    if statistics["stderr"] is None:
        return None
    reach = student_quantile(statistics["n"] - 1) * statistics["stderr"]
    return [statistics["mean"] - reach, statistics["mean"] + reach]


def _keys(metrics: Sequence[Metrics]) -> list[str]:
    """Every key of several mappings, in the order they first appear."""
    return list(dict.fromkeys(key for each in metrics for key in each))
