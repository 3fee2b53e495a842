"""A run with a reward stage, started as a user starts it: what it writes, and that it ends however a run can end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_run import ROOT, megatron_grpo, rows_of

EXAMPLE = str(ROOT / "examples/reward_stage/run.yaml")
SMALL = ("data.val_size=16", "logging.tensorboard=false", "boundary.calibration=8")


@pytest.mark.slow
def test_example_runs_and_notes_what_each_rank_did(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = ("train.steps=2", "train.eval_every=2", "train.save_every=2")
    result = megatron_grpo("train", EXAMPLE, *SMALL, *steps, "--run-dir", str(run))
    assert result.returncode == 0, result.stderr
    for row in rows_of(run)[1::2]:
        assert row["reward/mean"] == row["rewards/model:judge"] != row["rewards/exact"]
        assert row["time/reward"] > 0.0
    notes = [
        [json.loads(line) for line in (run / f"timeline/rank{rank:05d}.jsonl").read_text().splitlines()]
        for rank in range(3)
    ]
    assert [{note["what"] for note in rank} for rank in notes] == [{"round", "sample"}] * 2 + [{"score"}]
    assert all(note["start"] <= note["end"] for rank in notes for note in rank)
    sampled = [note for note in notes[1] if note["what"] == "sample"]
    within = [
        note
        for note in notes[2]
        if any(one["start"] < note["start"] for one in sampled) and any(note["end"] < one["start"] for one in sampled)
    ]
    assert sum(note["sequences"] for note in within) > 128, "most is scored while more is sampled"
    # calibration (a whole training micro-batch), a group for the gap, 4 validations before and after, and two steps
    assert sum(note["sequences"] for note in notes[2]) == 32 + 8 + 2 * 4 * 16 + 2 * 128
    stages = sorted(path.name for path in (run / "checkpoints/tick000004").glob("rank*.pt"))
    assert stages == ["rank00000.pt", "rank00001.pt"]
    resumed = megatron_grpo(
        "train", EXAMPLE, *SMALL, "train.steps=3", "parallel.reward_stage=false", "--run-dir", str(run),
        "--resume", "auto",
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert [row["tick"] for row in rows_of(run)] == list(range(6))


def test_a_limit_ends_the_reward_stage_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megatron_grpo("train", EXAMPLE, *SMALL, "train.stop_grad_norm=1.0e-9", "--run-dir", str(run))
    assert result.returncode == 3, result.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped_by_limit"
    assert (run / "checkpoints/tick000002/run.json").is_file()


def running(run: Path) -> "subprocess.Popen[str]":
    """The example, after its second step."""
    command = [sys.executable, "-m", "megatron_grpo", "train", EXAMPLE, *SMALL, "train.steps=400"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2 "):
            return process
    raise AssertionError("the run ended early")


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_that_needs_the_reward_stage_until_then(tmp_path: Path) -> None:
    process = running(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "checkpoint saved" in output and "Traceback" not in output


@pytest.mark.slow
def test_a_killed_reward_rank_ends_the_run(tmp_path: Path) -> None:
    process = running(tmp_path / "run")
    ranks = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    killed = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - killed < 15
    assert process.returncode in (1, 137), output
