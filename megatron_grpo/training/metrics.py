"""The run record: one row a tick in metrics.jsonl, TensorBoard, wandb, log.txt, and summary.json at the end.

A row maps metric keys to numbers. ``step`` and ``tick`` count from 0. Times (seconds) and bytes are those
since the row before, so that sums over rows are sums over the run; bytes are also summed over boundaries,
directions and replicas. ``train/skipped`` counts the ticks skipped so far.
"""

import importlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from megatron_grpo.config import ConfigError, LoggingConfig
from megatron_grpo.training.files import write_json_atomic, write_text_atomic
from megatron_grpo.training.view import LiveView

METRIC_KEYS: tuple[str, ...] = (
    "step",
    "tick",
    "time/step",
    "time/rollout",
    "time/train",
    "time/anchor",
    "time/merge",
    "time/reward",
    "time/reward_hidden",
    "reward/mean",
    "reward/std",
    "reward/parse_fail_frac",
    "reward/unscored_frac",
    "reward/zero_std_frac",
    "val/score",
    "val/score_sampled",
    "val/score_codec",
    "val/score_sampled_codec",
    "val/unscored_frac",
    "rollout/response_length",
    "rollout/truncated_frac",
    "rollout/resampled_frac",
    "rollout/logprob_gap",
    "rollout/logprob_gap_median",
    "rollout/tokens_per_s",
    "policy/clip_frac",
    "policy/entropy",
    "policy/kl",
    "policy/grad_norm",
    "boundary/q_error_fwd",
    "boundary/q_error_bwd",
    "boundary/drift",
    "boundary/backward_budget",
    "boundary/backward_cosine",
    "boundary/bytes_fast",
    "boundary/bytes_fast_fwd",
    "boundary/bytes_fast_bwd",
    "boundary/bytes_anchor",
    "boundary/bytes_basis",
    "boundary/bytes_old_logprob",
    "boundary/bytes_rollout",
    "boundary/bytes_reward",
    "boundary/bytes_dense_equivalent",
    "boundary/bytes_dense_total",
    "boundary/bytes_tensor",
    "boundary/bytes_tensor_dense",
    "boundary/bytes_data",
    "boundary/bytes_data_dense",
    "anchor/age",
    "anchor/fired",
    "anchor/cos_fast",
    "anchor/sign_agreement",
    "merger/weight",
    "merger/gate_cos",
    "alarm/score",
    "alarm/fired",
    "train/skipped",
    "train/lr",
)
REWARD_PREFIX = "rewards/"
"""Of the keys that a config names: the mean of each of several rewards."""
TRAINING_KINDS = ("fast", "old_logprob", "anchor", "basis")
BYTE_KINDS = (*TRAINING_KINDS, "rollout")

_KNOWN = frozenset(METRIC_KEYS)
_VALIDATION_KEYS = tuple(key for key in METRIC_KEYS if key.startswith("val/"))

Number = int | float | None
Row = dict[str, Number]


class RunRecord(Protocol):
    """What a training loop calls, on every rank; only one rank's record writes anything."""

    def write_row(self, row: Mapping[str, float]) -> None: ...
    def log(self, text: str) -> None: ...
    def close(self, extra: Mapping[str, Any]) -> dict[str, Any]: ...


