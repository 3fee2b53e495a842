"""``anchor.alarm`` in runs that a user starts: a word and no more, or the end of the run."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_run import SMOKE, megatron_grpo, rows_of

STALE = ["anchor.cadence=20", "anchor.delay=20"]  # by tick 2 the alarm sees what is to come at tick 20


@pytest.mark.slow
def test_warn_is_one_line_and_off_is_the_same_run_without_it(tmp_path: Path) -> None:
    warned, silent = tmp_path / "warn", tmp_path / "off"
    # An unquoted off is a YAML boolean.
    for run, mode in ((warned, "warn"), (silent, "'off'")):
        result = megatron_grpo("train", SMOKE, *STALE, f"anchor.alarm={mode}", "--run-dir", str(run))
        assert result.returncode == 0, result.stderr
    assert (warned / "log.txt").read_text().count("collapse alarm at tick 2") == 1
    assert "collapse alarm" not in (silent / "log.txt").read_text()
    assert [row["alarm/fired"] for row in rows_of(warned)] == [0, 0, 1, 1]
    assert not any("alarm/score" in row for row in rows_of(silent))
    assert (warned / "policy/model.safetensors").read_bytes() == (silent / "policy/model.safetensors").read_bytes()


def test_stop_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megatron_grpo("train", SMOKE, *STALE, "anchor.alarm=stop", "train.steps=4", "--run-dir", str(run))
    assert result.returncode == 3, result.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped_by_alarm"
    assert [row["tick"] for row in rows_of(run)] == [0, 1, 2, 3]
    assert "val/score" in rows_of(run)[-1]
    assert (run / "checkpoints/tick000004").is_dir()


def test_a_limit_ends_the_run_with_a_sentence_and_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    limits = ["train.steps=3", "train.stop_grad_norm=1e-6"]
    result = megatron_grpo("train", SMOKE, *limits, "--run-dir", str(run))
    assert result.returncode == 3, result.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped_by_limit"
    said = (run / "log.txt").read_text()
    assert "at tick 0 is above train.stop_grad_norm=1e-06, after step 1, checkpoint saved; go on with --resume" in said
    assert [row["tick"] for row in rows_of(run)] == [0, 1]
    result = megatron_grpo("train", SMOKE, "train.steps=3", "--run-dir", str(run), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert [row["tick"] for row in rows_of(run)] == [0, 1, 2, 3, 4, 5]
