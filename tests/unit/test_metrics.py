"""The run record: rows, resume, sinks, the summary worked out by hand, and both views."""

import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_grpo.config import ConfigError, LoggingConfig
from megatron_grpo.training import view as view_module
from megatron_grpo.training.metrics import (
    METRIC_KEYS,
    NullRecorder,
    Recorder,
    RunRecord,
    clean_row,
    summarise,
)
from megatron_grpo.training.view import (
    NullView,
    PlainView,
    RichView,
    Row,
    build_view,
    closing_table,
    duration,
)

# The contract: the keys of a run directory's metrics.jsonl, and the two for skips and the rate.
CONTRACT = """
step tick time/step time/rollout time/train time/anchor time/merge time/reward time/reward_hidden reward/mean reward/std
val/score val/score_sampled val/score_codec val/score_sampled_codec val/unscored_frac rollout/response_length
rollout/truncated_frac rollout/logprob_gap rollout/logprob_gap_median rollout/tokens_per_s policy/clip_frac
policy/entropy policy/kl policy/grad_norm boundary/q_error_fwd boundary/q_error_bwd boundary/drift
boundary/backward_budget boundary/backward_cosine
boundary/bytes_fast boundary/bytes_fast_fwd boundary/bytes_fast_bwd boundary/bytes_anchor boundary/bytes_basis
boundary/bytes_old_logprob boundary/bytes_rollout boundary/bytes_reward boundary/bytes_dense_equivalent
boundary/bytes_dense_total boundary/bytes_tensor boundary/bytes_tensor_dense
boundary/bytes_data boundary/bytes_data_dense
anchor/age anchor/fired anchor/cos_fast anchor/sign_agreement merger/weight merger/gate_cos
alarm/score alarm/fired reward/parse_fail_frac reward/unscored_frac rollout/resampled_frac
reward/zero_std_frac train/skipped train/lr
"""

# Three steps of two ticks. The anchor fires at tick 2, in step 1; its basis serves from step 2 on.
ROWS: list[dict[str, float]] = [
    {"step": 0, "tick": 0, "time/step": 1.0, "boundary/q_error_fwd": 0.97, "boundary/q_error_bwd": 0.98}
    | {"boundary/bytes_fast": 100, "boundary/bytes_old_logprob": 50, "boundary/bytes_rollout": 500}
    | {"boundary/bytes_dense_equivalent": 2000, "boundary/bytes_dense_total": 3500, "train/skipped": 0},
    {"step": 0, "tick": 1, "time/step": 2.0, "boundary/q_error_fwd": 0.96, "boundary/bytes_fast": 100}
    | {"boundary/bytes_dense_equivalent": 2000, "boundary/bytes_dense_total": 2000, "train/skipped": 1}
    | {"reward/mean": 0.25, "rollout/response_length": 10.0, "val/score": 0.4, "val/score_sampled": 0.3},
    {"step": 1, "tick": 2, "time/step": 1.0, "boundary/q_error_fwd": 0.95, "anchor/fired": 1}
    | {"boundary/bytes_fast": 100, "boundary/bytes_anchor": 1800, "boundary/bytes_basis": 8}
    | {"boundary/bytes_dense_equivalent": 2000, "boundary/bytes_dense_total": 2000, "train/skipped": 2},
    {"step": 1, "tick": 3, "time/step": 2.0, "boundary/q_error_fwd": 0.94, "boundary/bytes_fast": 100}
    | {"boundary/bytes_dense_equivalent": 2000, "boundary/bytes_dense_total": 2000, "train/skipped": 2}
    | {"reward/mean": 0.5, "rollout/response_length": 11.0, "val/score": 0.7, "val/score_sampled": math.nan},
    {"step": 2, "tick": 4, "time/step": 1.0, "boundary/q_error_fwd": 0.6, "boundary/q_error_bwd": 0.8},
    {"step": 2, "tick": 5, "time/step": 2.0, "boundary/q_error_fwd": 0.5, "boundary/q_error_bwd": 0.7}
    | {"reward/mean": 0.75, "rollout/response_length": 12.0, "val/score": 0.6, "val/score_sampled": 0.5},
]


QUIET = LoggingConfig(tensorboard=False)


