"""Gradients over the data link: equal on every replica, what PowerSGD says they are, and no more bytes than that."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_grpo.backends.data_link import DataLink
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import BoundaryConfig
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.parallel.link import Ledger
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import config, minibatch, policy_of, replay_of, weights_of, write_model
from tests.ranks.test_zero import update_after, update_difference

Tensors = dict[str, torch.Tensor]
DP2 = Layout(data=2)
RANK = 2


def link_of(rank: int = RANK, warmup: int = 0) -> dict[str, Any]:
    boundary = {"codec": None, "payload": None, "links": ["data"], "data_rank": rank, "data_warmup": warmup}
    return {"boundary": boundary}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def ticks(
    rank: int, world: int, model: str, layout: Layout, zero: int, count: int, sections: dict[str, Any]
) -> tuple[Tensors, Tensors, list[tuple[int, int]]]:
    """This replica's weights after ``count`` ticks, its change, and (sent, anchor bytes) of the data link by tick."""
    cfg = config(Path(model), layout, zero, optim={"lr": 1e-3, "clip": 0.5}, **sections)
    with policy_of(cfg) as policy:
        before = weights_of(policy)
        runner = TickRunner(cfg, policy)
        sent = []
        for tick in range(count):
            counts = [policy.ledger.sent("data", kind, "backward") for kind in ("fast", "anchor")]
            runner.run(tick, replay_of(minibatch(seed=tick), policy), uncompressed=tick == 3)
            now = [policy.ledger.sent("data", kind, "backward") for kind in ("fast", "anchor")]
            sent.append((now[0] - counts[0], now[1] - counts[1]))
        after = weights_of(policy)
        return after, {name: after[name] - before[name] for name in before}, sent


def test_bytes_are_those_of_the_factors(llama: Path) -> None:
    """One tick of warm-up, then compressed ones but for the fourth, a dense one; anchors, which are always whole."""
    anchored = {"anchor": {"enabled": True, "cadence": 2, "delay": 0}, "merger": {"kind": "signed_ema"}}
    weights, _, sent = run_ranks(ticks, 2, str(llama), DP2, 1, 5, link_of(warmup=1) | anchored)[0]
    # Megatron's matrices: 61 tokens padded to 128; q, k and v in one, gate and up in one. Case H4, for hidden 32.
    matrices = [(128, 32)] * 2 + [(32 + 2 * 16, 32), (32, 32), (2 * 48, 32), (32, 48)] * 4
    assert all((m + n) * RANK * 2 < m * n for m, n in matrices)
    vectors = sum(tensor.numel() for tensor in weights.values() if tensor.ndim == 1)
    everything = 4 * (vectors + sum(m * n for m, n in matrices))
    coded = 4 * (vectors + sum((m + n) * RANK for m, n in matrices))
    assert [fast for fast, _ in sent] == [everything, coded, coded, everything, coded]
    assert [anchor for _, anchor in sent] == [0, 0, everything, 0, everything]


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_hold_equal_weights(llama: Path, zero: int) -> None:
    """And the gradients are compressed: the update is another than the uncompressed one, not far from it."""
    plain = run_ranks(ticks, 2, str(llama), DP2, zero, 3, {})
    linked = run_ranks(ticks, 2, str(llama), DP2, zero, 3, link_of())
    assert all(torch.equal(linked[0][0][name], linked[1][0][name]) for name in linked[0][0])
    assert 1e-2 < update_difference(linked[0][1], plain[0][1]) < 1.5


def test_zero_1_makes_the_compressed_update_of_zero_0(tmp_path: Path) -> None:
    """Pipeline stages, replicas and a tied embedding, whose two copies stay one."""
    model = write_model(tmp_path / "qwen2", "qwen2", tied=True)
    layout = Layout(pipeline=2, data=2)
    updates = [run_ranks(update_after, 4, str(model), layout, zero, 3, link_of(), timeout_s=120.0) for zero in (0, 1)]
    assert update_difference(updates[1][0][0], updates[0][0][0]) < 1e-4


