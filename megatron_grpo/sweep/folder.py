"""What a sweep's folder already holds: finished runs, runs to go on with, runs made with another config."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_grpo.config import Config, ConfigError, load_config

CONFIG = "config.yaml"
CONSOLE = "console.txt"
ENDED = ("finished", "stopped_by_alarm")
"""Status of a run that is not to be gone on with; "stopped", by SIGTERM, is."""


def is_finished(run_dir: Path) -> bool:
    """Whether the run came to its end, by its last tick or by its own alarm."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return summary["status"] in ENDED


def changed_keys(run_dir: Path, cfg: Config) -> str:
    """Where the run's recorded config is not ``cfg``, as ``section.key=RECORDED, now VALUE``; empty for nowhere."""
    if not (run_dir / CONFIG).is_file():
        return ""
    try:
        recorded = _flat(load_config(run_dir / CONFIG))
    except ConfigError as error:
        return f"its {CONFIG} no longer loads, {str(error).splitlines()[0]}"
    now = _flat(cfg)
    return "; ".join(f"{key}={recorded[key]}, now {now[key]}" for key in now if recorded[key] != now[key])


def _flat(cfg: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in cfg.dump().items() for key, value in keys.items()}


def ticks_made(run_dir: Path) -> int:
    """Rows of the run's metrics.jsonl so far."""
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:  # not yet there, or no file: the run itself will say so
        return 0


def console_tail(run_dir: Path, lines: int = 15) -> list[str]:
    """The last lines of what the run said."""
    file = run_dir / CONSOLE
    return file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if file.is_file() else []


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other sweeps out of it. Errors: ConfigError when one is already running there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out={folder}: is a file; give a directory")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out={folder}: another sweep is running there; wait for it, or give another") from None
        yield