class Witness(NullView):
    """Remembers what a view was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, total_ticks: int, *, done: int = 0) -> None:
        self.told.append(("start", total_ticks, done))

    def update(self, row: Row) -> None:
        self.told.append(("update", row["tick"]))

    def note(self, text: str) -> None:
        self.told.append(("note", text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.told.append(("finish", summary["status"]))


def recorder(run_dir: Path, *, resumed_tick: int | None = None, logging: LoggingConfig | None = None) -> Recorder:
    return Recorder(run_dir, logging or QUIET, NullView(), 6, 2, resumed_tick=resumed_tick)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_means_of_several_rewards_are_under_the_names_of_the_config() -> None:
    row = clean_row({"step": 1, "tick": 2, "rewards/math": 0.5, "rewards/python:a.b:c": math.nan, "reward/mean": 1})
    assert row == {"step": 1, "tick": 2, "reward/mean": 1.0, "rewards/math": 0.5, "rewards/python:a.b:c": None}


def test_metric_keys_are_the_contract() -> None:
    assert sorted(METRIC_KEYS) == sorted(CONTRACT.split())
    assert len(set(METRIC_KEYS)) == len(METRIC_KEYS)


def test_a_row_is_on_disk_as_soon_as_it_is_written_and_has_only_its_own_keys(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.write_row({"step": 1, "tick": 1, "policy/kl": math.nan, "policy/grad_norm": math.inf})
    record.write_row({"tick": 2.0, "step": 1, "boundary/bytes_fast": 1234.0, "reward/mean": 1})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = read_rows(tmp_path)
    assert first == {"step": 1, "tick": 1, "policy/kl": None, "policy/grad_norm": None}
    assert second == {"step": 1, "tick": 2, "boundary/bytes_fast": 1234, "reward/mean": 1.0}
    assert '"boundary/bytes_fast": 1234,' in text or '"boundary/bytes_fast": 1234}' in text
    record.close({})


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"step": 1, "tick": 3, "val/scores": 1.0}, KeyError),
        ({"tick": 3}, KeyError),
        ({"step": 1}, KeyError),
        ({"step": 1, "tick": 2}, ValueError),
        ({"step": 1, "tick": 1}, ValueError),
    ],
)
def test_a_bad_row_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, row: dict[str, float], error: type[Exception]
) -> None:
    record = recorder(tmp_path)
    record.write_row({"step": 1, "tick": 2})
    with pytest.raises(error):
        record.write_row(row)
    record.close({})
    assert read_rows(tmp_path) == [{"step": 1, "tick": 2}]


def test_clean_row_takes_zero_dimensional_tensors() -> None:
    torch = pytest.importorskip("torch")
    cleaned = clean_row({"step": torch.tensor(3), "tick": torch.tensor(7), "policy/kl": torch.tensor(0.5)})
    assert cleaned == {"step": 3, "tick": 7, "policy/kl": 0.5}
    assert type(cleaned["tick"]) is int and type(cleaned["policy/kl"]) is float


def test_resume_drops_later_rows_and_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    lines = [json.dumps({"step": tick, "tick": tick, "reward/mean": 0.1}) + "\n" for tick in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "ti')
    view = Witness()
    record = Recorder(tmp_path, QUIET, view, 6, 2, resumed_tick=2)
    assert view.told == [("start", 6, 3)]
    assert [row["tick"] for row in read_rows(tmp_path)] == [1, 2]
    record.write_row({"step": 3, "tick": 3, "reward/mean": 0.9})
    summary = record.close({})
    assert [row["tick"] for row in read_rows(tmp_path)] == [1, 2, 3]
    assert summary["ticks"] == 4 and summary["reward/mean"] == {"first": 0.1, "last": 0.9}


def test_a_start_from_scratch_in_the_same_folder_starts_the_record_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tick": 0}\n{"step": 1, "tick": 1}\n')
    record = recorder(tmp_path)
    record.write_row({"step": 0, "tick": 0})
    record.close({})
    assert read_rows(tmp_path) == [{"step": 0, "tick": 0}]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"tick": 1}', ""])
def test_a_damaged_record_is_named_by_line_and_left_alone(tmp_path: Path, line: str) -> None:
    text = f'{{"step": 1, "tick": 1}}\n{line}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"line 2 of .*metrics\.jsonl is not a metrics row"):
        recorder(tmp_path, resumed_tick=5)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_log_goes_to_the_file_and_the_screen(tmp_path: Path) -> None:
    view = Witness()
    record = Recorder(tmp_path, QUIET, view, 6, 2)
    record.log("tick 3 skipped: gradient not finite")
    assert (tmp_path / "log.txt").read_text().endswith(" tick 3 skipped: gradient not finite\n")
    record.close({"status": "interrupted"})
    assert view.told == [
        ("start", 6, 0),
        ("note", "tick 3 skipped: gradient not finite"),
        ("finish", "interrupted"),
    ]


def test_the_null_recorder_is_a_record_that_keeps_nothing() -> None:
    record: RunRecord = NullRecorder()
    record.write_row({"anything": 1.0})
    record.log("text")
    assert record.close({"status": "finished"}) == {}


def test_summary_by_hand(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    for row in ROWS:
        record.write_row(row)
    record.close({"policy": "runs/x/policy", "peak_memory_mb": [900.0, 950.0]})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "status": "finished",
        "steps": 3,
        "ticks": 6,
        "skipped_ticks": 2,
        "seconds": 9.0,
        "seconds_per_tick": 1.5,
        "val/score": {"first": 0.4, "best": 0.7, "last": 0.6},
        "val/score_sampled": {"first": 0.3, "best": 0.5, "last": 0.5},
        "reward/mean": {"first": 0.25, "last": 0.75},
        "bytes": {"fast": 400, "old_logprob": 50, "anchor": 1800, "basis": 8, "rollout": 500},
        "training_bytes": 2258,
        "dense_equivalent": 8000,
        "dense_total": 9500,
        "training_share": pytest.approx(0.28225, rel=1e-12),
        "traffic_share": pytest.approx(2758 / 9500, rel=1e-12),
        "links": {},
        "q_error": {
            "fwd": {"bootstrap": 0.97, "after_first_refresh": 0.6, "last": 0.5},
            "bwd": {"bootstrap": 0.98, "after_first_refresh": 0.8, "last": 0.7},
        },
        "run_dir": str(tmp_path),
        "world": 2,
        "policy": "runs/x/policy",
        "peak_memory_mb": [900.0, 950.0],
    }


def test_summary_of_a_run_that_ended_before_its_first_tick() -> None:
    summary = summarise([], {"status": "failed"})
    assert summary["status"] == "failed"
    assert (summary["steps"], summary["ticks"], summary["seconds_per_tick"]) == (0, 0, None)
    assert summary["training_share"] is None and summary["traffic_share"] is None
    assert summary["q_error"]["fwd"] == {"bootstrap": None, "after_first_refresh": None, "last": None}
    assert "val/score" not in summary
    assert "Run failed: 0 steps, 0 ticks" in rendered(summary)


def test_a_validation_before_the_first_tick_is_where_the_scores_start() -> None:
    summary = summarise(ROWS[:2], {"validation_start": {"val/score": 0.5, "val/score_codec": 0.1}})
    assert summary["val/score"] == {"first": 0.5, "best": 0.5, "last": 0.4}
    assert summary["val/score_sampled"] == {"first": 0.3, "best": 0.3, "last": 0.3}
    assert summary["val/score_codec"] == {"first": 0.1, "best": 0.1, "last": 0.1}
    assert "validation_start" not in summary


def test_without_a_refresh_there_is_no_error_after_it() -> None:
    rows = [{key: value for key, value in row.items() if key != "anchor/fired"} for row in ROWS]
    assert summarise(rows, {})["q_error"]["fwd"] == {
        "bootstrap": 0.97,
        "after_first_refresh": None,
        "last": 0.5,
    }


def test_tensorboard_holds_the_rows_by_tick_and_a_resume_hides_what_it_dropped(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = recorder(tmp_path, logging=LoggingConfig(tensorboard=True))
    for tick, score in ((1, 0.25), (2, 0.5), (3, 0.75)):
        first.write_row({"step": tick, "tick": tick, "val/score": score, "policy/kl": math.nan})
    first.close({})
    second = recorder(tmp_path, resumed_tick=1, logging=LoggingConfig(tensorboard=True))
    second.write_row({"step": 2, "tick": 2, "val/score": 1.0})
    second.close({})
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(each.step, each.value) for each in accumulator.Scalars("val/score")] == [(1, 0.25), (2, 1.0)]
    assert sorted(accumulator.Tags()["scalars"]) == ["step", "val/score"]


@pytest.mark.parametrize(
    ("logging", "module", "message"),
    [
        (
            LoggingConfig(tensorboard=False, wandb=True),
            "wandb",
            r"logging\.wandb=true .*not installed; pip install .*wandb.*false",
        ),
        (
            LoggingConfig(tensorboard=True),
            "torch.utils.tensorboard",
            r"logging\.tensorboard=true .*not installed; pip install tensorboard.*false",
        ),
    ],
)
def test_a_sink_that_is_not_installed_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging: LoggingConfig, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        recorder(tmp_path, logging=logging)
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_the_rows_over_ticks_and_a_resume_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        id="abc",
        define_metric=lambda name, step_metric: calls.append(("metric", (name, step_metric))),
        log=lambda row: calls.append(("log", row)),
        finish=lambda: calls.append(("finish", None)),
    )
    wandb = ModuleType("wandb")

    def init(**kwargs: Any) -> SimpleNamespace:
        calls.append(("init", (kwargs["id"], kwargs["resume"])))
        return run

    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resumed_tick in (None, 1):
        record = recorder(tmp_path, resumed_tick=resumed_tick, logging=LoggingConfig(tensorboard=False, wandb=True))
        record.write_row({"step": 2, "tick": 2, "policy/kl": math.nan, "val/score": 0.5})
        record.close({})
    logged = ("log", {"step": 2, "tick": 2, "val/score": 0.5})
    after_init = [("metric", ("*", "tick")), logged, ("finish", None)]
    assert calls == [("init", (None, "allow")), *after_init, ("init", ("abc", "allow")), *after_init]


def rendered(summary: Mapping[str, Any]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=110).print(closing_table(summary))
    return stream.getvalue()


def test_the_plain_view_prints_a_line_a_step_with_the_bytes_saved_so_far() -> None:
    stream = io.StringIO()
    view = build_view(stream)
    assert isinstance(view, PlainView)
    view.start(6)
    for row in ROWS:
        view.update(clean_row(row))
    lines = stream.getvalue().splitlines()
    # Bytes: 250 of 4000 dense after step 1, 2258 of 8000 after steps 2 and 3.
    assert [line.split("  left ")[0] for line in lines] == [
        "step 1  tick 2/6  reward 0.250  validation 0.400  length 10.0  bytes saved 93.8 %",
        "step 2  tick 4/6  reward 0.500  validation 0.700  length 11.0  bytes saved 71.8 %",
        "step 3  tick 6/6  reward 0.750  validation 0.600  length 12.0  bytes saved 71.8 %",
    ]
    assert lines[-1].endswith("left 0:00")


def test_time_left_counts_only_the_ticks_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(view_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stream = io.StringIO()
    view = PlainView(stream)
    view.start(100, done=40)
    clock.now = 130.0
    view.update({"step": 24, "tick": 49, "reward/mean": 0.5, "rollout/response_length": 9.0})
    # 10 ticks in 30 s; 50 are left.
    assert stream.getvalue() == "step 25  tick 50/100  reward 0.500  length 9.0  left 2:30\n"


def test_a_terminal_gets_a_bar_with_every_figure_and_notes_above_it() -> None:
    stream = io.StringIO()
    view = RichView(Console(file=stream, force_terminal=True, width=80))
    view.start(6)
    for row in ROWS:
        view.update(clean_row(row))
    view.note("tick 2 [skipped]")
    view.finish(summarise([clean_row(row) for row in ROWS], {}))
    text = stream.getvalue()
    for part in ("step 3", "6/6", "left 0:00", "reward 0.750", "val 0.600", "len 12.0", "saved 71.8 %"):
        assert part in text
    assert "tick 2 [skipped]" in text


def test_the_closing_table_says_what_improved_what_it_cost_and_where_it_is() -> None:
    extra = {"run_dir": "runs/x", "policy": "runs/x/policy", "peak_memory_mb": [900.4, 950.0]}
    summary = summarise([clean_row(row) for row in ROWS], extra)
    text = " ".join(rendered(summary | {"dense_equivalent": 8_000_000, "training_bytes": 2_258_000}).split())
    for part in (
        "Run finished: 3 steps, 6 ticks",
        "0.400 -> 0.600 (+0.200, best 0.700)",
        "0.300 -> 0.500 (+0.200, best 0.500)",
        "0.250 -> 0.750 (+0.500)",
        "2.26 MB, 28.2 % of the dense equivalent, 8.00 MB",
        "bootstrap 0.970 -> first refresh 0.600 -> last 0.500",
        "bootstrap 0.980 -> first refresh 0.800 -> last 0.700",
        "1.50 s per tick, 0:09 in all",
        "2 (gradient not finite)",
        "900, 950 MB by rank",
        "runs/x/policy",
    ):
        assert part in text, part


def test_the_closing_table_of_one_stage_says_that_nothing_was_sent() -> None:
    assert "none: no pipeline boundary was crossed" in rendered(summarise([{"step": 0, "tick": 0}], {}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (150, "2:30"), (3599.7, "1:00:00"), (7384, "2:03:04")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
