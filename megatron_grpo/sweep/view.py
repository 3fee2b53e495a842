"""What a sweep shows: a table of arms that fills, or a line a run."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_grpo.sweep.spec import Run
from megatron_grpo.training.view import duration

GREEDY, SAMPLED, BYTES = "val/score/last3", "val/score_sampled/last3", "training_share"
PLAIN_WIDTH = 110

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a sweep is."""

    total: int
    """Runs, finished ones included."""
    done: int
    """Runs that are finished."""
    ticks_left: int
    """Of the runs that have not ended."""
    ticks_made: int
    """Since ``began``."""
    running: dict[str, str]
    """Arm to the seeds under way, each with the share of its ticks made."""
    began: float
    """time.monotonic() at the start of this process's runs."""

    @property
    def time_left(self) -> str:
        """By the mean pace so far; ``?`` before the first tick."""
        if not self.ticks_made:
            return "?"
        return duration((time.monotonic() - self.began) / self.ticks_made * self.ticks_left)


class View(Protocol):
    """What follows a sweep, as a context manager: ``update`` often, ``ended`` once a run."""

    def __enter__(self) -> "View": ...
    def __exit__(self, *error: object) -> None: ...
    def update(self, results: Results, standing: Standing) -> None: ...
    def ended(self, run: Run, code: int, results: Results, standing: Standing) -> None: ...


def build_view(stream: TextIO | None = None) -> View:
    """A live table when ``stream`` (standard error by default) is a terminal, else a line a run."""
    stream = sys.stderr if stream is None else stream
    return LiveTable(Console(file=stream)) if stream.isatty() else Lines(stream)


class LiveTable:
    """The table of arms, redrawn as it fills; failures scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, results: Results, standing: Standing) -> None:
        """Draw the table anew."""
        self._live.update(arms_table(results, standing))

    def ended(self, run: Run, code: int, results: Results, standing: Standing) -> None:
        """Say that a run failed; a finished one shows in the table."""
        if code:
            self._live.console.print(Text(_line(run, code, results, standing)))
        self.update(results, standing)


class Lines:
    """One line a run, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, results: Results, standing: Standing) -> None:
        """Nothing: nobody watches."""

    def ended(self, run: Run, code: int, results: Results, standing: Standing) -> None:
        """Print the run's line at once, so that a log can be followed."""
        print(_line(run, code, results, standing), file=self._stream, flush=True)


def _line(run: Run, code: int, results: Results, standing: Standing) -> str:
    end = f"{run.name} " + (f"FAILED, exit code {code}" if code else "finished")
    if not code:
        arm = results["arms"][run.arm]
        at = arm["seeds"].index(run.seed)
        for word, key, form in (("greedy", GREEDY, ".3f"), ("sampled", SAMPLED, ".3f"), ("bytes", BYTES, ".1%")):
            if key in arm["metrics"] and (value := arm["metrics"][key]["values"][at]) is not None:
                end += f"  {word} {value:{form}}"
    return f"{end}  {standing.done}/{standing.total} runs  left {standing.time_left}"


def arms_table(results: Results, standing: Standing) -> Table:
    """The arms so far: mean and standard error over seeds of the last three validations, and bytes."""
    title = f"{results['sweep']}: {standing.done}/{standing.total} runs"
    title += f", left {standing.time_left}" if standing.running else ""
    table = Table(title=title, caption="scores: mean of the last 3 validations ± standard error over seeds")
    reference = results["reference"]
    columns = ["arm", "n", *(["running"] if standing.running else []), "greedy", "sampled", "bytes"]
    columns += [f"sampled - {reference}, 95 %"] if reference is not None else []
    for column in columns:
        table.add_column(Text(column), justify="left" if column in ("arm", "running") else "right")
    for name, arm in results["arms"].items():
        cells = [name, f"{arm['n']}/{len(arm['planned'])}"]
        cells += [standing.running.get(name, "")] if standing.running else []
        cells += [_score(arm["metrics"].get(GREEDY)), _score(arm["metrics"].get(SAMPLED))]
        cells.append(f"{arm['metrics'][BYTES]['mean']:.1%}" if BYTES in arm["metrics"] else "")
        if reference is not None:
            cells.append(_difference(results["paired"].get(name, {"metrics": {}})["metrics"].get(SAMPLED)))
        table.add_row(*map(Text, cells))
    return table


def _score(statistics: Mapping[str, Any] | None) -> str:
    if statistics is None:
        return ""
    error = statistics["stderr"]
    return f"{statistics['mean']:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _difference(statistics: Mapping[str, Any] | None) -> str:
    if statistics is None:
        return ""
    interval = statistics["interval"]
    return f"{statistics['mean']:+.3f}" + (f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else "")


def print_results(results: Results, standing: Standing, failures: Sequence[tuple[str, int, list[str]]]) -> None:
    """The closing table on standard output, and on standard error each failed run with the end of what it said."""
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(arms_table(results, standing))
    for name, code, tail in failures:
        said = "\n".join(f"    {line}" for line in tail)
        print(f"{name} failed with exit code {code}; it last said:\n{said}", file=sys.stderr)
