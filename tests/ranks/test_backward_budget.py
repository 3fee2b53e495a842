"""``boundary.backward_budget=auto``: what it measures, what it costs, and that it changes nothing but the budget."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.ops.budget import PROBES, RUNGS
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.resume import Progress
from megatron_grpo.training.step import Row
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import (
    TINY,
    config,
    gradients_of,
    minibatch,
    policy_of,
    replay_of,
    runner_of,
    timeless,
    weights_of,
    write_model,
)

Tensors = dict[str, torch.Tensor]
CODING = {"codec": None, "forward_codec": "identity", "backward_codec": "token_waterfill", "payload": "float32"}
FOUND = ("boundary/backward_budget", "boundary/backward_cosine")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def checked(
    rank: int, world: int, model: str, layout: Layout, target: float, zero: int, placement: str
) -> dict[str, float]:
    boundary = CODING | {"backward_budget": "auto", "backward_cosine": target}
    cfg = config(Path(model), layout, zero, boundary=boundary, parallel={"placement": placement})
    with policy_of(cfg) as policy:
        runner = TickRunner(cfg, policy)
        assert runner._budget is not None
        values = runner._budget.check(replay_of(minibatch(), policy))
        assert all(
            crossing.codecs.backward.inner.share == values[FOUND[0]] == runner.state_dict()["backward_budget"]
            for crossing in policy.boundaries.crossings.values()
        )
        return values


def by_hand(rank: int, world: int, model: str, layout: Layout) -> dict[float, float]:
    """The least cosine over stages but the last, of two runs with budgets of their own, at every rung."""
    found: dict[float, Tensors] = {}
    for share in (None, *RUNGS):
        boundary = CODING | {"backward_budget": share, "error_feedback": False}
        cfg = config(
            Path(model), layout, boundary=boundary if share else {"backward_codec": "identity", "payload": "float32"}
        )
        with policy_of(cfg) as policy:
            TickRunner(cfg, policy)._pass(replay_of(minibatch(), policy), Pass("fast"))
            found[share or 1.0] = gradients_of(policy)
    stages = [(0, 1), (2,)]  # of 4 layers on 3 stages

    def flat(gradients: Tensors, layers: tuple[int, ...]) -> torch.Tensor:
        names = [f"model.layers.{layer}." for layer in layers]
        return torch.cat([x.double().flatten() for name, x in gradients.items() if name.startswith(tuple(names))])

    return {
        share: min(
            torch.cosine_similarity(flat(gradients, layers), flat(found[1.0], layers), dim=0).item()
            for layers in stages
        )
        for share, gradients in found.items()
    }


def test_it_finds_the_least_budget_by_the_gradients_of_weights(llama: Path) -> None:
    layout = Layout(pipeline=3)
    cosines = run_ranks(by_hand, 3, str(llama), layout, timeout_s=180.0)[0]
    assert cosines[1.0] == pytest.approx(1.0)
    target = cosines[RUNGS[9]] - 1e-3
    results = run_ranks(checked, 3, str(llama), layout, target, 0, "ranks")
    assert results[0] == results[1] == results[2]
    share, cosine = (results[0][key] for key in FOUND)
    assert cosine == pytest.approx(cosines[share], abs=1e-6)
    lower = [other for other in RUNGS if other < share]
    assert lower and cosine >= target > cosines[lower[-1]]
    (alone,) = run_ranks(checked, 1, str(llama), layout, target, 0, "one_process")
    assert alone == pytest.approx(results[0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "zero"), [({"data": 2}, 1), ({"data": 2}, 3), ({"tensor": 2}, 1)], ids=str)
def test_shards_and_replicas_measure_the_same(llama: Path, sizes: dict[str, int], zero: int) -> None:
    layout = Layout(pipeline=2, **sizes)
    plain = run_ranks(checked, 2, str(llama), Layout(pipeline=2), 0.9, 0, "ranks")[0]
    for values in run_ranks(checked, layout.world_size, str(llama), layout, 0.9, zero, "ranks", timeout_s=120.0):
        assert values == pytest.approx(plain, abs=1e-5)


def run(rank: int, world: int, boundary: dict[str, Any]) -> tuple[list[Row], Tensors, list[float]]:
    """Rows of three steps of two ticks, the weights after them, and every budget that was put to use."""
    cfg = config(
        TINY,
        Layout(pipeline=2),
        1,
        boundary=CODING | {"send_once": "reuse"} | boundary,
        grpo={"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
        rollout={"max_response": 12, "path": "dense"},
        data={"val_size": 2},
    )
    used: list[float] = []
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        use = policy.boundaries.set_backward_budget

        def noted(share: float) -> None:
            used.append(share)
            use(share)

        policy.boundaries.set_backward_budget = noted  # type: ignore[method-assign]  # looks on
        rows = [row for step in range(3) for row in runner.run(step)]
        return timeless(rows), weights_of(policy), used


def test_a_check_is_a_look_and_costs_what_it_sends() -> None:
    auto = {"backward_budget": "auto", "backward_cosine": 0.97, "backward_check": 64}
    (rows, weights, used), (others, _, used_there) = run_ranks(run, 2, auto, timeout_s=120.0)
    assert others == rows and used_there == used
    share, cosine = (rows[0][key] for key in FOUND)
    assert cosine >= 0.97 and share == used[-1] in RUNGS and share != 0.015
    ((fixed, same, _), _) = run_ranks(run, 2, {"backward_budget": share}, timeout_s=120.0)
    assert all(torch.equal(weights[name], same[name]) for name in same)
    # Gradients of the tick's rows in float32, then through each budget; rows of 8 micro-batches cross in whole bytes.
    gradients = rows[0]["boundary/bytes_dense_equivalent"] / 2
    assert len(used) == PROBES + 1
    sent = gradients * (2 + sum(used[:PROBES]))
    assert sent <= rows[0]["boundary/bytes_basis"] < sent + PROBES * 8
    assert not any(key in row for row in rows[1:] for key in FOUND)
    for row in rows:
        row.pop("boundary/bytes_basis")
    for row in fixed:
        assert row.pop("boundary/bytes_basis") == 0
    assert [{key: value for key, value in row.items() if key not in FOUND} for row in rows] == fixed


def resumed(rank: int, world: int, folder: str) -> list[tuple[list[Row], Tensors]]:
    """Steps 2 and 3, of which the last checks: uninterrupted, and from a checkpoint before them."""
    cfg = config(
        TINY,
        Layout(pipeline=2),
        1,
        boundary=CODING | {"backward_budget": "auto", "backward_check": 3},
        grpo={"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
        rollout={"max_response": 12, "path": "dense"},
        data={"val_size": 2},
    )
    checkpoints, results = CheckpointFolder(Path(folder), 1), []
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        for step in range(2):
            runner.run(step)
        assert runner.ticks._budget is not None and runner.ticks._budget.share != 0.015
        save_checkpoint(cfg, checkpoints, policy, runner, Progress(2, {}))
        results.append((timeless([row for step in (2, 3) for row in runner.run(step)]), weights_of(policy)))
    (saved,) = (path for path in Path(folder).iterdir() if path.is_dir())
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        load_checkpoint(saved, policy, runner)
        results.append((timeless([row for step in (2, 3) for row in runner.run(step)]), weights_of(policy)))
    return results


@pytest.mark.slow
def test_a_run_goes_on_with_the_budget_it_had(tmp_path: Path) -> None:
    for (rows, weights), (again, same) in run_ranks(resumed, 2, str(tmp_path), timeout_s=120.0):
        assert again == rows and FOUND[0] in rows[2]
        assert all(torch.equal(same[name], weights[name]) for name in weights)
