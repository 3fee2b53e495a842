"""Runs as child processes: forked from a server that has imported the engines, in a session of their own."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from megatron_grpo.config import Config, write_resolved
from megatron_grpo.launch import rank_environment, start_local
from megatron_grpo.sweep.folder import CONFIG, CONSOLE

PRELOAD = "megatron_grpo.sweep.server"
KILL_AFTER_S = 3.0


class Child(Protocol):
    """A run under way."""

    def code(self) -> int | None:
        """Its exit code; None while it runs."""

    def stop(self) -> None:
        """Ask it to save a checkpoint after the step under way, and to end."""

    def kill(self) -> None:
        """End it, and all of its ranks, now."""


class Starter(Protocol):
    def __call__(self, cfg: Config, run_dir: Path, gpus: Sequence[int]) -> Child: ...


class ForkedRun:
    """A run forked from the server, which the first of them starts."""

    def __init__(self, cfg: Config, run_dir: Path, gpus: Sequence[int]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(cfg, run_dir / CONFIG)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([PRELOAD])
        self._process: BaseProcess = server.Process(target=_child, args=(cfg, run_dir, gpus))
        self._process.start()

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def stop(self) -> None:
        """SIGTERM: it ends with code 143 after the step under way."""
        self._process.terminate()

    def kill(self) -> None:
        """A second SIGTERM makes a launcher kill its ranks; whatever is left after that is killed itself."""
        self._process.terminate()
        self._process.join(KILL_AFTER_S)
        self._process.kill()
        self._process.join()


def _child(cfg: Config, run_dir: Path, gpus: Sequence[int]) -> None:
    """Train in this process, or on ranks that it launches; ends the process with the run's exit code."""
    os.setsid()  # Ctrl-C reaches the sweep alone, which then asks its runs to stop
    _redirect(run_dir / CONSOLE)
    _stop_with_parent()
    os.environ |= rank_environment({}, threads=None if gpus else cfg.parallel.threads)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if cfg.world_size > 1:
        arguments = ["train", str(run_dir / CONFIG), "--run-dir", str(run_dir), "--resume", "auto"]
        sys.exit(start_local(arguments, cfg.world_size, cfg.parallel))
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    from megatron_grpo.training.loop import train

    sys.exit(train(cfg, run_dir, "auto"))


def _redirect(console: Path) -> None:
    """Standard output and error, those of later processes included, go to the end of this file."""
    file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)


def _stop_with_parent() -> None:
    """A sweep that was killed takes its runs with it: each ends itself as by SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
