"""The loss as the last stage calls it, on one vocabulary shard. Legend: B sequences, T input columns, V vocabulary."""

from typing import Any

import pytest
import torch

from megatron_grpo.backends.megatron.schedule import ModelInput
from megatron_grpo.config import GrpoConfig, OptimConfig, RolloutConfig
from megatron_grpo.ops.logprobs import OneShard
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.loss import SUMS, PolicyLoss, ReadLogprobs, Replay
from megatron_grpo.training.tick import learning_rate

B, P, R, V = 6, 2, 5, 11


def sequences() -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """A batch, logits of its input columns, and log-probs near those of a policy from before."""
    generator = torch.Generator().manual_seed(1)
    batch = Batch(
        tokens_BS=torch.randint(0, V, (B, P + R), generator=generator),
        prompt_columns=P,
        prompt_lengths_B=torch.full((B,), P),
        response_lengths_B=torch.tensor([5, 3, 1, 5, 2, 4]),
        sampler_logp_BR=-2 - torch.rand(B, R, generator=generator),
        advantages_B=torch.randn(B, generator=generator),
    )
    logits_BTV = torch.randn(B, P + R - 1, V, generator=generator)
    return batch, logits_BTV, -2 - torch.rand(B, R, generator=generator)


def loss_of(
    cfg: GrpoConfig, batch: Batch, logits_BTV: torch.Tensor, old_BR: torch.Tensor, *, tokens: int, sequences: int
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, its gradient at the logits, and the sums by name; the reference's log-probs are the old ones shifted."""
    logits_BTV = logits_BTV.clone().requires_grad_()
    replay = Replay(batch, old_BR, old_BR + 0.1, tokens=tokens, sequences=sequences)
    micro = ModelInput(batch.input_tokens_BT(), batch.attention_masked_B1TT(), replay)
    loss, (sums, _) = PolicyLoss(cfg, RolloutConfig(max_response=R), OneShard(V))(logits_BTV, micro)
    (gradient,) = torch.autograd.grad(loss, logits_BTV)
    return loss.item(), gradient, dict(zip(SUMS, sums.tolist(), strict=True))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo"])
def test_what_does_not_count_is_as_if_it_had_not_been_sampled(aggregation: str, objective: str) -> None:
    """Case B6: neither policy gradient, KL nor entropy of a dropped sequence, and no share of the denominators."""
    options: dict[str, Any] = {"aggregation": aggregation, "objective": objective}
    cfg = GrpoConfig(**options, kl_coef=0.1, entropy_coef=0.01, is_cap=1.5)
    batch, logits_BTV, old_BR = sequences()
    kept = torch.tensor([True, False, True, True, False, True])
    marked = batch.with_advantages(batch.advantages_B, kept)
    few = Batch(
        tokens_BS=batch.tokens_BS[kept],
        prompt_columns=P,
        prompt_lengths_B=batch.prompt_lengths_B[kept],
        response_lengths_B=batch.response_lengths_B[kept],
        sampler_logp_BR=batch.sampler_logp_BR[kept],
        advantages_B=batch.advantages_B[kept],
    )
    tokens = 5 + 1 + 5 + 4
    assert int(marked.loss_mask_BR.sum()) == tokens
    loss, gradient, sums = loss_of(cfg, marked, logits_BTV, old_BR, tokens=tokens, sequences=4)
    want, want_gradient, want_sums = loss_of(cfg, few, logits_BTV[kept], old_BR[kept], tokens=tokens, sequences=4)
    assert loss == pytest.approx(want, abs=1e-6)
    torch.testing.assert_close(gradient[kept], want_gradient)
    assert not gradient[~kept].any() and gradient[kept].any()
    for name in ("tokens", "clipped", "entropy", "kl"):
        assert sums[name] == pytest.approx(want_sums[name], rel=1e-5)
    assert sums["compared"] == 20 and want_sums["compared"] == 15  # the gap is measured on all that was sampled


def test_nothing_that_counts_is_no_loss_and_no_gradient() -> None:
    batch, logits_BTV, old_BR = sequences()
    nothing = batch.with_advantages(batch.advantages_B, torch.zeros(B, dtype=torch.bool))
    loss, gradient, sums = loss_of(GrpoConfig(kl_coef=0.1), nothing, logits_BTV, old_BR, tokens=0, sequences=0)
    assert loss == 0.0 and not gradient.any() and sums["tokens"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_c7_c8_the_loss_by_the_slow_way(temperature: float) -> None:
    """Log-probs of the response's own tokens at the sampler's temperature, from the columns before them; a mean over
    exactly the tokens that were sampled."""
    batch, logits_BTV, old_BR = sequences()
    total, tokens = 0.0, 0
    for row in range(B):
        for place in range(int(batch.response_lengths_B[row])):
            column = P - 1 + place
            scores_V = logits_BTV[row, column].double() / temperature
            logp = scores_V[batch.tokens_BS[row, column + 1]] - scores_V.exp().sum().log()
            ratio = float((logp - old_BR[row, place]).exp())
            advantage = float(batch.advantages_B[row])
            total -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            tokens += 1
    replay = Replay(batch, old_BR, None, tokens=tokens, sequences=B)
    micro = ModelInput(batch.input_tokens_BT(), batch.attention_masked_B1TT(), replay)
    rollout = RolloutConfig(max_response=R, temperature=temperature)
    loss, (sums, _) = PolicyLoss(GrpoConfig(dual_clip=None), rollout, OneShard(V))(logits_BTV, micro)
    assert tokens == 20 == sums[SUMS.index("tokens")]
    assert loss.item() == pytest.approx(total / tokens, rel=1e-5)
    assert sums[SUMS.index("kl")] == 0.0  # case C14: no reference, no divergence


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_c7_the_divergence_from_itself_is_nothing_at_any_temperature(estimator: str) -> None:
    batch, logits_BTV, _ = sequences()
    rollout = RolloutConfig(max_response=R, temperature=0.7)
    own_BR = ReadLogprobs(0.7, OneShard(V))(
        logits_BTV, ModelInput(batch.input_tokens_BT(), batch.attention_masked_B1TT(), Replay(batch, None, None, 20, B))
    )
    replay = Replay(batch, own_BR, own_BR, tokens=20, sequences=B)
    micro = ModelInput(batch.input_tokens_BT(), batch.attention_masked_B1TT(), replay)
    cfg = GrpoConfig(kl_coef=1.0, kl_estimator=estimator)  # type: ignore[arg-type]
    _, (sums, _) = PolicyLoss(cfg, rollout, OneShard(V))(logits_BTV, micro)
    assert sums[SUMS.index("kl")].item() == pytest.approx(0.0, abs=1e-6)
    assert sums[SUMS.index("clipped")] == 0.0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_c4_what_is_logged_does_not_depend_on_the_micro_batch(size: int) -> None:
    batch, logits_BTV, old_BR = sequences()
    cfg = GrpoConfig(kl_coef=0.1, entropy_coef=0.01)
    want = loss_of(cfg, batch, logits_BTV, old_BR, tokens=20, sequences=B)[2]
    replay = Replay(batch, old_BR, old_BR + 0.1, tokens=20, sequences=B)
    loss = PolicyLoss(cfg, RolloutConfig(max_response=R), OneShard(V))
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    for start, part in zip(range(0, B, size), replay.split(size), strict=True):
        micro = ModelInput(part.batch.input_tokens_BT(), part.batch.attention_masked_B1TT(), part)
        total += loss(logits_BTV[start : start + size], micro)[1][0]
    assert dict(zip(SUMS, total.tolist(), strict=True)) == pytest.approx(want, rel=1e-5)


def test_objectives_differ_where_the_ratio_is_not_one() -> None:
    batch, logits_BTV, old_BR = sequences()
    losses = {
        objective: loss_of(
            GrpoConfig(objective=objective),  # type: ignore[arg-type]
            batch,
            logits_BTV,
            old_BR,
            tokens=20,
            sequences=B,
        )[0]
        for objective in ("clip", "gspo", "cispo")
    }
    assert len({round(loss, 4) for loss in losses.values()}) == 3


def test_c18_the_learning_rate_follows_from_the_tick() -> None:
    """22 ticks of warm-up in a run of 220: full from the 22nd to the last, whenever the run was resumed."""
    optim = OptimConfig(lr=1e-3, warmup_ticks=22)
    rates = [learning_rate(optim, tick) for tick in range(220)]
    assert rates[0] == pytest.approx(1e-3 / 22) and rates[10] == pytest.approx(0.5e-3) and rates[20] < 1e-3
    assert rates[21:] == [1e-3] * 199
    assert learning_rate(OptimConfig(lr=1e-3, warmup_ticks=0), 0) == 1e-3
