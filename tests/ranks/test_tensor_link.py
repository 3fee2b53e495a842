"""The hook inside tensor parallelism: full rank is Megatron's own sum, a low rank sends its share and no more."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.backends.megatron.schedule import forward_only
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.boundary.tensor import WAYS
from megatron_grpo.ops.lowrank import orthonormal
from megatron_grpo.ops.rows import carrying_rows
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.loss import model_inputs
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import (
    HIDDEN,
    LAYERS,
    TINY,
    config,
    gradients_of,
    largest_difference,
    minibatch,
    policy_of,
    replay_of,
    runner_of,
    timeless,
    write_model,
)
from tests.ranks.test_zero import update_after, update_difference

Tensors = dict[str, torch.Tensor]
TP2 = Layout(tensor=2)
PAYLOAD = {"payload": "float32", "basis": "random"}
ROWS = 8 * 10
"""Sequences x columns that ``minibatch()`` feeds (the last token is only predicted): all are in each sum."""


def link_of(rank: int, **more: Any) -> dict[str, Any]:
    return {"boundary": {"codec": None, "links": ["tensor"], "tensor_rank": rank, **PAYLOAD, **more}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def read(logits: torch.Tensor, micro: Any) -> torch.Tensor:
    return logits.clone()


def one_pass(
    rank: int, world: int, model: str, layout: Layout, sections: dict[str, Any], dense: bool
) -> tuple[torch.Tensor, Tensors, dict[str, int]]:
    """Logits of this tensor rank, the model's gradients, and what the tensor link carried, by kind and direction."""
    cfg = config(Path(model), layout, **sections)
    with policy_of(cfg) as policy:
        replay = replay_of(minibatch(), policy)
        inputs, rows = model_inputs(replay, cfg.train.micro_batch)
        parts = forward_only(policy.stage, policy.link, inputs, Pass("old_logprob", rows, dense), read)
        TickRunner(cfg, policy)._pass(replay, Pass("anchor" if dense else "fast", dense=dense))
        sent = {
            f"{kind} {way}": policy.ledger.sent("tensor", kind, way)  # type: ignore[arg-type]  # spelled out below
            for kind in ("fast", "old_logprob", "anchor", "basis")
            for way in ("forward", "backward")
        }
        return torch.cat(parts), gradients_of(policy), sent


def test_full_rank_is_the_uncompressed_sum(llama: Path) -> None:
    """Logits and gradients, through the projectors and in an uncompressed pass over the same link."""
    whole = run_ranks(one_pass, 1, str(llama), Layout(), {}, False)[0]
    plain = run_ranks(one_pass, 2, str(llama), TP2, {}, False)
    for dense in (False, True):
        linked = run_ranks(one_pass, 2, str(llama), TP2, link_of(HIDDEN), dense)
        for mine, theirs in zip(linked, plain, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-4)
        assert largest_difference(linked[0][1], plain[0][1]) < 1e-5
        assert largest_difference(linked[0][1], whole[1]) < 1e-5


def test_recomputed_activations_are_summed_again(llama: Path) -> None:
    """Their sums cross twice forward, as Megatron's own do; gradients stay what they were."""
    sections = link_of(HIDDEN)
    plain = run_ranks(one_pass, 2, str(llama), TP2, sections, False)[0]
    again = run_ranks(
        one_pass, 2, str(llama), TP2, sections | {"model": {"path": str(llama), "recompute": True}}, False
    )
    assert largest_difference(again[0][1], plain[1]) < 1e-6
    assert again[0][2]["fast forward"] == 2 * plain[2]["fast forward"]
    assert again[0][2]["fast backward"] == plain[2]["fast backward"]


def test_two_ticks_at_full_rank_leave_the_weights_of_one_process(llama: Path) -> None:
    reference = run_ranks(update_after, 1, str(llama), Layout(), 0, 2, {})[0]
    for layout, world in ((TP2, 2), (Layout(pipeline=2, tensor=2), 4)):
        linked = run_ranks(update_after, world, str(llama), layout, 1, 2, link_of(HIDDEN), timeout_s=120.0)
        assert update_difference(linked[0][0], reference[0]) < 1e-4


def test_a_sixteenth_of_the_rank_sends_a_sixteenth_of_the_bytes(llama: Path) -> None:
    """Two sums a layer each way, each of [rows, rank] float32 numbers on every rank; an anchor's are whole."""
    rank = HIDDEN // 16
    coded = run_ranks(one_pass, 2, str(llama), TP2, link_of(rank), False)[1][2]
    dense = run_ranks(one_pass, 2, str(llama), TP2, link_of(rank), True)[1][2]
    share = 2 * LAYERS * ROWS * rank * 4
    nothing = {"basis forward": 0, "basis backward": 0}
    assert coded == nothing | {
        "fast forward": share,
        "fast backward": share,
        "old_logprob forward": share,
        "old_logprob backward": 0,
        "anchor forward": 0,
        "anchor backward": 0,
    }
    assert dense == nothing | {
        "fast forward": 0,
        "fast backward": 0,
        "old_logprob forward": 16 * share,
        "old_logprob backward": 0,
        "anchor forward": 16 * share,
        "anchor backward": 16 * share,
    }


