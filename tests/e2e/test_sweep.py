"""A sweep of the shipped example as a user starts it: forked and launched runs, failures, going on, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_run import ROOT, SMOKE, megatron_grpo, rows_of

ALONE = "parallel.pipeline: 1, boundary.codec: identity, anchor.enabled: false, merger.kind: none"
SWEEP = f"""\
base: {SMOKE}
seeds: [0, 1]
reference: dense
arms:
  dense: {{{ALONE}}}
  still: {{{ALONE}, optim.lr: 0}}
  ranks: {{seeds: [0]}}
"""


def sweep_command(file: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "megatron_grpo", "sweep", str(file), "--out", str(out), *options]


def timeless(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "rollout/tokens"))} for row in rows_of(run)]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a sweep in which one run cannot write its rows, and how the sweep ended."""
    home = tmp_path_factory.mktemp("sweep")
    (home / "arms.yaml").write_text(SWEEP)
    (home / "out/still/seed0/metrics.jsonl").mkdir(parents=True)
    ended = megatron_grpo("sweep", str(home / "arms.yaml"), "--out", str(home / "out"), timeout_s=240)
    return home, ended


def test_a_broken_run_is_reported_while_the_others_finish(
    broken: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    home, ended = broken
    assert ended.returncode == 1
    assert "still/seed0 failed with exit code 1" in ended.stderr
    assert "IsADirectoryError" in ended.stderr
    assert "arms: 4/5 runs" in ended.stdout
    results = json.loads((home / "out/results.json").read_text())
    assert {name: arm["seeds"] for name, arm in results["arms"].items()} == {
        "dense": [0, 1],
        "still": [1],
        "ranks": [0],
    }
    first, last = (results["arms"]["still"]["metrics"][f"val/score/{when}"]["mean"] for when in ("first", "last"))
    assert first == last  # nothing is learned at lr 0
    assert results["paired"]["still"]["seeds"] == [1]
    assert results["arms"]["ranks"]["metrics"]["training_share"]["mean"] > 5 / 96


def test_a_second_start_runs_what_is_missing_only(broken: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, _ = broken
    (home / "out/still/seed0/metrics.jsonl").rmdir()
    kept = {run: (home / f"out/{run}/summary.json").stat().st_mtime_ns for run in ("dense/seed0", "ranks/seed0")}
    ended = megatron_grpo("sweep", str(home / "arms.yaml"), "--out", str(home / "out"))
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stderr.splitlines()] == ["still/seed0"]
    assert {run: (home / f"out/{run}/summary.json").stat().st_mtime_ns for run in kept} == kept
    results: dict[str, Any] = json.loads((home / "out/results.json").read_text())
    assert [arm["n"] for arm in results["arms"].values()] == [2, 2, 1]


def test_a_changed_config_is_refused(broken: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, _ = broken
    (home / "changed.yaml").write_text(SWEEP.replace("optim.lr: 0", "optim.lr: 1e-6"))
    ended = megatron_grpo("sweep", str(home / "changed.yaml"), "--out", str(home / "out"))
    assert ended.returncode == 2
    assert "still/seed1: was made with another config (optim.lr=0.0, now 1e-06)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_forked_run_is_the_run_that_train_makes(
    broken: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    forked = broken[0] / "out/dense/seed1"
    ended = megatron_grpo("train", str(forked / "config.yaml"), "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert timeless(forked) == timeless(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_runs_stop_with_their_sweep_and_go_on_with_the_next(tmp_path: Path, number: signal.Signals) -> None:
    """The signal goes to the whole process group, as from a job scheduler; the runs are in sessions of their own."""
    (tmp_path / "arms.yaml").write_text(
        f"base: {SMOKE}\nseeds: [0]\narms:\n  dense: {{{ALONE}, train.steps: 12, train.eval_every: 12}}\n"
    )
    run = tmp_path / "out/dense/seed0"
    command = sweep_command(tmp_path / "arms.yaml", tmp_path / "out")
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").is_file() or len(rows_of(run)) < 4:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == (143 if number == signal.SIGTERM else -9)
    while not (run / "summary.json").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    made = len(rows_of(run))
    assert made < 24
    time.sleep(1.0)
    assert len(rows_of(run)) == made

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [row["tick"] for row in rows_of(run)] == list(range(24))
