"""The shipped example, started as a user starts it: what a run writes, resumes and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_grpo.training.metrics import METRIC_KEYS

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "examples/tiny/smoke.yaml")
KIND_KEYS = ("fast", "anchor", "basis", "old_logprob", "rollout", "dense_equivalent", "dense_total")


def megatron_grpo(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_grpo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight ticks of the example, with an anchor every other tick, and a checkpoint at half time."""
    run = tmp_path_factory.mktemp("runs") / "smoke"
    result = megatron_grpo(
        "train", SMOKE, "train.steps=4", "train.save_every=2", "train.eval_every=2", "anchor.cadence=2",
        "anchor.delay=2", "logging.tensorboard=true", "--run-dir", str(run),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Run finished" in result.stdout
    return run


def test_run_directory_holds_what_the_contract_names(finished: Path) -> None:
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard", "log.txt"} <= {
        entry.name for entry in finished.iterdir()
    }
    rows = rows_of(finished)
    assert [row["tick"] for row in rows] == list(range(8))
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(set(row) <= set(METRIC_KEYS) for row in rows)
    assert all("reward/mean" not in row for row in rows[::2])
    assert all("reward/mean" in row for row in rows[1::2])
    assert ["val/score" in row for row in rows] == [False, False, False, True, False, False, False, True]


def test_anchor_fires_on_its_schedule(finished: Path) -> None:
    rows = rows_of(finished)
    assert [row["anchor/fired"] for row in rows] == [0, 0, 1, 0, 1, 0, 1, 0]
    assert [row.get("anchor/age") for row in rows] == [None, None, 2, 3, 2, 3, 2, 3]
    assert [row["boundary/bytes_anchor"] > 0 for row in rows] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_bytes_add_up(finished: Path) -> None:
    """Fast bytes are rank / hidden of the dense ones, exactly: the same rows, 5 of 96 numbers each."""
    for row in rows_of(finished):
        assert row["boundary/bytes_fast"] * 96 == row["boundary/bytes_dense_equivalent"] * 5
        assert row["boundary/bytes_fast_fwd"] == row["boundary/bytes_fast_bwd"]
        # The second tick of a step had its old log-probs made through the codec, forward only, in the step's first row.
        assert (row["boundary/bytes_old_logprob"] > 0) == (row["tick"] % 2 == 0)


def test_resume_goes_on_where_the_checkpoint_was(finished: Path, tmp_path: Path) -> None:
    """The resumed run ends with the same weights and the same rows as the one that was never stopped."""
    import torch
    from safetensors.torch import load_file

    run = tmp_path / "resumed"
    result = megatron_grpo(
        "train", str(finished / "config.yaml"), "--run-dir", str(run), "--resume",
        str(finished / "checkpoints" / "tick000004"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    uninterrupted, resumed = (load_file(path / "policy/model.safetensors") for path in (finished, run))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())
    timeless = [{k: v for k, v in row.items() if not k.startswith(("time/", "rollout/tokens"))} for row in rows_of(run)]
    whole = [
        {k: v for k, v in row.items() if k in timeless[0] or not k.startswith("time/")} for row in rows_of(finished)
    ]
    for mine, theirs in zip(timeless, whole[4:], strict=True):
        assert mine == {key: theirs[key] for key in mine}


def test_resume_under_other_settings_is_refused(finished: Path, tmp_path: Path) -> None:
    checkpoint = str(finished / "checkpoints" / "tick000004")
    result = megatron_grpo(
        "train", str(finished / "config.yaml"), "boundary.rank=4", "--run-dir", str(tmp_path), "--resume", checkpoint
    )
    assert result.returncode == 2
    assert "boundary.rank=4" in result.stderr and "written with 5" in result.stderr


def test_policy_loads_in_transformers_and_eval_scores_it(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = finished / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy)
    assert model.config.hidden_size == 96
    assert AutoTokenizer.from_pretrained(policy)("12+07+95>")["input_ids"]
    result = megatron_grpo("eval", str(finished))
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout.splitlines()[-1])
    assert scores["val/score"] == rows_of(finished)[-1]["val/score"]


def test_failing_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    """Case G4. One rank raises in its first tick; nothing is left running after 15 s."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import megatron_grpo.anchor.schedule as schedule\n"
        "    def fires(self, tick):\n"
        "        raise RuntimeError('rank 1 breaks here')\n"
        "    schedule.AnchorSchedule.fires = fires\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "megatron_grpo", "train", SMOKE, "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    lines, broke = [], None
    for line in process.stdout:
        lines.append(line)
        if "rank 1 breaks here" in line and broke is None:
            broke = time.monotonic()
    code = process.wait(timeout=30)
    assert broke is not None, "".join(lines)
    assert time.monotonic() - broke < 15
    assert code != 0
    assert any("rank 1 failed" in line for line in lines)


def test_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """SIGKILL leaves no traceback; the exit code and a line tell the signal, unless its peer is seen dead first."""
    command = [sys.executable, "-m", "megatron_grpo", "train", SMOKE, "train.steps=400"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2 "):
            break
    ranks = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    killed = time.monotonic()
    output = process.stdout.read()
    code = process.wait(timeout=30)
    assert time.monotonic() - killed < 15
    assert code in (1, 137), output
    assert ("ended by signal 9" if code == 137 else "rank 0 failed") in output


def test_sigterm_saves_a_checkpoint_and_resume_finishes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "megatron_grpo",
        "train",
        SMOKE,
        "train.steps=400",
        "--run-dir",
        str(run),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2 "):
            process.send_signal(signal.SIGTERM)
            break
    output = process.stdout.read()
    assert process.wait(timeout=60) == 143, output
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    done = len(rows_of(run)) // 2
    result = megatron_grpo("train", SMOKE, f"train.steps={done + 1}", "--run-dir", str(run), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert [row["tick"] for row in rows_of(run)] == list(range(2 * done + 2))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("boundary.rank=900", "96"),
        ("grpo.group_size=1", "2"),
        ("model.path=nowhere", "nowhere"),
        ("train.micro_batch=7", "micro_batch"),
        ("anchor.cadense=5", "cadence"),
    ],
)
def test_bad_config_is_one_sentence_and_leaves_nothing(tmp_path: Path, override: str, said: str) -> None:
    run = tmp_path / "run"
    result = megatron_grpo("train", SMOKE, override, "--run-dir", str(run))
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert not run.exists()
