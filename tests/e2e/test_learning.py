"""The demo learns, and only because it trains. Slow: whole runs of the shipped example."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/tiny/k5.yaml")

pytestmark = pytest.mark.slow


def summary_of(run: Path, *overrides: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "megatron_grpo", "train", EXAMPLE, *overrides, "--run-dir", str(run)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    summary: dict[str, dict[str, float]] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    summary = summary_of(tmp_path / "run", f"train.seed={seed}")
    score = summary["val/score"]
    assert score["last"] - score["first"] >= 0.15
    assert summary["training_share"] < 0.35
    for way, after_refresh in (("fwd", 0.75), ("bwd", 0.9)):
        error = summary["q_error"][way]
        assert error["bootstrap"] > 0.9
        assert error["after_first_refresh"] < after_refresh


def test_without_a_learning_rate_nothing_changes(tmp_path: Path) -> None:
    """Greedy scores are exactly those of the start; nothing but the optimizer moves the policy."""
    score = summary_of(tmp_path / "run", "optim.lr=0.0")["val/score"]
    assert score["last"] == score["best"] == score["first"]
