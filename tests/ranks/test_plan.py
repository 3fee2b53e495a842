"""The plan against real runs: bytes against the ledger, memory against what the engine holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.config import Config
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.plan.memory import stage_memory
from megatron_grpo.plan.sizes import read_shape
from megatron_grpo.plan.time import step_bytes
from megatron_grpo.plan.traffic import Lengths
from megatron_grpo.training.loss import model_inputs
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, minibatch, policy_of, replay_of, runner_of, write_model

pytestmark = pytest.mark.slow

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
    "send_once": {
        "boundary": {"codec": None, "payload": None, "send_once": "reuse"},
        "anchor": {"enabled": True, "cadence": 2, "delay": 2},
        "merger": {"kind": "signed_ema"},
    },
    "cheap_anchor": {
        "boundary": {"codec": None, "payload": None, "send_once": "reuse", "anchor_budget": 0.05},
        "anchor": {"enabled": True, "cadence": 2, "delay": 2},
        "merger": {"kind": "signed_ema"},
    },
    "send_once_coded": {
        "boundary": LOWRANK | {"send_once": "reuse", "dense_every": 3},
        "rollout": {"path": "codec"},
        "anchor": {"enabled": True, "cadence": 2, "delay": 0},
    },
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
        masters = [flat for flat, _ in engine.shards.masters()] if zero else []
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


def saved(rank: int, world: int, model: str, dtype: str, recompute: bool) -> int:
    """Bytes that autograd keeps of one forward pass through all layers, each storage once and no weights."""
    cfg = one_micro_batch(Path(model), dtype, recompute)
    with policy_of(cfg) as policy:
        inputs, _ = model_inputs(replay_of(minibatch(seed=0), policy), cfg.train.micro_batch)
        weights = {parameter.untyped_storage().data_ptr() for parameter in policy.stage.module.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no other storage comes to its place
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            policy.stage.module(inputs[0].tokens_BS, None, inputs[0].masked_B1SS)
        return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in weights)


def one_micro_batch(model: Path, dtype: str, recompute: bool) -> Config:
    """Of eight sequences, prompts of 5 and responses of 6 tokens: those of ``minibatch``."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype, "recompute": recompute},
        "train": {"micro_batch": 8},
        "data": {"max_prompt": 5},
    }
    return config(model, Layout(), 1, **sections)


@pytest.mark.parametrize(("dtype", "recompute"), [("bfloat16", False), ("float32", False), ("bfloat16", True)])
def test_predicted_activations_are_what_autograd_keeps(tmp_path: Path, dtype: str, recompute: bool) -> None:
    """Of two layers more: embedding, last norm and masks are the same in both models."""
    kept, planned = [], []
    for layers in (4, 2):
        model = write_model(tmp_path / str(layers), layers=layers)
        cfg = one_micro_batch(model, dtype, recompute)
        planned.append(stage_memory(cfg, read_shape(cfg))[0].parts["activations"])
        kept.append(run_ranks(saved, 1, str(model), dtype, recompute, timeout_s=120.0)[0])
    assert planned[0] - planned[1] == pytest.approx(kept[0] - kept[1], rel=0.02)
