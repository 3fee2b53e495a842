"""``boundary.anchor_budget``: an anchor whose gradients are coded by their tokens' energy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.step import Row
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import (
    TINY,
    config,
    gradients_of,
    largest_difference,
    minibatch,
    policy_of,
    replay_of,
    runner_of,
    timeless,
    weights_of,
    write_model,
)

Tensors = dict[str, torch.Tensor]
SHARE = 0.05
DENSE = {"codec": None, "forward_codec": "identity", "payload": "float32"}


def replayed(rank: int, world: int, model: str) -> list[Tensors]:
    """The gradients of one minibatch: as an anchor's, in the budget and dense, and as a fast pass's in that budget."""
    boundaries: list[dict[str, Any]] = [
        {"backward_codec": "identity", "anchor_budget": SHARE},
        {"backward_codec": "identity"},
        {"backward_codec": "token_waterfill", "backward_budget": SHARE, "error_feedback": False},
    ]
    found = []
    for boundary in boundaries:
        coded = "backward_budget" in boundary
        cfg = config(Path(model), Layout(pipeline=3), boundary=DENSE | boundary)
        with policy_of(cfg) as policy:
            plan = Pass("fast") if coded else Pass("anchor", dense=True)
            TickRunner(cfg, policy)._pass(replay_of(minibatch(), policy), plan)
            found.append(gradients_of(policy))
    return found


def test_an_anchor_is_coded_as_a_fast_pass_of_that_budget(tmp_path: Path) -> None:
    coded, dense, fast = run_ranks(replayed, 3, str(write_model(tmp_path / "llama")), timeout_s=120.0)[0]
    assert all(torch.equal(coded[name], fast[name]) for name in fast)
    assert largest_difference(coded, dense) > 1e-2
    assert torch.equal(coded["lm_head.weight"], dense["lm_head.weight"])  # behind every boundary


def run(rank: int, world: int, budget: float | None, placement: str) -> tuple[list[Row], Tensors, dict[str, Any]]:
    """Rows of three steps of two ticks, with an anchor at every tick from the third on; the weights; M."""
    cfg = config(
        TINY,
        Layout(pipeline=2),
        1,
        parallel={"placement": placement},
        boundary=DENSE | {"backward_codec": "identity", "send_once": "reuse", "anchor_budget": budget},
        anchor={"enabled": True, "cadence": 1, "delay": 2},
        merger={"kind": "signed_ema"},
        grpo={"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
        rollout={"max_response": 12, "path": "dense"},
        data={"val_size": 2},
    )
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        rows = [row for step in range(3) for row in runner.run(step)]
        return timeless(rows), weights_of(policy), runner.ticks.state_dict()["memory"]


def test_it_costs_its_budget_and_keeps_the_signs() -> None:
    ((rows, weights, coded), _) = run_ranks(run, 2, SHARE, "ranks", timeout_s=120.0)
    ((plain, _, dense), _) = run_ranks(run, 2, None, "ranks", timeout_s=120.0)
    fired = [(row, other) for row, other in zip(rows, plain, strict=True) if row["anchor/fired"]]
    assert len(fired) == 4
    for row, other in fired:
        # float32 is twice bfloat16; of four micro-batches each is rounded up to a whole byte
        whole = other["boundary/bytes_anchor"] / 2
        assert SHARE * whole <= row["boundary/bytes_anchor"] < SHARE * whole + 4
    one, other = (torch.cat([x.flatten() for x in memory["m"]]) for memory in (coded, dense))
    assert torch.cosine_similarity(one, other, dim=0) > 0.95
    some = other != 0
    assert (one[some].sign() == other[some].sign()).double().mean() > 0.9
    ((alone, same, _),) = run_ranks(run, 1, SHARE, "one_process", timeout_s=120.0)
    assert largest_difference(same, weights) < 1e-4
    for row, again in zip(rows, alone, strict=True):
        assert again == pytest.approx(row, rel=1e-3, abs=1e-5)
