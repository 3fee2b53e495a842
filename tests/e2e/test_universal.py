"""A run that goes on elsewhere: train, convert, resume at another topology, as a user types it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def damaged(run: Path, copy: Path, how: str) -> None:
    """A copy of the run whose newest checkpoint has a file that is hostile, or in which a bit has changed."""
    shutil.copytree(run, copy)
    engine = copy / "checkpoints/tick000006/engine"
    if how == "hostile":
        file = engine / "mp_rank_01_model_states.pt"
        content = torch.load(file, weights_only=False)
        torch.save({**content, "more": Hostile(copy / "ran")}, file)
        return
    file = engine / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "message"),
    [("hostile", "asks to run"), pytest.param("flipped", "is damaged (checksum", marks=pytest.mark.slow)],
)
def test_a_checkpoint_that_is_not_what_was_written_is_not_resumed(
    how: str, message: str, run: Path, tmp_path: Path
) -> None:
    """DeepSpeed would run what it unpickles, and go on from numbers that have changed."""
    damaged(run, tmp_path / "copy", how)
    given = ["train", SMOKE, *STAGES, "train.steps=4", "--resume", "auto", "--run-dir", str(tmp_path / "copy")]
    result = megatron_grpo(*given)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "copy/ran").exists()


def test_another_model_is_not_taken_for_the_one_that_was_trained(run: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/tiny/policy", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    result = megatron_grpo("train", SMOKE, *STAGES, f"model.path={tmp_path / 'model'}", "--resume", str(run))
    assert result.returncode == 2 and "has norm_eps=0.01, and" in result.stderr and "Traceback" not in result.stderr


def test_other_settings_stay_what_they_were(universal: Path, tmp_path: Path) -> None:
    given = ["train", SMOKE, *STAGES, "merger.alpha=0.5", "--resume", str(universal), "--run-dir", str(tmp_path / "on")]
    result = megatron_grpo(*given)
    assert result.returncode == 2 and "merger.alpha=0.5:" in result.stderr and "was written with 0.25" in result.stderr
    assert "--to deepspeed-universal" not in result.stderr
