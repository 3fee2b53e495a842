"""The words and numbers of the page: notes on runs that are not whole, the table of arms, the config."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from .arms import Arm, differing_keys, shown
from .figures import line_style
from .markup import arm_name, swatch, table
from .stats import Estimate

Pick = Callable[[dict[str, Any]], float | None]


def notes(arms: Sequence[Arm]) -> str:
    """What a reader must know of runs that are not whole."""
    items = []
    for arm in arms:
        for run in arm.runs:
            about = []
            if not run.rows:
                about.append("no tick recorded yet")
            if run.status != "finished":
                about.append(f"{run.status}, {count(run.ticks, 'tick')}")
            if run.odd_lines:
                about.append(f"{count(run.odd_lines, 'line')} of metrics.jsonl left out, not a row each")
            if about:
                items.append(f"<li>{escape(arm.name)}, seed {escape(shown(run.seed))}: {escape('; '.join(about))}</li>")
    return f'<ul class="small">{"".join(items)}</ul>' if items else ""


def headline(arms: Sequence[Arm]) -> str:
    """The table of arms."""
    first = arms[0]
    greedy, sampled = _score("val/score", "last"), _score("val/score_sampled", "last")
    columns: list[tuple[str, Callable[[Arm], str]]] = [
        ("n", lambda arm: str(len(arm.runs))),
        ("greedy, last", lambda arm: _number(arm.over_seeds(greedy))),
        ("greedy, best", lambda arm: _number(arm.over_seeds(_score("val/score", "best")))),
        ("sampled, last", lambda arm: _number(arm.over_seeds(sampled))),
        ("sampled, best", lambda arm: _number(arm.over_seeds(_score("val/score_sampled", "best")))),
    ]
    if len(arms) > 1:
        columns += [
            ("difference, greedy", lambda arm: _difference(arm, first, greedy)),
            ("difference, sampled", lambda arm: _difference(arm, first, sampled)),
        ]
    columns += [
        ("training bytes", lambda arm: _percent(arm.over_seeds(lambda summary: summary["training_share"]))),
        ("all traffic", lambda arm: _percent(arm.over_seeds(lambda summary: summary["traffic_share"]))),
        ("seconds a tick", lambda arm: _number(arm.over_seeds(lambda summary: summary["seconds_per_tick"]))),
    ]
    rows = [
        [arm_name(arm.name, swatch(*line_style(index))), *(text(arm) for _, text in columns)]
        for index, arm in enumerate(arms)
    ]
    rows_and_head = table(["arm", *(name for name, _ in columns)], rows)
    compared = (
        f" Differences are in the last validation from {escape(first.name)}, paired by the seeds that both have, with "
        "the 95 % interval of Student's t."
        if len(arms) > 1
        else ""
    )
    return (
        f"<h2>Arms</h2>{rows_and_head}"
        '<p class="small">Validation scores: mean ± standard error over n seeds, greedy and sampled at temperature 1.'
        f"{compared} Training bytes are a share of the dense equivalent (bf16 forward and backward of the ticks), "
        "all traffic is one of the dense total.</p>"
    )


def _score(key: str, which: str) -> Pick:
    return lambda summary: summary.get(key, {}).get(which)


def settings(arms: Sequence[Arm]) -> str:
    """The runs of each arm, the keys in which arms differ, and what they share."""
    configs = [arm.config for arm in arms]
    keys = differing_keys(configs)
    rows = [
        [
            arm_name(arm.name),
            escape(", ".join(shown(run.seed) for run in arm.runs)),
            _range([run.ticks for run in arm.runs]),
            *(escape(shown(arm.config.get(key))) for key in keys),
        ]
        for arm in arms
    ]
    rows_and_head = table(["arm", "seeds", "ticks", *keys], rows, kind="settings")
    title = "Config that all arms share" if len(arms) > 1 else "Resolved config"
    shared = "\n".join(f"{key}={shown(value)}" for key, value in configs[0].items() if key not in keys)
    return (
        f"<section><h2>Config</h2>{rows_and_head}"
        f"<details><summary>{title}</summary><pre>{escape(shared)}</pre></details></section>"
    )


def _number(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.stderr is None else f" ± {value.stderr:.3f}")


def _difference(arm: Arm, first: Arm, pick: Pick) -> str:
    """The paired difference; its 95 % interval, which takes two seeds; their number where it is not the arm's n."""
    value = None if arm is first else arm.difference(first, pick)
    if value is None:
        return "" if arm is first else "-"
    paired = "" if value.n == len(arm.runs) else f" n {value.n}"
    if value.half_width is None:
        return f"{value.mean:+.3f}<small>{paired}</small>"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.3f}<br><small>[{low:+.3f}, {high:+.3f}]{paired}</small>"


def _percent(value: Estimate | None) -> str:
    return "-" if value is None else f"{100 * value.mean:.1f} %"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