def sums(rank: int, world: int, model: str, dense: bool, observe: Any) -> tuple[Any, ...]:
    """One sum of random parts ``[7, 3, H]`` forward and one backward, then a refresh of what they taught."""
    cfg = config(Path(model), TP2, **link_of(6, basis="self"))
    with policy_of(cfg) as policy:
        link, bases = policy.stage.tensor_link, policy.boundaries.tensor
        assert link is not None and bases is not None
        part = torch.randn(7, 3, HIDDEN, generator=torch.Generator().manual_seed(rank))
        before = {place: bases.basis(1, place).current.clone() for place in WAYS}
        with policy.boundaries.running(Pass("fast", dense=dense, observe=observe)):
            totals = {place: link.total(1, place, part) for place in WAYS}
        verb = policy.link.refresh if observe == "both" else policy.link.refresh_from_sender
        verb(policy.groups.data)
        policy.boundaries.commit()
        after = {place: bases.basis(1, place).current.clone() for place in WAYS}
        untaught = torch.equal(bases.basis(0, "linear_fc2").current, _first_basis(policy))
        return part, before, totals, after, untaught


def _first_basis(policy: Policy) -> torch.Tensor:
    from megatron_grpo.ops.lowrank import random_basis, seed_of

    return random_basis(HIDDEN, 6, seed_of(0, 0, "linear_fc2"))


@pytest.mark.parametrize(("dense", "observe"), [(True, "both"), (False, "sender"), (True, "sender")])
def test_a_basis_takes_the_power_step_of_the_true_sum(llama: Path, dense: bool, observe: str) -> None:
    """Q <- orth(X^T X Q) of X = X_0 + X_1, which in a compressed pass no rank ever holds."""
    first, second = run_ranks(sums, 2, str(llama), dense, observe)
    x = (first[0] + second[0]).view(-1, HIDDEN)
    for place in WAYS:
        q = first[1][place]
        wanted = x if dense else x @ q @ q.T
        torch.testing.assert_close(first[2][place].view(-1, HIDDEN), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first[3][place], orthonormal(x.T @ (x @ q)), rtol=1e-3, atol=1e-3)
        assert torch.equal(first[2][place], second[2][place])
        assert torch.equal(first[3][place], second[3][place])
    assert first[4] and second[4]
    assert not torch.equal(first[1]["linear_qkv"], first[1]["linear_fc1"])


def padded_sums(rank: int, world: int, model: str, dense: bool, observe: Any) -> tuple[Any, ...]:
    """Two micro-batches of random parts ``[7, 3, H]`` with padding of ten times their size, and what those taught."""
    cfg = config(Path(model), TP2, **link_of(6, basis="self"))
    with policy_of(cfg) as policy:
        link, bases = policy.stage.tensor_link, policy.boundaries.tensor
        assert link is not None and bases is not None
        parts = torch.randn(2, 7, 3, HIDDEN, generator=torch.Generator().manual_seed(rank))
        carrying = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(5)) < 0.7
        padding = ~carrying.transpose(1, 2)
        parts[padding] *= 10
        before = {place: bases.basis(1, place).current.clone() for place in WAYS}
        rows = [carrying_rows(some) for some in carrying]
        with policy.boundaries.running(Pass("fast", rows, dense=dense, observe=observe)):
            for part in parts:
                for place in WAYS:
                    link.total(1, place, part)
        link.refresh(policy.groups.data, parts=observe == "sender")
        policy.boundaries.commit()
        return parts[~padding], before, {place: bases.basis(1, place).current.clone() for place in WAYS}


@pytest.mark.parametrize(("dense", "observe"), [(True, "both"), (False, "sender"), (True, "sender")])
def test_padding_teaches_nothing(llama: Path, dense: bool, observe: str) -> None:
    """The power step is that of the rows that carry a token, in each micro-batch its own."""
    first, second = run_ranks(padded_sums, 2, str(llama), dense, observe)
    x = first[0] + second[0]
    assert 0 < len(x) < 2 * 7 * 3
    for place in WAYS:
        torch.testing.assert_close(first[2][place], orthonormal(x.T @ (x @ first[1][place])), rtol=1e-3, atol=1e-3)


