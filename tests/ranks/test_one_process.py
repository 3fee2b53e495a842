"""``parallel.placement=one_process``: four stages in one process do what four ranks do.

Legend: B sequences, R response columns, H hidden, r rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.backends.megatron.in_process import InProcessLink
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import Config
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.parallel.link import byte_metrics
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.policy import Policy
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
from tests.ranks.test_sampler import DRAWN, PROMPTS

Tensors = dict[str, torch.Tensor]
STAGES, RANK = 4, 5
CODINGS: dict[str, dict[str, Any]] = {
    "identity": {"codec": "identity", "payload": "float32"},
    "lowrank": {"codec": "lowrank", "payload": "float32", "rank": RANK},
    "lowrank_bfloat16": {"codec": "lowrank", "payload": "bfloat16", "rank": RANK},
    "lowrank_feedback": {"codec": "lowrank", "payload": "bfloat16", "rank": RANK, "error_feedback": True},
    "lowrank_shared": {"codec": "lowrank", "payload": "float32", "rank": RANK, "shared_basis": True},
    "mask": {"codec": "mask", "payload": "float32", "rank": RANK},
    "default": {"codec": None, "payload": None},  # packed forward, by tokens backward
}


@dataclass(frozen=True)
class Found:
    """What one coding gave: a compressed pass, a dense one that both ends learn from, and two samplings.

    Bytes and errors are summed over ranks. ``learned`` holds what this rank staged, by boundary and direction.
    """

    loss: float
    gradients: Tensors
    dense_gradients: Tensors
    bytes: dict[str, float]
    errors: torch.Tensor
    learned: Tensors
    sampled: dict[bool, Batch]


def everything(rank: int, world: int, model: str, placement: str, codings: list[str]) -> dict[str, Found]:
    found = {}
    for name in codings:
        cfg = config(
            Path(model),
            Layout(pipeline=STAGES),
            parallel={"placement": placement},
            boundary=CODINGS[name],
            rollout={"in_flight": STAGES},
        )
        with policy_of(cfg) as policy:
            found[name] = one_coding(cfg, policy)
    return found


def one_coding(cfg: Config, policy: Policy) -> Found:
    runner = TickRunner(cfg, policy)
    replay = replay_of(minibatch(), policy)
    collected = runner._pass(replay, Pass("fast"))
    loss = torch.tensor([sum(sums[-1].item() for sums, _ in collected)], dtype=torch.float64)
    gradients = gradients_of(policy)
    policy.engine.discard_gradients()
    runner._pass(replay, Pass("anchor", dense=True, observe="both"))
    dense_gradients = gradients_of(policy)
    policy.link.refresh(policy.groups.data)
    return Found(
        loss=sum_over(loss, policy.groups.policy).item(),
        gradients=gradients,
        dense_gradients=dense_gradients,
        sampled={dense: sampled(policy, dense) for dense in (True, False)},
        bytes=byte_metrics(sum_over(policy.ledger.take(), policy.groups.policy)),
        errors=sum_over(policy.boundaries.take_errors(), policy.groups.policy),
        learned={
            f"{index} {way}": learner.flat()
            for index, crossing in policy.boundaries.crossings.items()
            for way, learner in crossing.codecs.learners()
        },
    )


def sampled(policy: Policy, dense: bool) -> Batch:
    with policy.engine.whole_parameters(), policy.boundaries.running(Pass("rollout", dense=dense)):
        batch = policy.sampler.sample(PROMPTS, torch.arange(len(PROMPTS)), DRAWN)
    policy.lean.close()
    return batch


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def together(llama: Path) -> dict[str, Found]:
    return run_ranks(everything, 1, str(llama), "one_process", list(CODINGS), timeout_s=180.0)[0]


@pytest.fixture(scope="module")
def apart(llama: Path) -> list[dict[str, Found]]:
    return run_ranks(everything, STAGES, str(llama), "ranks", list(CODINGS), timeout_s=180.0)


@pytest.mark.parametrize("coding", CODINGS)
def test_gradients_are_those_of_the_ranks(
    together: dict[str, Found], apart: list[dict[str, Found]], coding: str
) -> None:
    one, many = together[coding], apart[0][coding]
    assert one.loss == pytest.approx(many.loss, rel=1e-6)
    assert largest_difference(one.gradients, many.gradients) < 1e-6
    assert largest_difference(one.dense_gradients, many.dense_gradients) < 1e-6
    compressed = coding != "identity"
    assert (largest_difference(one.gradients, one.dense_gradients) > 1e-2) == compressed
    torch.testing.assert_close(one.errors, many.errors, rtol=1e-6, atol=1e-9)
    assert one.errors.shape == (STAGES - 1, 3, 2)  # forward, backward, and the drift of kept rows: there are none
    assert bool((one.errors[:, :2, 1] > 0).all()) and not one.errors[:, 2].any()


@pytest.mark.parametrize("coding", CODINGS)
def test_bytes_are_those_of_the_ranks(together: dict[str, Found], apart: list[dict[str, Found]], coding: str) -> None:
    """By kind, exactly: digests of both ends and ids that go back to every earlier stage included."""
    assert together[coding].bytes == apart[0][coding].bytes
    learners = {"identity": 0, "mask": 0, "lowrank_shared": 1, "default": 1}.get(coding, 2)
    assert together[coding].bytes["boundary/bytes_basis"] == (STAGES - 1) * learners * 2 * 8
    assert together[coding].bytes["boundary/bytes_rollout"] > 0


@pytest.mark.parametrize("coding", ["lowrank", "lowrank_bfloat16", "lowrank_shared"])
def test_bases_are_those_of_the_ranks(together: dict[str, Found], apart: list[dict[str, Found]], coding: str) -> None:
    one = together[coding].learned
    assert len(one) == (STAGES - 1) * (1 if coding == "lowrank_shared" else 2)
    for rank, found in enumerate(apart):
        mine = found[coding].learned
        assert {name.split()[0] for name in mine} == {str(i) for i in (rank - 1, rank) if 0 <= i < STAGES - 1}
        for name, flat in mine.items():
            torch.testing.assert_close(one[name], flat, atol=1e-5, rtol=0)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("dense", [True, False])
def test_samples_are_those_of_the_ranks(
    together: dict[str, Found], apart: list[dict[str, Found]], coding: str, dense: bool
) -> None:
    one, many = together[coding].sampled[dense], apart[-1][coding].sampled[dense]
    assert torch.equal(one.tokens_BS, many.tokens_BS)
    assert torch.equal(one.response_lengths_B, many.response_lengths_B)
    torch.testing.assert_close(one.sampler_logp_BR, many.sampler_logp_BR, atol=1e-5, rtol=0)
    if not dense and coding != "identity":
        assert not torch.equal(one.tokens_BS, together[coding].sampled[True].tokens_BS)


def plain(rank: int, world: int, model: str) -> tuple[float, Tensors, Batch]:
    """The same pass and sampling with one stage and no boundary."""
    cfg = config(Path(model), Layout(), rollout={"in_flight": STAGES})
    with policy_of(cfg) as policy:
        collected = TickRunner(cfg, policy)._pass(replay_of(minibatch(), policy), Pass("fast"))
        gradients = gradients_of(policy)
        return sum(sums[-1].item() for sums, _ in collected), gradients, sampled(policy, True)


def test_identity_is_one_stage_bit_for_bit(llama: Path, together: dict[str, Found]) -> None:
    loss, gradients, batch = run_ranks(plain, 1, str(llama))[0]
    one = together["identity"]
    assert one.loss == loss
    assert gradients.keys() == one.gradients.keys()
    assert all(torch.equal(one.gradients[name], gradient) for name, gradient in gradients.items())
    for sample in one.sampled.values():
        assert torch.equal(sample.tokens_BS, batch.tokens_BS)
        assert torch.equal(sample.sampler_logp_BR, batch.sampler_logp_BR)


# Whole steps: anchor, merger, refreshes, old log-probs, sampling through the codec.
SHARED: dict[str, Any] = {
    "data": {"val_size": 4},
    "grpo": {"minibatches": 2, "prompts_per_step": 4, "kl_coef": 0.01, "entropy_coef": 0.01},
    "optim": {"lr": 1e-3},
}
# Half of the numbers: fewer, and no sample through the codec would be right, nor any gradient other than zero.
LOWRANK: dict[str, Any] = {"codec": "lowrank", "rank": 48, "payload": "float32"}
ARMS: dict[str, dict[str, Any]] = {
    "anchor": {
        "boundary": LOWRANK,
        "anchor": {"enabled": True, "cadence": 2, "delay": 1},
        "merger": {"kind": "delayed_ef"},
        "rollout": {"path": "codec", "max_response": 12, "in_flight": STAGES},
    },
    "self": {
        "boundary": LOWRANK | {"basis": "self", "refresh_steps": 2, "calibration": 8, "error_feedback": True},
        "rollout": {"path": "auto", "gap_limit": 5.0, "max_response": 12, "in_flight": STAGES},
    },
    # What is the default, with more bits for the same reason.
    "packed": {
        "boundary": {"codec": None, "payload": None, "budget": 0.25, "refresh_steps": 2, "calibration": 8},
        "rollout": {"path": "codec", "max_response": 12, "in_flight": STAGES},
    },
}


def whole_run(rank: int, world: int, placement: str, arm: str) -> tuple[list[Row], Row, Tensors]:
    """Rows of three steps, validation after them, and the weights."""
    cfg = config(TINY, Layout(pipeline=STAGES), 1, parallel={"placement": placement}, **SHARED, **ARMS[arm])
    with policy_of(cfg) as policy:
        assert isinstance(policy.link, InProcessLink) == (placement == "one_process")
        runner = runner_of(cfg, policy)
        runner.calibrate()
        rows = timeless([row for step in range(3) for row in runner.run(step)])
        return rows, runner.validate(), weights_of(policy)


@pytest.mark.parametrize("arm", ARMS)
def test_a_whole_run_is_that_of_the_ranks(arm: str) -> None:
    one_rows, one_scores, one_weights = run_ranks(whole_run, 1, "one_process", arm, timeout_s=180.0)[0]
    rows, scores, weights = run_ranks(whole_run, STAGES, "ranks", arm, timeout_s=180.0)[0]
    assert one_scores == scores
    assert len(one_rows) == len(rows) == 6
    for one, many in zip(one_rows, rows, strict=True):
        assert one.keys() == many.keys()
        exact = [
            key for key in many if key.startswith(("reward/", "boundary/bytes")) or key == "rollout/response_length"
        ]
        assert {key: one[key] for key in exact} == {key: many[key] for key in exact}
        assert one == pytest.approx(many, rel=1e-4, abs=1e-6)
        assert many["policy/grad_norm"] > 0 and many["boundary/q_error_bwd"] > 0
    assert {"reward/mean", "policy/kl"} <= rows[-1].keys()
    assert sum(row["boundary/bytes_basis"] for row in rows) > 0
    assert largest_difference(one_weights, weights) < 1e-6
