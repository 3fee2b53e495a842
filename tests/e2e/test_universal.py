"""A run that goes on elsewhere: train, convert, resume at another topology, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_run import ROOT, SMOKE, megatron_grpo, rows_of

STAGES = ["parallel.pipeline=2", "train.steps=3", "train.save_every=2", "anchor.cadence=2", "anchor.delay=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six ticks on two stages, with a checkpoint after four."""
    path = tmp_path_factory.mktemp("runs") / "stages"
    result = megatron_grpo("train", SMOKE, *STAGES, "--run-dir", str(path))
    assert result.returncode == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def universal(run: Path) -> Path:
    """Made by the tool, of the checkpoint after four ticks."""
    target = run.parent / "universal"
    tool = [sys.executable, "tools/convert_deepspeed_to_universal.py", run / "checkpoints/tick000004", target]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "checkpoint of a run, DeepSpeed's files" in done.stderr, done.stderr
    assert "dropped" not in done.stderr
    return target


def test_the_same_topology_ends_at_the_same_weights(run: Path, universal: Path, tmp_path: Path) -> None:
    result = megatron_grpo("train", SMOKE, *STAGES, "--resume", str(universal), "--run-dir", str(tmp_path / "on"))
    assert result.returncode == 0, result.stderr
    assert [row["tick"] for row in rows_of(tmp_path / "on")] == [4, 5]
    one, other = (load_file(path / "policy/model.safetensors") for path in (run, tmp_path / "on"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_topology_goes_on_and_says_what_it_lacks(universal: Path, tmp_path: Path) -> None:
    elsewhere = ["parallel.pipeline=1", "parallel.data=2", "deepspeed.config=deepspeed_configs/zero3.json"]
    given = ["train", SMOKE, *STAGES, *elsewhere, "--resume", str(universal), "--run-dir", str(tmp_path / "on")]
    result = megatron_grpo(*given)
    assert result.returncode == 0, result.stderr
    assert (
        "dropped: the fitted codecs (Q) of boundary 0, which belong to 2 stages; this run has 1 stage" in result.stdout
    )
    rows = rows_of(tmp_path / "on")
    assert [row["tick"] for row in rows] == [4, 5] and rows[0]["anchor/fired"] == 1.0, "the replay of tick 2 came along"
    assert json.loads((tmp_path / "on/summary.json").read_text())["status"] == "finished"


def test_the_run_itself_resumes_elsewhere_only_by_way_of_it(run: Path, tmp_path: Path) -> None:
    given = ["train", SMOKE, *STAGES, "parallel.pipeline=4", "--resume", str(run), "--run-dir", str(tmp_path / "on")]
    result = megatron_grpo(*given)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "parallel.pipeline=4:" in result.stderr and "was written with 2" in result.stderr
    assert "--to deepspeed-universal" in result.stderr


def test_other_settings_stay_what_they_were(universal: Path, tmp_path: Path) -> None:
    given = ["train", SMOKE, *STAGES, "merger.alpha=0.5", "--resume", str(universal), "--run-dir", str(tmp_path / "on")]
    result = megatron_grpo(*given)
    assert result.returncode == 2 and "merger.alpha=0.5:" in result.stderr and "was written with 0.25" in result.stderr
    assert "--to deepspeed-universal" not in result.stderr
