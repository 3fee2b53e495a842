"""The command line without ranks: messages, exit codes, what is written and what is started."""

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_grpo import launch
from megatron_grpo.cli import app
from megatron_grpo.config import ConfigError, ParallelConfig, load_config
from megatron_grpo.launch import local
from megatron_grpo.plan import training_shares
from tests.unit.test_config import home

__all__ = ["home"]


@pytest.fixture(autouse=True)
def _outside_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_plan_shows_geometry(home: Path) -> None:
    code, output = run("plan", home / "run.yaml", "parallel.pipeline=3", "parallel.data=2", "train.micro_batch=16")
    assert code == 0
    for part in (
        "6 = tensor 1 x pipeline 3 x data 2",
        "2 + 1 + 1 = 4",
        "128 = 16 prompts x 8 responses",
        "140 ticks",
        "chain_sum",
        "1 exact",
    ):
        assert part in output


@pytest.mark.parametrize(
    "overrides", [["boundary.forward_budget=0.001"], ["boundary.rank=97", "boundary.forward_payload=int8"]]
)
def test_plan_of_a_size_that_no_codec_takes(home: Path, overrides: list[str]) -> None:
    code, output = run("plan", home / "run.yaml", *overrides)
    assert code == 2 and f"config error: {overrides[0]}" in output and "Traceback" not in output


def test_plan_reports_every_error_and_exits_2(home: Path) -> None:
    code, output = run("plan", home / "run.yaml", "boundary.rank=900", "grpo.prompts_per_step=15")
    assert code == 2
    assert "boundary.rank=900 exceeds hidden size 96" in output
    assert "use 8 or 16" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["plan", "train"])
def test_data_and_rewards_are_checked_before_any_rank_starts(
    home: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start_local", lambda *arguments: pytest.fail("a rank was started"))
    rows = ['{"question": "a", "answer": "#### 1"}', '{"question": "b", "answer": "it is forty two"}'] * 2
    (home / "rows.jsonl").write_text("\n".join(rows))
    data = ["data.task=jsonl", "data.path=rows.jsonl", "data.val_size=1"]
    code, output = run(command, home / "run.yaml", *data, "reward.kind=gsm8k")
    assert code == 2 and "rows.jsonl line 2: its answer 'it is forty two' is prose" in output
    code, output = run(command, home / "run.yaml", *data, "reward.kind=python:no_such_module:f")
    assert code == 2 and "reward.kind=python:no_such_module:f: " in output and "cannot be imported" in output
    assert not (home / "runs").exists() and not Path("runs").exists()


LOWRANK = ["boundary.codec=lowrank"]
ANCHOR = ["anchor.enabled=true", "boundary.basis=anchor"]


@pytest.mark.parametrize(
    ("overrides", "fast", "old", "anchor"),
    [
        # a dense tick is 1: half of it forward, half backward; two minibatches, of which the second has old log-probs
        ([], (0.06 + 0.015) / 2, 0.06 / 4, 0.0),
        (["rollout.path=codec"], 0.0375, 0.0, 0.0),  # the sampler's log-probs serve
        (["rollout.path=codec", "boundary.commit=tick"], 0.0375, 0.06 / 2, 0.0),
        (["boundary.budget=0.1", "boundary.backward_budget=0.3"], 0.2, 0.1 / 4, 0.0),
        ([*LOWRANK, *ANCHOR], 5 / 96, 5 / 384, 1 / 5),
        (["boundary.codec=identity", "boundary.payload=float32", "anchor.enabled=true"], 2.0, 0.5, 0.4),
        # 6 numbers of 4 bits and a scale of 16, of 96 x 16
        ([*LOWRANK, "boundary.payload=int4", "boundary.rank=6"], 40 / 1536, 40 / 1536 / 4, 0.0),
        ([*LOWRANK, "boundary.payload=waterfill"], 0.0375, 0.06 / 4, 0.0),
        ([*LOWRANK, "boundary.dense_every=4"], 1 / 4 + 3 / 4 * 5 / 96, (1 / 4 + 3 / 4 * 5 / 96) / 4, 0.0),
        (["boundary.dense_every=4", "rollout.path=codec"], 1 / 4 + 3 / 4 * 0.0375, 1 / 4 / 4, 0.0),
    ],
)
def test_predicted_shares_by_hand(home: Path, overrides: list[str], fast: float, old: float, anchor: float) -> None:
    shares = training_shares(load_config(home / "run.yaml", overrides), hidden=96)
    assert shares == pytest.approx({"fast": fast, "old log-probs": old, "anchor": anchor})


def test_a_budget_that_is_chosen_later_is_planned_as_it_starts(home: Path) -> None:
    """One check in 128 ticks: five forward passes through the codec; backward one is dense, four as at first."""
    shares = training_shares(load_config(home / "run.yaml", ["boundary.backward_budget=auto"]), hidden=96)
    assert shares["fast"] == pytest.approx((0.06 + 0.015) / 2)
    assert shares["checks"] == pytest.approx((5 * 0.06 + 1 + 4 * 0.015) / 2 / 128)
    output = run("plan", home / "run.yaml", "boundary.backward_budget=auto")[1]
    assert "1.5% of a bfloat16 crossing at first" in output and "every 64 steps" in output


def test_plan_says_what_crosses_and_what_a_basis_costs(home: Path) -> None:
    """Of hidden 96: 92 bits a row, 76 of them codes; 54 channels kept, 195 features (2, first, 2 x 96)."""
    output = run("plan", home / "run.yaml")[1]
    assert "lowrank, waterfill, 6.0% of a bfloat16 crossing" in output
    assert "token_waterfill, 1.5% of a bfloat16 crossing" in output
    numbers = 1 + 54 + (195 + 54) * 96
    assert f"{2 * numbers / 1000:.1f} kB a boundary every 16 steps" in output
    assert "5.2% of the dense equivalent" in output


def test_a_config_error_writes_nothing(home: Path) -> None:
    before = sorted(home.rglob("*"))
    code, output = run("train", home / "run.yaml", "grpo.group_size=1", "--run-dir", home / "out")
    assert code == 2
    assert output.count("grpo.group_size=1") == 1
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_under_a_launcher_only_the_first_rank_speaks(
    home: Path, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, output = run("--local_rank=1", "train", home / "run.yaml")
    assert code == 2
    assert output.count("WORLD_SIZE=3: the config needs 2 ranks") == lines


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--run-dir", "full"], "is not empty"),
        (["--resume", "auto"], "add --run-dir"),
        (["--run-dir", "file"], "is a file"),
    ],
)
def test_a_run_directory_is_never_mixed_up(home: Path, options: list[str], part: str) -> None:
    (home / "full").mkdir()
    (home / "full/metrics.jsonl").touch()
    (home / "file").touch()
    code, output = run("train", home / "run.yaml", *options)
    assert code == 2
    assert part in output


