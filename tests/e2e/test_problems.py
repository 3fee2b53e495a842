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
    """All that the first validation and step 0 ask of it has a score; step 1 has none. Mended, the run goes on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module, run = tmp_path / "graders_own.py", tmp_path / "run"
    settings = ["reward.kind=python:graders_own:score", "rollout.path=dense", "data.val_size=8", "train.steps=3"]
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
    assert "stopped because no response of tick 3 has a score" in result.stdout and "is gone" in result.stderr
    rows = rows_of(run)
    assert [row.get("reward/unscored_frac") for row in rows] == [None, 0.0, None, 1.0]
    assert not any("val/score" in row for row in rows)
    module.write_text(BROKEN.format(works=1000))
    result = go("--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert rows_of(run)[-1]["val/score"] > 0.0