@pytest.mark.parametrize("zero", [0, 1])
def test_what_crosses_whole_is_the_uncompressed_update(llama: Path, zero: int) -> None:
    """At a rank that would not shrink any matrix, and before the warm-up is over."""
    plain = run_ranks(ticks, 2, str(llama), DP2, zero, 2, {})
    for sections in (link_of(rank=32), link_of(warmup=2)):
        linked = run_ranks(ticks, 2, str(llama), DP2, zero, 2, sections)
        assert update_difference(linked[0][1], plain[0][1]) < 1e-5


def ticks_and_states(rank: int, world: int, model: str, bad: int | None) -> tuple[list[float], Tensors, dict[str, Any]]:
    """``train/skipped`` by tick, weights and link state after two good ticks; between them perhaps a ``bad`` one, with
    an infinite number in the gradient of one matrix of that stage's on one replica."""
    layout = Layout(pipeline=2, data=2)
    cfg = config(Path(model), layout, 1, **link_of())
    with policy_of(cfg) as policy:
        runner, link = TickRunner(cfg, policy), policy.engine.data_link
        assert link is not None
        average, skipped = link.average, []

        def spoiled(gradients: Tensors, plan: Pass) -> None:
            if policy.groups.at.pipeline == bad and policy.groups.at.data == 0:
                next(gradient for gradient in gradients.values() if gradient.ndim == 2)[0, 0] = float("inf")
            average(gradients, plan)

        for tick in (0, 1, 2) if bad is not None else (0, 2):
            link.average = spoiled if tick == 1 else average  # type: ignore[method-assign, assignment]  # one bad tick
            report = runner.run(tick, replay_of(minibatch(seed=tick), policy), uncompressed=False)
            skipped.append(report.values["train/skipped"])
        return skipped, weights_of(policy), link.state_dict()["codecs"]


def test_a_bad_gradient_skips_its_tick_and_leaves_nothing_behind(llama: Path) -> None:
    """In one matrix of the last stage: what compression had left behind is whole, on every stage."""
    plain, spoiled = (run_ranks(ticks_and_states, 4, str(llama), bad) for bad in (None, 1))
    for (skipped, weights, codecs), (_, wanted, unspoiled) in zip(spoiled, plain, strict=True):
        assert skipped == [0.0, 1.0, 1.0]
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert len(codecs) > 1
        for name, state in unspoiled.items():
            assert all(torch.equal(codecs[name][key], state[key]) for key in ("q", "lost"))


def beside_torch(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of two steps of torch's PowerSGD hook, and ours from the state that its first compressed step left."""
    shape, power_rank = (24, 16), 2
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    torch.nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer)
    state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=power_rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    cfg = BoundaryConfig(links=("data",), data_rank=power_rank, data_warmup=0)
    group = dist.group.WORLD
    assert group is not None
    link = DataLink(cfg, {"weight": layer.weight}, group, Ledger(), seed=0)
    generator = torch.Generator().manual_seed(rank)
    pairs = []
    for step in range(5):
        x, y = torch.randn(8, shape[1], generator=generator), torch.randn(8, shape[0], generator=generator)
        if step >= 3:  # both memories are filled by now
            (lost,), (q,) = state.error_dict.values(), state.q_memory_dict.values()
            link.load_state_dict(
                {"ticks": 9, "codecs": {"weight": {"q": q.view(shape[1], power_rank), "lost": lost.view(shape)}}}
            )
        layer.zero_grad()
        (model(x) * y).sum().backward()
        assert layer.weight.grad is not None
        if step >= 3:
            mine = {"weight": y.T @ x}  # the local gradient of a linear layer
            link.average(mine, Pass("fast"))
            pairs.append((mine["weight"], layer.weight.grad.clone()))
    return pairs


def test_a_tick_is_one_of_torchs_own_hook() -> None:
    for pairs in run_ranks(beside_torch, 2):
        assert len(pairs) == 2
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
