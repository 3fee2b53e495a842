"""Mixed tasks, several rewards and groups sampled anew, in runs that a user starts; what a resumed run meets."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_run import SMOKE, megatron_grpo, rows_of


@pytest.mark.slow
def test_a_resumed_run_meets_the_problems_that_come_next(tmp_path: Path) -> None:
    """Rows, a stream and the groups that are drawn anew: after a stop the run goes on bit by bit as it would have."""
    rows = [{"question": f"{a:02d}+{a + 1:02d}", "answer": str(2 * a + 1)} for a in range(30)]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = [
        f"data.mix=[{{task: chain_sum, terms: 2, weight: 3}}, {{task: jsonl, path: {tmp_path / 'sums.jsonl'}}}]",
        "data.val_size=8",
        "grpo.dead_groups=resample",
        "grpo.resample_rounds=2",
        "reward.overlong_buffer=8",
        "train.save_every=2",
        "train.eval_every=4",
        "train.steps=4",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = megatron_grpo("train", SMOKE, *settings, "--run-dir", str(whole))
    assert result.returncode == 0, result.stderr
    seen = rows_of(whole)
    assert sum(row.get("rollout/resampled_frac", 0.0) for row in seen) > 0
    assert all(row["rewards/length"] <= 0.0 for row in seen if "rewards/length" in row)
    first = megatron_grpo("train", SMOKE, *settings[:-1], "train.steps=2", "--run-dir", str(parts))
    assert first.returncode == 0, first.stderr
    second = megatron_grpo("train", SMOKE, *settings, "--run-dir", str(parts), "--resume", "auto")
    assert second.returncode == 0, second.stderr
    for one, other in zip(seen, rows_of(parts), strict=True):
        for key in ("reward/mean", "rewards/exact", "rewards/length", "rollout/resampled_frac", "policy/grad_norm"):
            assert one.get(key) == other.get(key)
    name = "policy/model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_problems_only(tmp_path: Path) -> None:
    """Other rows, another batch size: the place in the stream would mean something else. A moved file does not, and a
    checkpoint that does not say what it was trained on is taken, and the next one says it."""
    rows = [{"question": f"{a:02d}+{a + 1:02d}", "answer": str(2 * a + 1)} for a in range(30)]
    sums, moved, run = tmp_path / "sums.jsonl", tmp_path / "moved.jsonl", tmp_path / "run"
    sums.write_text("\n".join(json.dumps(row) for row in rows))
    settings = ["data.task=jsonl", "data.val_size=8", "train.save_every=1", "train.eval_every=9"]

    def go(*more: str) -> "subprocess.CompletedProcess[str]":
        return megatron_grpo("train", SMOKE, *settings, *more, "--run-dir", str(run))

    assert go(f"data.path={sums}", "train.steps=1").returncode == 0
    resumed = [f"data.path={moved}", "train.steps=2", "--resume", "auto"]
    moved.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0]]))
    grown = go(*resumed)
    assert grown.returncode == 2 and "was trained on other problems than data gives now" in grown.stderr
    moved.write_text(sums.read_text())
    other = go("grpo.prompts_per_step=8", *resumed)
    assert other.returncode == 2 and "grpo.prompts_per_step=8" in other.stderr
    assert go(*resumed).returncode == 0
    facts = run / "checkpoints/tick000004/run.json"
    written = json.loads(facts.read_text())
    facts.write_text(json.dumps({key: value for key, value in written.items() if key != "problems"}))
    assert go(f"data.path={moved}", "train.steps=3", "--resume", "auto").returncode == 0
    later = json.loads((run / "checkpoints/tick000006/run.json").read_text())
    assert later["problems"] == written["problems"] != ""


def test_a_reward_that_fails_everywhere_ends_the_run_before_a_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = megatron_grpo("train", SMOKE, "reward.kind=python:operator:floordiv", "--run-dir", str(run))
    assert result.returncode == 2
    assert "no validation problem has a score" in result.stderr and "TypeError" in result.stderr
    assert not (run / "metrics.jsonl").exists() or rows_of(run) == []


BROKEN = """
calls = 0
def score(response, answer, finished):
    global calls
    calls += 1
    if calls > {works}:
        raise OSError("the grader is gone")
    return float(len(response))
"""


def test_a_reward_that_fails_later_stops_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the first validation and step 0 ask of it has a score; step 1, which is the last, has none: nothing is
    trained on, validated or exported. Mended, the run does that step again and ends as if nothing had happened."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module, run = tmp_path / "graders_own.py", tmp_path / "run"
    settings = ["reward.kind=python:graders_own:score", "rollout.path=dense", "data.val_size=8", "train.steps=2"]
    settings += [
        "grpo.prompts_per_step=4",
        "grpo.group_size=4",
        "train.micro_batch=8",
        "train.eval_every=9",
        "train.save_every=9",
    ]

    def go(*more: str) -> "subprocess.CompletedProcess[str]":
        return megatron_grpo("train", SMOKE, *settings, "--run-dir", str(run), *more)

    module.write_text(BROKEN.format(works=2 * 8 + 16))
    result = go()
    assert result.returncode == 3, result.stderr
    assert "stopped because no response of step 1 has a score" in result.stdout and "is gone" in result.stderr
    assert [row["tick"] for row in rows_of(run)] == [0, 1] and not (run / "policy").exists()
    module.write_text(BROKEN.format(works=1000))
    result = go("--resume", "auto")
    assert result.returncode == 0, result.stderr
    whole = go("--run-dir", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    resumed, uninterrupted = (rows_of(folder) for folder in (run, tmp_path / "whole"))
    assert [row["val/score"] for row in resumed[-1:]] == [row["val/score"] for row in uninterrupted[-1:]]
    name = "policy/model.safetensors"
    assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