def test_train_hands_everything_to_the_launcher(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], int]] = []

    def fake(arguments: list[str], ranks: int, parallel: ParallelConfig) -> int:
        seen.append((arguments, ranks))
        return 7

    monkeypatch.setattr(launch, "start_local", fake)
    code, _ = run(
        "train",
        home / "run.yaml",
        "parallel.data=2",
        "train.micro_batch=8",
        "--resume",
        "auto",
        "--run-dir",
        "r",
    )
    assert code == 7
    overrides = ["parallel.data=2", "train.micro_batch=8"]
    assert seen == [(["train", str(home / "run.yaml"), *overrides, "--run-dir", "r", "--resume", "auto"], 4)]
    run("train", home / "run.yaml")
    assert re.fullmatch(r"runs/run-\d{8}-\d{6}", seen[1][0][-1])


def test_errors_of_every_level_come_at_once(home: Path) -> None:
    """A wrong range, an unknown key and a combination: three lines, not one after the other."""
    code, output = run("plan", home / "run.yaml", "grpo.group_size=1", "anchor.cadense=2", "boundary.rank=900")
    assert code == 2
    for part in ("grpo.group_size=1: must be at least 2", "did you mean anchor.cadence", "boundary.rank=900 exceeds"):
        assert part in output


def test_resume_from_nowhere_is_refused_before_any_rank_starts(home: Path) -> None:
    code, output = run("train", home / "run.yaml", "--resume", "nowhere", "--run-dir", "r")
    assert code == 2
    assert "--resume=nowhere: no such folder" in output
    assert not (home / "r").exists()


def test_eval_says_what_it_needs(home: Path) -> None:
    assert "neither a model directory nor a finished run" in run("eval", home)[1]
    code, output = run("eval", home / "model")
    assert code == 2
    assert "add --config" in output


def test_c21_rank_environment() -> None:
    cpu = launch.rank_environment({"A": "b", "OMP_NUM_THREADS": "9"}, threads=2)
    assert cpu == {
        "A": "b",
        "OMP_NUM_THREADS": "2",
        "DS_ACCELERATOR": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    assert launch.rank_environment({}, threads=None) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_launch_command_names_one_device_a_rank() -> None:
    import base64

    command = local.node_command(["train", "x.yaml"], {"localhost": [2, 3]}, node=0, address="127.0.0.1", port=5000)
    world = next(part for part in command if part.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": [2, 3]}
    assert command[-3:] == ["megatron_grpo", "train", "x.yaml"]
    assert "--master_port=5000" in command


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert launch.visible_gpus(tmp_path) == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,7")
    assert launch.visible_gpus(tmp_path) == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.visible_gpus(tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a5b,GPU-1c2d")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=GPU-8a5b,GPU-1c2d: names devices by identifier"):
        launch.visible_gpus(tmp_path)


def test_devices_follow_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: [0, 1])
    assert launch.device_ids(2, ParallelConfig()) == [0, 1]
    assert launch.device_ids(2, ParallelConfig(backend="gloo")) == []
    with pytest.raises(ConfigError, match="4 ranks need 4 GPUs and this machine shows 2"):
        launch.device_ids(4, ParallelConfig())
    monkeypatch.setattr(local, "visible_gpus", list)
    assert launch.device_ids(4, ParallelConfig()) == []
    with pytest.raises(ConfigError, match="no GPU here"):
        launch.device_ids(4, ParallelConfig(backend="nccl"))


def test_missing_engines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None if name == "deepspeed" else os)
    with pytest.raises(ConfigError, match=r"^deepspeed: not installed; run"):
        launch.require_engines()
