"""Arms: the runs whose configs differ in nothing but the seed, their names, and what the table says of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megatron_grpo.training.metrics import summarise

from .runs import SEED_KEY, Run
from .stats import Estimate, estimate, paired_difference

MOST_KEYS = 3
"""Longest combination of keys tried for a name before all that differ are written out."""

Config = dict[str, str]


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs of one config, over seeds. ``config`` is without the seed; ``summaries`` are those of the runs."""

    name: str
    config: Config
    runs: tuple[Run, ...]
    summaries: tuple[dict[str, Any], ...]

    def over_seeds(self, pick: Callable[[dict[str, Any]], float | None]) -> Estimate | None:
        """Mean of a figure of the summaries over the runs that have it."""
        return estimate(value for summary in self.summaries if (value := pick(summary)) is not None)

    def by_seed(self, pick: Callable[[dict[str, Any]], float | None]) -> dict[str, float]:
        """The figure of each seed; the last run of a seed counts."""
        picked = [(run.seed, pick(summary)) for run, summary in zip(self.runs, self.summaries, strict=True)]
        return {seed: value for seed, value in picked if value is not None}

    def difference(self, first: "Arm", pick: Callable[[dict[str, Any]], float | None]) -> Estimate | None:
        """This arm's figure minus that of ``first``, paired by seed."""
        return paired_difference(self.by_seed(pick), first.by_seed(pick))


def build_arms(runs: Sequence[Run]) -> list[Arm]:
    """Runs grouped by config, in the order in which each config came first; inside an arm by seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_without_seed(run.config), sort_keys=True), []).append(run)
    members = [sorted(group, key=lambda run: (len(run.seed), run.seed)) for group in groups.values()]
    configs = [_without_seed(group[0].config) for group in members]
    names = _names(members, configs)
    return [
        Arm(name, config, tuple(group), tuple(_summary(run) for run in group))
        for name, config, group in zip(names, configs, members, strict=True)
    ]


def differing_keys(configs: Sequence[Config]) -> list[str]:
    """The keys that have not one value in all of the configs, in the order of the first one that has them."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def shown(value: str | None) -> str:
    """A value of a config as an override writes it; ``-`` where the config lacks the key."""
    if value is None:
        return "-"
    parsed = json.loads(value)
    return parsed if isinstance(parsed, str) and parsed and parsed.isprintable() else value


def _without_seed(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != SEED_KEY}


def _summary(run: Run) -> dict[str, Any]:
    """The figures of a run, from its rows, so that a run that goes on has them too.

    Rows do not tell the scores before training, from which a best may come; summary.json does.
    """
    start = {}
    for key, value in run.summary.items():
        first = value.get("first") if key.startswith("val/") and isinstance(value, dict) else None
        if isinstance(first, int | float) and not isinstance(first, bool):
            start[key] = float(first)
    return summarise(run.rows, {"validation_start": start, "status": run.status})


def _names(members: Sequence[Sequence[Run]], configs: Sequence[Config]) -> list[str]:
    """The folder in a sweep, else the shortest config difference; the folder of a run that is alone."""
    differences = _differences(configs)
    names = [group[0].folder or difference for group, difference in zip(members, differences, strict=True)]
    if len(names) == 1:
        names = [members[0][0].folder or members[0][0].path.resolve().name]
    names = [_printable(name) for name in names]
    for name in {name for name in names if names.count(name) > 1}:  # one folder name in two sweeps
        same = [index for index, other in enumerate(names) if other == name]
        for index, difference in zip(same, _differences([configs[index] for index in same]), strict=True):
            names[index] = f"{name} ({_printable(difference)})"
    return names


def _differences(configs: Sequence[Config]) -> list[str]:
    """For each config the fewest ``key=value`` that no other config has together."""
    keys = differing_keys(configs)
    return [_difference(config, [other for other in configs if other is not config], keys) for config in configs]


def _difference(config: Config, others: Sequence[Config], keys: Sequence[str]) -> str:
    for size in range(1, MOST_KEYS + 1):
        for chosen in combinations(keys, size):
            if not any(all(other.get(key) == config.get(key) for key in chosen) for other in others):
                return _written(config, chosen)
    return _written(config, keys)


def _written(config: Config, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={shown(config.get(key))}" for key in keys)


def _printable(name: str) -> str:
    """On one line, and without the halves of characters that a file name can hold but UTF-8 cannot."""
    return " ".join("".join(char if char.isprintable() else " " for char in name).split()) or "unnamed"
