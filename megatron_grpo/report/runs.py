"""Run and sweep directories, read with patience: a run may still be going, and its files may be cut or odd."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config import ConfigError
from megatron_grpo.training.metrics import Row

SEED_KEY = "train.seed"
LARGEST = 1e100
"""No measure comes near; up to it sums and squares are finite."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory.

    Attributes:
        folder: the arm's folder name when the run belongs to a sweep.
        config: ``section.key`` to its value as JSON text.
        rows: metrics in the order of ticks, finite numbers only; ``step`` and ``tick`` are always there.
        summary: what summary.json holds; empty while the run goes on.
        odd_lines: lines of metrics.jsonl that are no rows, a last line without its newline not counted.
    """

    path: Path
    folder: str | None
    config: dict[str, str]
    rows: list[Row]
    summary: dict[str, Any]
    odd_lines: int

    @property
    def seed(self) -> str:
        return self.config.get(SEED_KEY, "null")

    @property
    def ticks(self) -> int:
        """Ticks made so far."""
        return int(self.rows[-1]["tick"] or 0) + 1 if self.rows else 0

    @property
    def steps(self) -> int:
        """Steps begun so far."""
        return int(self.rows[-1]["step"] or 0) + 1 if self.rows else 0

    @property
    def status(self) -> str:
        """``running`` without a summary, which is also what a killed run looks like."""
        return str(self.summary.get("status", "finished")) if self.summary else "running"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of run and sweep directories, each run once, in the given order.

    Errors: ConfigError with a line for every path that is neither, and for an unreadable config.yaml.
    """
    found: dict[Path, Run] = {}
    errors = []
    if not paths:
        errors.append("report: names no run; give run or sweep directories")
    for path in paths:
        try:
            for folder, run_dir in _run_dirs(path):
                found.setdefault(run_dir.resolve(), _read_run(run_dir, folder))
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return list(found.values())


def _run_dirs(path: Path) -> Iterator[tuple[str | None, Path]]:
    """Arm folder (None outside a sweep) and directory of every run at ``path``."""
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a directory; give a run directory, or that of a sweep")
    if (path / "config.yaml").is_file():
        yield None, path
        return
    found = [config.parent for config in path.glob("*/seed*/config.yaml")]
    if not found:
        raise ConfigError(
            f"{path}: holds neither a run (config.yaml) nor a sweep (ARM/seedN/config.yaml); "
            "give a directory that train or sweep has written"
        )
    results = _read_object(path / "results.json")
    arms = results.get("arms")
    order = [results.get("reference"), *(arms if isinstance(arms, dict) else ())]

    def place(run_dir: Path) -> tuple[int, str, int, str]:
        name = run_dir.parent.name
        return order.index(name) if name in order else len(order), name, len(run_dir.name), run_dir.name

    for run_dir in sorted(found, key=place):
        yield run_dir.parent.name, run_dir


def _read_run(path: Path, folder: str | None) -> Run:
    rows, odd_lines = _read_rows(path / "metrics.jsonl")
    return Run(path, folder, _read_config(path), rows, _read_object(path / "summary.json"), odd_lines)


def _read_config(path: Path) -> dict[str, str]:
    """``section.key`` to JSON text."""
    try:
        sections = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(sections, dict):
            raise ValueError("holds no sections")
        flat = {}
        for section, values in sections.items():
            for key, value in values.items() if isinstance(values, dict) else [(None, values)]:
                flat[str(section) if key is None else f"{section}.{key}"] = json.dumps(value, default=str)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: config.yaml cannot be read ({why}); restore it, or leave this run out") from error
    return flat


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_rows(file: Path) -> tuple[list[Row], int]:
    """Rows by rising tick (the later of two rows of a tick) and the number of lines that are none."""
    if not file.is_file():
        return [], 0
    *lines, _cut = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_clean(line) for line in lines if line.strip()]
    by_tick = {row["tick"]: row for row in rows if row is not None}
    return [by_tick[tick] for tick in sorted(by_tick, key=lambda tick: tick or 0)], rows.count(None)


def _clean(line: str) -> Row | None:
    """The numbers of a line, without NaN and the infinite; None for what is not a JSON object with a tick."""
    try:
        values = json.loads(line, parse_int=float)  # whole numbers of any length, which then may be infinite
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    row: Row = {key: value for key, value in values.items() if isinstance(value, float) and abs(value) < LARGEST}
    if "tick" not in row:
        return None
    return {"step": 0} | row | {"tick": int(row["tick"] or 0)}
