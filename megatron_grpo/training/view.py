"""What the screen shows during a run, and the closing table."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

Row = Mapping[str, int | float | None]

_TRAINING_BYTES = tuple(f"boundary/bytes_{kind}" for kind in ("fast", "old_logprob", "anchor", "basis"))
_KIND_LABELS = {
    "fast": "fast",
    "old_logprob": "old log-probs",
    "anchor": "anchor",
    "basis": "basis",
    "rollout": "sampling",
}
_PLAIN_WIDTH = 110
_WORDS = ("reward", "validation", "length", "bytes saved")
_SHORT_WORDS = ("reward", "val", "len", "saved")  # The bar must fit a terminal of 80 columns.


class LiveView(Protocol):
    """What follows a run. ``start`` first, ``update`` once a tick, ``note`` at any time, ``finish`` last."""

    def start(self, total_ticks: int, *, done: int = 0) -> None: ...
    def update(self, row: Row) -> None: ...
    def note(self, text: str) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


def build_view(stream: TextIO | None = None) -> LiveView:
    """A progress bar when ``stream`` (standard output by default) is a terminal, else a line a step."""
    stream = sys.stdout if stream is None else stream
    return RichView(Console(file=stream)) if stream.isatty() else PlainView(stream)


class Progression:
    """What both views show, gathered from rows: steps and ticks done, last figures, bytes so far."""

    def __init__(self, total_ticks: int, *, done: int) -> None:
        self.total_ticks = total_ticks
        self.ticks = done
        self.steps = 0
        self._done_before = done
        self._started = time.monotonic()
        self._latest: dict[str, float] = {}
        self._training_bytes = 0.0
        self._dense_bytes = 0.0

    def update(self, row: Row) -> None:
        """Take a row in."""
        self.ticks = int(row["tick"] or 0) + 1
        self.steps = int(row["step"] or 0) + 1
        self._latest.update({key: value for key, value in row.items() if value is not None})
        self._training_bytes += sum(row.get(key) or 0 for key in _TRAINING_BYTES)
        self._dense_bytes += row.get("boundary/bytes_dense_equivalent") or 0

    def figures(self, words: tuple[str, str, str, str]) -> str:
        """Reward, validation, length and bytes saved, under these words, as far as they are known."""
        shown = []
        keys = (("reward/mean", ".3f"), ("val/score", ".3f"), ("rollout/response_length", ".1f"))
        for word, (key, form) in zip(words[:3], keys, strict=True):
            if key in self._latest:
                shown.append(f"{word} {self._latest[key]:{form}}")
        if self._dense_bytes:
            shown.append(f"{words[3]} {100 * (1 - self._training_bytes / self._dense_bytes):.1f} %")
        return "  ".join(shown)

    def time_left(self) -> str:
        """Time to the last tick at the mean pace of this process, or ``?`` before its first tick."""
        ticks = self.ticks - self._done_before
        if ticks <= 0:
            return "?"
        return duration((time.monotonic() - self._started) / ticks * (self.total_ticks - self.ticks))


class RichView:
    """A progress bar for terminals; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed}/{task.total}  left {task.fields[left]}  {task.fields[figures]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._progression = Progression(0, done=0)

    def start(self, total_ticks: int, *, done: int = 0) -> None:
        """Show the bar; ``done`` ticks were made before a resume."""
        self._progression = Progression(total_ticks, done=done)
        self._task = self._bar.add_task("", total=total_ticks, completed=done, step="-", figures="", left="?")
        self._bar.start()

    def update(self, row: Row) -> None:
        """Move the bar to the row's tick."""
        now = self._progression
        now.update(row)
        if self._task is not None:
            self._bar.update(
                self._task,
                completed=now.ticks,
                step=now.steps,
                figures=now.figures(_SHORT_WORDS),
                left=now.time_left(),
            )

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop the bar and print the closing table."""
        self._bar.stop()
        self._console.print(closing_table(summary))


class PlainView:
    """One line a step, for logs and pipes: printed with the row that carries the step's rollout figures."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progression = Progression(0, done=0)
        self._printed_step: int | None = None

    def start(self, total_ticks: int, *, done: int = 0) -> None:
        """Start the clock; ``done`` ticks were made before a resume."""
        self._progression = Progression(total_ticks, done=done)

    def update(self, row: Row) -> None:
        """Take the row in; print its step's line when it ends the step."""
        now = self._progression
        now.update(row)
        ends_step = any(key.startswith(("rollout/", "val/")) for key in row)
        if ends_step and now.steps != self._printed_step:
            self._printed_step = now.steps
            ticks = f"tick {now.ticks}/{now.total_ticks}"
            self.note(f"step {now.steps}  {ticks}  {now.figures(_WORDS)}  left {now.time_left()}")

    def note(self, text: str) -> None:
        """Print a line at once, so that a log can be followed."""
        print(text, file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the closing table."""
        Console(file=self._stream, width=_PLAIN_WIDTH).print(closing_table(summary))


class NullView:
    """Shows nothing."""

    def start(self, total_ticks: int, *, done: int = 0) -> None:
        """Nothing."""

    def update(self, row: Row) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing."""


def closing_table(summary: Mapping[str, Any]) -> Table:
    """What improved, what it cost on the wire, how good the basis got, and where the run is.

    Args:
        summary: as ``megatron_grpo.training.metrics.summarise`` makes it; parts that it lacks are left out.
    """
    table = Table(
        title=f"Run {summary['status']}: {summary['steps']} steps, {summary['ticks']} ticks",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rows in (_learned(summary), _wire(summary), _basis(summary), _place(summary)):
        for label, text in rows:
            table.add_row(label, text)
        table.add_section()
    return table


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _learned(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for label, key in (
        ("validation, greedy", "val/score"),
        ("validation, sampled", "val/score_sampled"),
        ("validation, greedy, through the codec", "val/score_codec"),
        ("validation, sampled, through the codec", "val/score_sampled_codec"),
        ("training reward", "reward/mean"),
    ):
        if key in summary:
            score = summary[key]
            best = f", best {score['best']:.3f}" if "best" in score else ""
            change = score["last"] - score["first"]
            lines.append((label, f"{score['first']:.3f} -> {score['last']:.3f} ({change:+.3f}{best})"))
    return lines


def _wire(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    dense, total = summary["dense_equivalent"], summary["dense_total"]
    others = [
        (f"{link} link", f"{_share(counts['bytes'], counts['dense'])} of {_megabytes(counts['dense'])} uncompressed")
        for link, counts in summary.get("links", {}).items()
    ]
    if not dense:
        return others or [("bytes on the wire", "none: no pipeline boundary was crossed")]
    lines = [
        (
            "training bytes",
            f"{_share(summary['training_bytes'], dense)} of the dense equivalent, {_megabytes(dense)}",
        )
    ]
    for kind, label in _KIND_LABELS.items():
        if kind != "rollout":
            lines.append((f"  {label}", _share(summary["bytes"][kind], dense)))
    if total:
        everything = sum(summary["bytes"].values())
        lines.append(("all traffic", f"{_share(everything, total)} of the dense total, {_megabytes(total)}"))
        lines.append((f"  {_KIND_LABELS['rollout']}", _share(summary["bytes"]["rollout"], total)))
    return lines + others


def _basis(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for label, side in (("Q error, forward", "fwd"), ("Q error, backward", "bwd")):
        error = summary["q_error"][side]
        stages = (("bootstrap", "bootstrap"), ("after_first_refresh", "first refresh"), ("last", "last"))
        known = [f"{name} {error[key]:.3f}" for key, name in stages if error[key] is not None]
        if known:
            lines.append((label, " -> ".join(known)))
    return lines


def _place(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if summary["seconds_per_tick"] is not None:
        pace = f"{summary['seconds_per_tick']:.2f} s per tick, {duration(summary['seconds'])} in all"
        lines.append(("time", pace))
    if summary["skipped_ticks"]:
        lines.append(("skipped ticks", f"{summary['skipped_ticks']} (gradient not finite)"))
    if summary.get("peak_memory_mb"):
        peaks = summary["peak_memory_mb"]
        lines.append(("peak memory", ", ".join(f"{peak:.0f}" for peak in peaks) + " MB by rank"))
    for label, key in (("run", "run_dir"), ("policy", "policy")):
        if summary.get(key):
            lines.append((label, str(summary[key])))
    return lines


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def _share(part: float, whole: float) -> str:
    return f"{_megabytes(part)}, {100 * part / whole:.1f} %"
