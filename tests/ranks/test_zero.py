"""ZeRO 0 to 3 together with pipeline stages: one update, whatever the engine keeps where."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import (
    TINY,
    config,
    minibatch,
    policy_of,
    replay_of,
    runner_of,
    weights_of,
    write_model,
)

Tensors = dict[str, torch.Tensor]
ANCHORED = {
    "boundary": {"codec": "lowrank", "rank": 8, "payload": "float32"},
    "anchor": {"enabled": True, "cadence": 1, "delay": 1, "beta": 0.5},
    "merger": {"kind": "signed_ema", "alpha": 0.25},
}


def update_after(
    rank: int, world: int, model: str, layout: Layout, zero: int, ticks: int, sections: dict[str, Any]
) -> tuple[Tensors, list[dict[str, float]]]:
    """The change of every weight after ``ticks`` ticks on fixed rollouts, and what the ticks reported."""
    cfg = config(Path(model), layout, zero, optim={"lr": 1e-3, "clip": 0.5}, **sections)
    with policy_of(cfg) as policy:
        before = weights_of(policy)
        runner = TickRunner(cfg, policy)
        values = []
        for tick in range(ticks):
            policy.boundaries.commit()
            replay = replay_of(minibatch(seed=tick), policy)
            values.append(runner.run(tick, replay, uncompressed=False).values)
        after = weights_of(policy)
        return {name: after[name] - before[name] for name in before}, values


def update_difference(a: Tensors, b: Tensors) -> float:
    """norm(a - b) / norm(b) over the whole model."""
    square = sum((a[name] - b[name]).square().sum() for name in b)
    return float((square / sum(x.square().sum() for x in b.values())).sqrt())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(llama: Path) -> tuple[Tensors, list[dict[str, float]]]:
    return run_ranks(update_after, 1, str(llama), Layout(), 0, 3, {})[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_with_stages_gives_the_update_of_one_process(
    llama: Path, reference: tuple[Tensors, list[dict[str, float]]], zero: int
) -> None:
    layout = Layout(pipeline=2, data=2)
    results = run_ranks(update_after, 4, str(llama), layout, zero, 3, {}, timeout_s=120.0)
    assert update_difference(results[0][0], reference[0]) < 1e-4
    for mine, theirs in zip(results[3][1], reference[1], strict=True):
        assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("zero", [1, 3])
def test_tensor_ranks_and_tied_embeddings_count_once_in_the_norm(tmp_path: Path, zero: int) -> None:
    model = write_model(tmp_path / "qwen2", "qwen2", tied=True)
    whole = run_ranks(update_after, 1, str(model), Layout(), 0, 2, {})[0]
    split = run_ranks(update_after, 4, str(model), Layout(pipeline=2, tensor=2), zero, 2, {}, timeout_s=120.0)
    assert split[0][1][0]["policy/grad_norm"] == pytest.approx(whole[1][0]["policy/grad_norm"], rel=1e-5)
    assert update_difference(split[0][0], whole[0]) < 1e-4


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_anchor_and_merger_are_the_same_at_every_zero_stage(llama: Path, zero: int) -> None:
    """M lives on gradient shards: the merged update of ZeRO 0 is the one of every stage."""
    layout = Layout(pipeline=2, data=2)
    plain = run_ranks(update_after, 4, str(llama), layout, 0, 4, ANCHORED, timeout_s=120.0)
    sharded = run_ranks(update_after, 4, str(llama), layout, zero, 4, ANCHORED, timeout_s=120.0)
    assert [values["anchor/fired"] for values in plain[0][1]] == [0.0, 1.0, 1.0, 1.0]
    for key in ("anchor/cos_fast", "anchor/sign_agreement"):
        assert sharded[2][1][-1][key] == pytest.approx(plain[0][1][-1][key], rel=1e-3)
    assert update_difference(sharded[0][0], plain[0][0]) < 1e-3


def calibrated(rank: int, world: int) -> dict[str, float]:
    """What ships by default, at ZeRO 3: fitted before the first step, with a training pass, then sampled."""
    sections = {"boundary": {"codec": None, "payload": None, "calibration": 4}, "data": {"val_size": 2}}
    cfg = config(TINY, Layout(pipeline=2), 3, **sections)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        return runner.validate()


def test_a_pass_that_only_teaches_lets_go_of_every_parameter() -> None:
    """ZeRO 3 holds the embedding until a step, and could not gather it for sampling."""
    first, last = run_ranks(calibrated, 2)
    assert first == last and 0.0 <= first["val/score"] <= 1.0