class NullRecorder:
    """The record of every rank but the first of the first replica: keeps nothing."""

    def write_row(self, row: Mapping[str, float]) -> None:
        """Ignore the row."""

    def log(self, text: str) -> None:
        """Ignore the text."""

    def close(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """An empty summary."""
        return {}


class Recorder:
    """Writes a run's record as it goes. For rank 0 of the first replica; the others take a NullRecorder.

    Args:
        run_dir: an existing run directory.
        logging: which further sinks to feed.
        view: what the screen shows; started here, finished by ``close``.
        ticks: ticks of the whole run.
        world: number of ranks, for the summary.
        resumed_tick: the last tick before the checkpoint the run goes on from. Rows after it are dropped from
            metrics.jsonl (and hidden in TensorBoard), so that no tick appears twice. None starts anew.

    Errors: ConfigError when an enabled sink is not installed or the old metrics.jsonl cannot be read.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingConfig,
        view: LiveView,
        ticks: int,
        world: int,
        *,
        resumed_tick: int | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._view = view
        self._world = world
        self._tensorboard = _tensorboard_writer(run_dir, resumed_tick) if logging.tensorboard else None
        self._wandb = _wandb_run(run_dir) if logging.wandb else None
        path = run_dir / "metrics.jsonl"
        self._rows = _restart_rows(path, resumed_tick)
        self._metrics = _open_lines(path)
        self._log = _open_lines(run_dir / "log.txt")
        view.start(ticks, done=0 if resumed_tick is None else resumed_tick + 1)

    @property
    def rows(self) -> Sequence[Row]:
        """Every row of the run so far, those from before a resume included."""
        return self._rows

    def write_row(self, row: Mapping[str, float]) -> None:
        """Record one tick in every sink. Keys without a value at this tick are absent; NaN becomes null.

        Errors: KeyError for an unknown key or without ``step`` and ``tick``; ValueError when the tick does
        not come after the one before. All of them are bugs of the caller.
        """
        cleaned = clean_row(row)
        tick = row["tick"]
        last = self._rows[-1]["tick"] if self._rows else None
        if last is not None and tick <= last:
            raise ValueError(f"tick {tick} was recorded after tick {last}")
        self._rows.append(cleaned)
        self._metrics.write(json.dumps(cleaned, allow_nan=False) + "\n")
        if self._tensorboard is not None:
            for key, value in cleaned.items():
                if value is not None and key != "tick":
                    self._tensorboard.add_scalar(key, value, int(tick))
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in cleaned.items() if value is not None})
        self._view.update(cleaned)

    def log(self, text: str) -> None:
        """Say ``text`` on the screen and, with the time, in log.txt."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._view.note(text)

    def close(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json, close every sink, show the closing table; the summary.

        Args:
            extra: what rows do not tell: ``status`` (``finished`` if not given), ``policy``,
                ``peak_memory_mb`` (one number a rank); see ``summarise``.
        """
        summary = summarise(self._rows, {"run_dir": str(self._run_dir), "world": self._world, **extra})
        write_json_atomic(self._run_dir / "summary.json", summary)
        self._metrics.close()
        self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._view.finish(summary)
        return summary


def clean_row(row: Mapping[str, float]) -> Row:
    """A row as JSON can hold it: numbers or 0-d tensors to int or float, NaN and infinity to None.

    Errors: KeyError for a key that is neither in METRIC_KEYS nor a reward's, and without ``step`` or ``tick``.
    """
    named = sorted(key for key in row if key.startswith(REWARD_PREFIX))
    unknown = sorted(row.keys() - _KNOWN - set(named))
    if unknown:
        raise KeyError(f"unknown metric keys {unknown}; add them to METRIC_KEYS")
    cleaned: Row = {"step": int(row["step"]), "tick": int(row["tick"])}
    for key in (*METRIC_KEYS[2:], *named):
        if key in row:
            value = float(row[key])
            if not math.isfinite(value):
                cleaned[key] = None
            else:
                cleaned[key] = round(value) if key.startswith("boundary/bytes_") else value
    return cleaned


def summarise(rows: Sequence[Mapping[str, Number]], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run from its rows. Pure.

    Args:
        rows: every row of the run.
        extra: added to the summary, and wins where a key is in both; but ``validation_start`` (validation
            keys to scores before the first tick) becomes the ``first`` of each score instead.
    """
    added = dict(extra)
    start: Mapping[str, float] = added.pop("validation_start", {})
    seconds = _total(rows, "time/step")
    ticks = _count(rows, "tick")
    summary: dict[str, Any] = {
        "status": "finished",
        "steps": _count(rows, "step"),
        "ticks": ticks,
        "skipped_ticks": round(max(_values(rows, "train/skipped"), default=0)),
        "seconds": seconds,
        "seconds_per_tick": seconds / ticks if ticks else None,
    }
    for key in _VALIDATION_KEYS:
        scores = _values([start, *rows], key)
        if scores:
            summary[key] = {"first": scores[0], "best": max(scores), "last": scores[-1]}
    rewards = _values(rows, "reward/mean")
    if rewards:
        summary["reward/mean"] = {"first": rewards[0], "last": rewards[-1]}
    q_error = {side: _q_error(rows, f"boundary/q_error_{side}") for side in ("fwd", "bwd")}
    return summary | _traffic(rows) | {"q_error": q_error} | added


def _traffic(rows: Sequence[Mapping[str, Number]]) -> dict[str, Any]:
    """Bytes by kind and what they are compared with; the shares are None when nothing crossed a link.

    ``training_share``: fast + old-log-prob + anchor + basis over the dense equivalent. ``traffic_share``: all
    bytes over the dense total.
    """
    by_kind = {kind: round(_total(rows, f"boundary/bytes_{kind}")) for kind in BYTE_KINDS}
    training = sum(by_kind[kind] for kind in TRAINING_KINDS)
    dense = round(_total(rows, "boundary/bytes_dense_equivalent"))
    total = round(_total(rows, "boundary/bytes_dense_total"))
    return {
        "bytes": by_kind,
        "training_bytes": training,
        "dense_equivalent": dense,
        "dense_total": total,
        "training_share": training / dense if dense else None,
        "traffic_share": sum(by_kind.values()) / total if total else None,
        "links": _other_links(rows),
    }


def _other_links(rows: Sequence[Mapping[str, Number]]) -> dict[str, dict[str, int]]:
    """Bytes of the compressed links beside the pipeline's, and what they would be uncompressed."""
    links = {}
    for link in ("tensor", "data"):
        key = f"boundary/bytes_{link}"
        if any(key in row for row in rows):
            links[link] = {"bytes": round(_total(rows, key)), "dense": round(_total(rows, f"{key}_dense"))}
    return links


def _q_error(rows: Sequence[Mapping[str, Number]], key: str) -> dict[str, Number]:
    """Q error under the random basis, under the first refreshed one, and at the end; None where absent.

    A basis refreshed in a step serves from the next step on (``boundary.commit: step``), so the first value
    of a later step is the first that is sure to come from a refreshed basis under either way of committing.
    """
    measured = [(row["step"] or 0, value) for row in rows if (value := row.get(key)) is not None]
    fired = [row["step"] or 0 for row in rows if row.get("anchor/fired")]
    refreshed = [value for step, value in measured if fired and step > fired[0]]
    return {
        "bootstrap": measured[0][1] if measured else None,
        "after_first_refresh": refreshed[0] if refreshed else None,
        "last": measured[-1][1] if measured else None,
    }


def _count(rows: Iterable[Mapping[str, Number]], key: str) -> int:
    """How many steps or ticks were made: they count from 0."""
    return max((int(value) + 1 for value in _values(rows, key)), default=0)


def _values(rows: Iterable[Mapping[str, Number]], key: str) -> list[float]:
    return [value for row in rows if (value := row.get(key)) is not None]


def _total(rows: Iterable[Mapping[str, Number]], key: str) -> float:
    return math.fsum(_values(rows, key))


def _open_lines(path: Path) -> TextIO:
    """A file to append lines to, each of which is handed to the system at once; the caller closes it."""
    return path.open("a", encoding="utf-8", buffering=1)


def _restart_rows(path: Path, resumed_tick: int | None) -> list[Row]:
    """The rows up to ``resumed_tick``, which are also all that ``path`` holds afterwards (none for None)."""
    if not path.exists():
        return []
    rows: list[Row] = []
    if resumed_tick is not None:
        rows = [row for row in _read_rows(path) if (row["tick"] or 0) <= resumed_tick]
    write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl. A last line without its newline was cut by a kill and is left out.

    Errors: ConfigError for any other line that is not a row.
    """
    rows: list[Row] = []
    *lines, _cut = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["tick"], row["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--resume: line {number} of {path} is not a metrics row; repair or remove that line"
            ) from error
        rows.append(row)
    return rows


def _import_sink(module: str, *, key: str, package: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}=true needs {package}, which is not installed; pip install {install} or set {key}=false"
        ) from error


def _tensorboard_writer(run_dir: Path, resumed_tick: int | None) -> Any:
    module = _import_sink(
        "torch.utils.tensorboard", key="logging.tensorboard", package="tensorboard", install="tensorboard"
    )
    purge = None if resumed_tick is None else resumed_tick + 1
    return module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)


def _wandb_run(run_dir: Path) -> Any:
    """Start, or on a resume go on with, the wandb run of this run directory, charted over ticks."""
    wandb = _import_sink("wandb", key="logging.wandb", package="wandb", install="'megatron_grpo[wandb]'")
    id_path = run_dir / "wandb_id"
    known = id_path.read_text(encoding="utf-8").strip() if id_path.exists() else None
    run = wandb.init(project="megatron_grpo", name=run_dir.name, dir=str(run_dir), id=known, resume="allow")
    write_text_atomic(id_path, f"{run.id}\n")
    run.define_metric("*", step_metric="tick")
    return run
