"""Losses and gradients do not depend on how the model is split, nor on the micro-batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import (
    HIDDEN,
    config,
    gradients_of,
    largest_difference,
    minibatch,
    policy_of,
    replay_of,
    write_model,
)

Tensors = dict[str, torch.Tensor]


def fast_gradients(
    rank: int, world: int, model: str, layout: Layout, sections: dict[str, Any], old: bool
) -> tuple[float, Tensors]:
    """The loss and the gradients of one fast pass, on every rank."""
    cfg = config(Path(model), layout, **sections)
    with policy_of(cfg) as policy:
        runner = TickRunner(cfg, policy)
        collected = runner._pass(replay_of(minibatch(), policy, old=old), Pass("fast"))
        loss = sum(sums[-1].item() for sums, _ in collected)
        return loss, gradients_of(policy)


def one_process(model: Path, **sections: Any) -> tuple[float, Tensors]:
    return run_ranks(fast_gradients, 1, str(model), Layout(), sections, True)[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(llama: Path) -> tuple[float, Tensors]:
    return one_process(llama)


def plain_gradients(model: Path) -> tuple[float, Tensors]:
    """The same loss in ten lines over transformers: a token mean of the clipped surrogate."""
    from transformers import AutoModelForCausalLM

    batch = minibatch()
    network = AutoModelForCausalLM.from_pretrained(model)
    total = torch.zeros(())
    for row in range(len(batch)):
        first = batch.prompt_columns - int(batch.prompt_lengths_B[row])
        length = int(batch.response_lengths_B[row])
        ids = batch.tokens_BS[row, first : batch.prompt_columns + length]
        logp = network(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[-length:, 0]
        ratio = (logp - batch.sampler_logp_BR[row, :length]).exp()
        advantage = batch.advantages_B[row]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        surrogate = torch.maximum(surrogate, 3.0 * advantage) if advantage < 0 else surrogate
        total = total - surrogate.sum() / batch.response_tokens
    total.backward()
    return total.item(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_one_process_equals_transformers(llama: Path, reference: tuple[float, Tensors]) -> None:
    loss, gradients = plain_gradients(llama)
    assert reference[0] == pytest.approx(loss, rel=1e-5)
    assert largest_difference(reference[1], gradients) < 1e-5


@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2), Layout(tensor=2), Layout(data=2), Layout(pipeline=4), Layout(pipeline=2, tensor=2)],
    ids=["pp2", "tp2", "dp2", "pp4", "tp2pp2"],
)
def test_split_equals_one_process(llama: Path, reference: tuple[float, Tensors], layout: Layout) -> None:
    results = run_ranks(fast_gradients, layout.world_size, str(llama), layout, {}, True)
    losses = [loss for loss, _ in results if loss != 0.0]
    # Replicas hold shares of the loss, tensor ranks copies of it.
    total = sum(losses) / layout.tensor
    assert total == pytest.approx(reference[0], rel=1e-5)
    assert largest_difference(results[0][1], reference[1]) < 1e-5


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_micro_batch_size_does_not_matter(llama: Path, reference: tuple[float, Tensors], micro_batch: int) -> None:
    """Cases C1, C2 and C3: the loss is normalised once, over the minibatch."""
    layout = Layout(pipeline=2)
    sections = {"train": {"micro_batch": micro_batch}}
    results = run_ranks(fast_gradients, 2, str(llama), layout, sections, True)
    assert results[1][0] == pytest.approx(reference[0], rel=1e-5)
    assert largest_difference(results[0][1], reference[1]) < 1e-5


VARIANTS: dict[str, dict[str, Any]] = {
    "gspo": {"objective": "gspo", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"objective": "cispo", "clip_high": 0.5},
    "sequence_sum": {"aggregation": "sequence_sum"},
    "sequence_is": {"is_cap": 3.0, "is_floor": 0.3, "is_correction": "sequence_truncate"},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_formula_is_the_same_however_it_is_split(
    llama: Path, reference: tuple[float, Tensors], variant: str
) -> None:
    """What holds a whole sequence together (GSPO's ratio) is never cut by a micro-batch or a replica."""
    grpo = VARIANTS[variant] | {"group_size": 4, "prompts_per_step": 2, "minibatches": 1}
    whole = one_process(llama, grpo=grpo, train={"micro_batch": 8})
    results = run_ranks(
        fast_gradients, 4, str(llama), Layout(pipeline=2, data=2), {"grpo": grpo, "train": {"micro_batch": 1}}, True
    )
    assert sum(loss for loss, _ in results) == pytest.approx(whole[0], rel=1e-5)
    assert largest_difference(results[0][1], whole[1]) < 1e-5
    if variant != "sequence_is":  # against old log-probs that are the sampler's every weight is 1
        assert largest_difference(whole[1], reference[1]) > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_tied_families_split_equal(tmp_path: Path, family: str) -> None:
    """QKV bias, query/key norms, and a tied embedding whose two copies get one gradient."""
    model = write_model(tmp_path / family, family, tied=True)
    whole = one_process(model)
    results = run_ranks(fast_gradients, 4, str(model), Layout(pipeline=2, tensor=2), {}, True)
    assert largest_difference(results[0][1], whole[1]) < 1e-5


def test_uneven_layers_are_split(tmp_path: Path) -> None:
    """Cases D1 and D4: 7 layers on 2 stages are 4 + 3, and none is lost."""
    model = write_model(tmp_path / "seven", layers=7)
    whole = one_process(model)
    results = run_ranks(fast_gradients, 2, str(model), Layout(pipeline=2), {}, True)
    assert len({name for name in results[0][1] if "input_layernorm" in name}) == 7
    assert largest_difference(results[0][1], whole[1]) < 1e-5


def test_recomputed_activations_change_nothing(llama: Path, reference: tuple[float, Tensors]) -> None:
    sections = {"model": {"recompute": True}}
    results = run_ranks(fast_gradients, 2, str(llama), Layout(pipeline=2), sections, True)
    assert largest_difference(results[0][1], reference[1]) < 1e-6


def test_full_rank_equals_identity(llama: Path, reference: tuple[float, Tensors]) -> None:
    sections = {"boundary": {"codec": "lowrank", "rank": HIDDEN, "payload": "float32", "basis": "random"}}
    for layout in (Layout(pipeline=4), Layout(pipeline=2, tensor=2)):
        results = run_ranks(fast_gradients, 4, str(llama), layout, sections, True)
        assert results[3][0] == pytest.approx(reference[0], rel=1e-5)
        assert largest_difference(results[0][1], reference[1]) < 1e-5
