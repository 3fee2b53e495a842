"""The plan against real runs: bytes against the ledger, memory against what the engine holds."""

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config import Config
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.plan.memory import stage_memory
from megatron_grpo.plan.sizes import read_shape
from megatron_grpo.plan.time import step_bytes
from megatron_grpo.plan.traffic import Lengths
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, minibatch, policy_of, replay_of, runner_of, write_model

STEPS = 7
TASK: dict[str, Any] = {
    "grpo": {"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
    "train": {"micro_batch": 4},
    "data": {"val_size": 2},
    "rollout": {"max_response": 3},  # which all reach: every sequence is as long as any other
}
LOWRANK = {"codec": "lowrank", "payload": "bfloat16", "rank": 5, "basis": "anchor"}
RUNS: dict[str, dict[str, Any]] = {
    "default": {
        "boundary": {"codec": None, "payload": None, "calibration": 8, "refresh_steps": 2},
        "rollout": {"path": "codec"},
    },
    "anchored": {"boundary": LOWRANK, "anchor": {"enabled": True, "cadence": 2, "delay": 0}},
    "dense_every": {"boundary": LOWRANK | {"dense_every": 3}, "grpo": {"kl_coef": 0.01}},
}


def run_config(sections: dict[str, Any], layout: Layout) -> Config:
    merged = {name: TASK.get(name, {}) | sections.get(name, {}) for name in TASK | sections}
    return config(TINY, layout, 1, **merged)


def counted(rank: int, world: int, layout: Layout, sections: dict[str, Any]) -> list[dict[str, float]]:
    cfg = run_config(sections, layout)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        return [row for step in range(STEPS) for row in runner.run(step)]


@pytest.mark.parametrize("name", RUNS)
def test_predicted_bytes_are_the_ledgers(name: str) -> None:
    """By kind, at the lengths that were sampled, from the second step on: in the first no anchor fires, and what fits
    before it is not in the plan's ticks."""
    layout = Layout(pipeline=2, data=2) if name == "anchored" else Layout(pipeline=3)
    rows = run_ranks(counted, layout.world_size, layout, RUNS[name], timeout_s=120.0)[0]
    rows = [row for row in rows if row["step"] > 0]
    cfg = run_config(RUNS[name], layout)
    boundaries, hidden = layout.pipeline - 1, 96
    dense = sum(row["boundary/bytes_dense_equivalent"] for row in rows) / (STEPS - 1)
    mean = dense / (2 * 2 * hidden * boundaries * cfg.sequences_per_step)  # rows a sequence
    response = sum(row.get("rollout/response_length", 0.0) for row in rows) / (STEPS - 1)
    predicted = step_bytes(cfg, read_shape(cfg), Lengths(mean + 1 - response, response, response))
    measured = {
        kind: sum(row[f"boundary/bytes_{kind}"] for row in rows) / (STEPS - 1)
        for kind in ("fast_fwd", "fast_bwd", "old_logprob", "anchor", "rollout", "basis")
    }
    predicted["rollout"] += predicted.pop("ids")
    assert measured == pytest.approx(predicted, rel=0.01)


def held(rank: int, world: int, model: str, zero: int, dtype: str) -> dict[str, float]:
    """Bytes of what the engine holds: gradients as the update finds them, the rest after it."""
    cfg = config(Path(model), Layout(pipeline=2, data=2), zero, model={"dtype": dtype}, optim={"lr": 1e-3})
    with policy_of(cfg) as policy:
        engine, gradients = policy.engine, []
        update = engine.step

        def noted(lr: float) -> None:
            gradients.append(sum(x.nbytes for x in engine.gradients()))
            update(lr)

        engine.step = noted  # type: ignore[method-assign]  # looks on
        TickRunner(cfg, policy).run(0, replay_of(minibatch(seed=0), policy), uncompressed=False)
        adam = (engine.engine.optimizer if zero == 0 else engine.engine.optimizer.optimizer).state
        states = [x for state in adam.values() for x in state.values() if x.numel() > 1]
        masters = [flat for flat, _ in engine._masters()] if zero else []
        return {
            "weights": sum(x.nbytes for x in engine.weights()),
            "optimizer": sum(x.nbytes for x in [*states, *masters]),
            "averaged gradients" if zero else "gradients": gradients[0],
        }


@pytest.mark.parametrize(("zero", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "float32")])
def test_predicted_memory_is_what_the_engine_holds(tmp_path: Path, zero: int, dtype: str) -> None:
    """Weights, optimizer and averaged gradients of either stage, but for the padding of shards."""
    model = write_model(tmp_path / "model")
    cfg = config(model, Layout(pipeline=2, data=2), zero, model={"dtype": dtype})
    results = run_ranks(held, 4, str(model), zero, dtype, timeout_s=120.0)
    for stage, entry in enumerate(stage_memory(cfg, read_shape(cfg))):
        replicas = results[2 * stage : 2 * stage + 2]
        for part in replicas[0]:
            assert sum(each[part] for each in replicas) == pytest.approx(2 * entry.parts.get(part, 0.0), rel=0.01), part
