"""``megatron-grpo sweep``: start what is not finished, a few at a time, and keep results.json up to date."""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_grpo.config import ConfigError
from megatron_grpo.launch import handling_signals, require_engines
from megatron_grpo.sweep.children import Child, ForkedRun, Starter
from megatron_grpo.sweep.folder import changed_keys, console_tail, is_finished, locked, ticks_made
from megatron_grpo.sweep.results import run_metrics, sweep_results
from megatron_grpo.sweep.room import Gpus, place
from megatron_grpo.sweep.spec import Run, Sweep, load_sweep
from megatron_grpo.sweep.view import Standing, View, build_view, print_results
from megatron_grpo.training.files import write_json_atomic

POLL_S = 0.2
STOP_GRACE_S = 60.0
"""How long runs may take to end their step and save after the sweep was told to stop."""


def run_sweep(
    file: Path,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    only: Collection[str] = (),
    fresh: Collection[str] = (),
) -> int:
    """Bring every run of a sweep to its end, each in ``OUT/ARM/seedN``; finished ones are kept as they are.

    Args:
        out: folder of the sweep; ``runs/NAME`` when absent.
        jobs: runs at once; as many as the cores (or the GPUs) hold when absent.
        only: arms to run; all of them when empty.
        fresh: arms whose runs are deleted and made anew.

    Returns:
        0 when all runs finished, 1 when one failed, 128 + N when signal N ended the sweep.
    Errors: ConfigError, before anything starts, with a line for each mistake in the sweep, its configs or its folder.
    """
    if "RANK" in os.environ:
        raise ConfigError(f"RANK={os.environ['RANK']}: a sweep starts its ranks itself; run it without a launcher")
    sweep = load_sweep(file)
    require_engines()
    folder = (out or Path("runs") / sweep.name).absolute()
    chosen = _chosen(sweep, only, fresh)
    with locked(folder):
        _refuse_changed(folder, [run for run in chosen if run.arm not in fresh])
        for run in chosen:
            if run.arm in fresh and (folder / run.name).is_dir():
                shutil.rmtree(folder / run.name)
        runner = Runner(sweep, folder, chosen, ForkedRun, jobs)
        with _signals() as received, build_view() as view:
            runner.run(view, received)
        failures = [(name, code, console_tail(folder / name)) for name, code in runner.failed.items()]
        print_results(runner.results, runner.standing(), failures)
    if received:
        return 128 + received[0]
    return 1 if failures else 0


def _chosen(sweep: Sweep, only: Collection[str], fresh: Collection[str]) -> list[Run]:
    names = [arm.name for arm in sweep.arms]
    errors = [
        f"{option}={name}: is no arm of this sweep; use {', '.join(names)}"
        for option, given in (("--only", only), ("--fresh", fresh))
        for name in given
        if name not in names
    ]
    if errors:
        raise ConfigError("\n".join(errors))
    return [run for run in sweep.runs if not only or run.arm in only]


def _refuse_changed(folder: Path, runs: Sequence[Run]) -> None:
    errors = [
        f"{folder / run.name}: was made with another config ({changes}); give another --out, or --fresh {run.arm} "
        "to delete the arm's runs and start it anew"
        for run in runs
        if (changes := changed_keys(folder / run.name, run.cfg))
    ]
    if errors:
        raise ConfigError("\n".join(errors))


@dataclass(frozen=True, slots=True)
class _Running:
    run: Run
    child: Child
    gpus: Gpus


class Runner:
    """The runs of a sweep: which are finished, under way, failed and still to start."""

    def __init__(self, sweep: Sweep, folder: Path, chosen: Sequence[Run], start: Starter, jobs: int | None) -> None:
        self._sweep, self._folder, self._chosen, self._start, self._jobs = sweep, folder, chosen, start, jobs
        self._metrics = {
            run.name: run_metrics(folder / run.name)
            for run in sweep.runs
            if is_finished(folder / run.name) and not changed_keys(folder / run.name, run.cfg)
        }
        self._waiting = [run for run in chosen if run.name not in self._metrics]
        self._running: list[_Running] = []
        self._ticks = {run.name: ticks_made(folder / run.name) for run in self._waiting}
        self._ticks_found = dict(self._ticks)
        self._began = time.monotonic()
        self.failed: dict[str, int] = {}
        """Run to exit code, in the order they failed."""
        self.results: dict[str, Any] = {}
        """What results.json holds."""
        self._record()

    def run(self, view: View, received: Sequence[int]) -> None:
        """Start and wait until every run has ended, or a signal is in ``received`` and those under way have stopped."""
        try:
            while not received and (self._waiting or self._running):
                self._launch()
                time.sleep(POLL_S)
                for run in self._ended():
                    view.ended(run, self.failed.get(run.name, 0), self.results, self.standing())
                view.update(self.results, self.standing())
        finally:
            self._stop(received)

    def standing(self) -> Standing:
        """How far the sweep is."""
        running: dict[str, list[str]] = {}
        for run in (each.run for each in self._running):
            running.setdefault(run.arm, []).append(f"seed {run.seed} {self._ticks[run.name] / run.cfg.ticks:.0%}")
        unfinished = [*self._waiting, *(each.run for each in self._running)]
        return Standing(
            total=len(self._chosen),
            done=sum(run.name in self._metrics for run in self._chosen),
            ticks_left=sum(run.cfg.ticks - self._ticks[run.name] for run in unfinished),
            ticks_made=sum(max(ticks - self._ticks_found[name], 0) for name, ticks in self._ticks.items()),
            running={arm: ", ".join(seeds) for arm, seeds in running.items()},
            began=self._began,
        )

    def _launch(self) -> None:
        """Start waiting runs, in their order, while there is room."""
        while self._waiting:
            run = self._waiting[0]
            gpus = place(run.cfg, [(each.run.cfg, each.gpus) for each in self._running], self._jobs)
            if gpus is None:
                return
            self._running.append(_Running(run, self._start(run.cfg, self._folder / run.name, gpus), gpus))
            del self._waiting[0]

    def _ended(self) -> list[Run]:
        """Take in the runs that have ended since the last call, and count the ticks of the others."""
        ended = [(each.run, code) for each in self._running if (code := each.child.code()) is not None]
        for run in (each.run for each in self._running):
            self._ticks[run.name] = ticks_made(self._folder / run.name)
        for run, code in ended:
            run_dir = self._folder / run.name
            if is_finished(run_dir):
                self._metrics[run.name] = run_metrics(run_dir)
                self._record()
            else:
                self.failed[run.name] = code or 1
        self._running = [each for each in self._running if each.run not in [run for run, _ in ended]]
        return [run for run, _ in ended]

    def _stop(self, received: Sequence[int]) -> None:
        """Ask the runs under way to stop; kill them after a grace, or at a second signal. Those are no failures."""
        for each in self._running:
            each.child.stop()
        failed = dict(self.failed)
        deadline = time.monotonic() + STOP_GRACE_S
        while self._running:
            if time.monotonic() > deadline or len(received) > 1:
                for each in self._running:
                    each.child.kill()
            time.sleep(POLL_S)
            self._ended()
        self.failed = failed

    def _record(self) -> None:
        self.results = sweep_results(self._sweep, self._metrics)
        write_json_atomic(self._folder / "results.json", self.results)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """While inside, the signals that would end the sweep are put into the list instead."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    with handling_signals(note):
        yield received