def taught(rank: int, world: int, model: str, layout: Layout, recompute: bool) -> dict[str, torch.Tensor]:
    """The bases of this stage after one pass over micro-batches that are padded each in its own way."""
    cfg = config(Path(model), layout, **link_of(6, basis="self") | {"model": {"path": model, "recompute": recompute}})
    with policy_of(cfg) as policy:
        TickRunner(cfg, policy).observe(replay_of(minibatch(), policy), Pass("fast", observe="sender"))
        policy.link.refresh_from_sender(policy.groups.data)
        policy.boundaries.commit()
        assert policy.boundaries.tensor is not None
        return {name: state["current"] for name, state in policy.boundaries.tensor.state_dict().items()}


def test_recomputed_activations_teach_as_the_first_ones(llama: Path) -> None:
    """While a stage recomputes one micro-batch it is ahead with others; each finds its own rows."""
    layout = Layout(pipeline=2, tensor=2)
    plain, again = (run_ranks(taught, 4, str(llama), layout, recompute) for recompute in (False, True))
    for mine, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def disagreeing(rank: int, world: int, model: str, layout: Layout) -> list[torch.Tensor]:
    cfg = config(Path(model), layout, **link_of(6, basis="anchor"))
    with policy_of(cfg) as policy:
        link, bases = policy.stage.tensor_link, policy.boundaries.tensor
        assert link is not None and bases is not None
        part = torch.randn(7, 3, HIDDEN, generator=torch.Generator().manual_seed(rank))
        with policy.boundaries.running(Pass("anchor", dense=True, observe="both")):
            link.total(0, "linear_proj", part)
            link.total(0, "linear_fc2", part)
        basis = bases.basis(0, "linear_fc2")
        stage = basis.stage

        def otherwise() -> None:
            """The QR of other hardware."""
            stage()
            basis.flat()[0, 0] += rank

        basis.stage = otherwise  # type: ignore[method-assign]  # in place of its own
        link.refresh(policy.groups.data, parts=False)
        policy.boundaries.commit()
        return [bases.basis(0, "linear_proj").current, bases.basis(0, "linear_fc2").current]


@pytest.mark.parametrize("layout", [TP2, Layout(tensor=2, data=2)], ids=["shards", "replicas_too"])
def test_ranks_whose_bases_differ_go_on_with_the_first_ones(llama: Path, layout: Layout) -> None:
    first, *others = run_ranks(disagreeing, layout.world_size, str(llama), layout)
    for other in others:
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


def whole_steps(
    rank: int, world: int, layout: Layout, zero: int, sections: dict[str, Any]
) -> tuple[list[dict[str, float]], list[torch.Tensor], int]:
    """Rows of three steps of the shipped policy, bases afterwards, and whether its tensor ranks agree on them."""
    cfg = config(TINY, layout, zero, **sections)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        assert policy.boundaries.tensor is not None
        rows = [row for step in range(3) for row in runner.run(step)]
        bases = [basis.current for _, basis in policy.boundaries.tensor.all()]
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, [hash(basis.numpy().tobytes()) for basis in bases], policy.groups.tensor)
        same = all(mine == gathered[0] for mine in gathered[: policy.groups.tensor.size()])
        return timeless(rows), bases, int(same)


def test_sampler_and_trainer_are_one_policy_through_the_link() -> None:
    """Sampled through the codec the gap is round-off; sampled dense it is the codec's price. All bytes are counted."""
    sections: dict[str, dict[str, Any]] = {
        "boundary": {"codec": None, "links": ["tensor"], "payload": "float32", "refresh_steps": 2, "calibration": 8},
        "grpo": {"minibatches": 2, "prompts_per_step": 4},
        "data": {"val_size": 2},
        "optim": {"lr": 1e-4},
    }
    results = {
        path: run_ranks(whole_steps, 2, TP2, 1, sections | {"rollout": {"path": path, "max_response": 8}})
        for path in ("codec", "dense")
    }
    coded, dense = (result[0][0] for result in results.values())
    assert all(same for ranks in results.values() for _, _, same in ranks)
    gaps = [[row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row] for rows in (coded, dense)]
    assert max(gaps[0]) < 1e-3 < min(gaps[1])
    for rows in (coded, dense):
        assert all(row["boundary/bytes_fast"] == 0 for row in rows)
        assert all(row["boundary/bytes_tensor"] > 0 for row in rows)
    # H / 4 numbers of 4 bytes against H of 2 in every sum of a coded step; the second step's end sends sketches.
    assert coded[1]["boundary/bytes_tensor"] * 2 == coded[1]["boundary/bytes_tensor_dense"]
    assert "boundary/bytes_data" not in coded[0]
