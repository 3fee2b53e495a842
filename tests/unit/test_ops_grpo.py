"""GRPO's numbers by hand. Legend: B sequences, R response."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_grpo.ops.grpo import (
    aggregate,
    cispo_loss,
    gspo_loss,
    importance_weight,
    kl_estimate,
    policy_loss,
)

INF, NAN = math.inf, math.nan


def _loss(
    ratio: float,
    advantage: float,
    *,
    dual_clip: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
    weight: float | None = None,
) -> tuple[float, bool, float]:
    """Loss, clip flag and d loss / d logp of one token with low 0.2 and high 0.3."""
    logp_BR = torch.tensor([[math.log(ratio) - 1.5]], requires_grad=True)
    loss_BR, clipped_BR = policy_loss(
        logp_BR,
        torch.tensor([[-1.5]]),
        torch.tensor([advantage]),
        torch.tensor([[True]]),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        weight_BR=None if weight is None else torch.tensor([[weight]]),
    )
    (gradient_BR,) = torch.autograd.grad(loss_BR.sum(), logp_BR)
    return float(loss_BR.detach()), bool(clipped_BR), float(gradient_BR)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, 3.0, -2.0, False, -2.0),
        (1.0, -2.0, 3.0, 2.0, False, 2.0),
        (1.25, 2.0, 3.0, -2.5, False, -2.5),  # within the high range
        (1.5, 2.0, 3.0, -2.6, True, 0.0),  # above it with A > 0: held at 1.3
        (0.5, 2.0, 3.0, -1.0, False, -1.0),  # below with A > 0: free to come back
        (0.5, -2.0, 3.0, 1.6, True, 0.0),  # below with A < 0: held at 0.8
        (1.5, -2.0, 3.0, 3.0, False, 3.0),  # above with A < 0: free to come back
        (5.0, -2.0, 3.0, 6.0, True, 0.0),  # dual clip holds the loss at 3 |A|
        (5.0, -2.0, None, 10.0, False, 10.0),  # without it, it grows
        (5.0, 2.0, 3.0, -2.6, True, 0.0),  # dual clip is for A < 0 only
        (5.0, 0.0, 3.0, 0.0, False, 0.0),
    ],
)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, clipped: bool, gradient: float
) -> None:
    got = _loss(ratio, advantage, dual_clip=dual_clip)
    assert got[0] == pytest.approx(loss, abs=1e-5)
    assert got[1] is clipped
    assert got[2] == pytest.approx(gradient, abs=1e-5)


def test_c12_policy_loss_clamps_the_log_ratio() -> None:
    loss, clipped, gradient = _loss(math.exp(5), -1.0, dual_clip=None, log_ratio_clamp=2.0)
    assert loss == pytest.approx(math.exp(2), rel=1e-6)
    assert not clipped
    assert gradient == 0.0


def test_c12_policy_loss_weight_scales_loss_and_gradient_and_gets_none_itself() -> None:
    loss, _, gradient = _loss(1.25, 2.0, weight=0.5)
    assert loss == pytest.approx(-1.25)
    assert gradient == pytest.approx(-1.25)
    weight_BR = torch.ones(1, 1, requires_grad=True)
    zero_BR = torch.zeros(1, 1, requires_grad=True)
    result_BR, _ = policy_loss(
        zero_BR,
        torch.zeros(1, 1),
        torch.ones(1),
        torch.ones(1, 1),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_clamp=20.0,
        weight_BR=weight_BR,
    )
    result_BR.sum().backward()
    assert weight_BR.grad is None


@pytest.mark.parametrize("garbage", [INF, -INF, NAN, 1e30])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_masked_positions_reach_neither_loss_nor_gradient(garbage: float, mask_dtype: torch.dtype) -> None:
    logp_BR = torch.tensor([[-1.0, garbage], [garbage, garbage]], requires_grad=True)
    mask_BR = torch.tensor([[1, 0], [0, 0]]).to(mask_dtype)
    loss_BR, clipped_BR = policy_loss(
        logp_BR,
        torch.tensor([[-1.0, -1.0], [garbage, -1.0]]),
        torch.tensor([2.0, -2.0]),
        mask_BR,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
        log_ratio_clamp=20.0,
        weight_BR=torch.tensor([[1.0, garbage], [1.0, garbage]]),
    )
    kl_BR = kl_estimate(logp_BR, torch.full((2, 2), -1.0), mask_BR)
    assert loss_BR.tolist() == [[-2.0, 0.0], [0.0, 0.0]]
    assert clipped_BR.tolist() == [[False, False], [False, False]]
    assert kl_BR.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    (loss_BR + kl_BR).sum().backward()
    assert logp_BR.grad is not None
    assert logp_BR.grad.tolist() == [[-2.0, 0.0], [0.0, 0.0]]


VARIANT_MASK_BR = torch.tensor([[1, 1, 0], [1, 0, 0]])


def _variant(
    kind: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ratio_BR: torch.Tensor,
    advantage: list[float],
    **options: Any,
) -> tuple[list[list[float]], list[list[bool]], list[list[float]]]:
    """Loss, flags and the loss's gradient of two sequences of two tokens and one; every log-prob -2 before the sum."""
    logp_BR = torch.full((2, 3), -2.0, requires_grad=True)
    loss_BR, clipped_BR = kind(
        logp_BR,
        -2.0 - ratio_BR.log(),
        torch.tensor(advantage),
        VARIANT_MASK_BR,
        log_ratio_clamp=20.0,
        weight_BR=None,
        **options,
    )
    (gradient_BR,) = torch.autograd.grad(loss_BR.sum(), logp_BR)
    return loss_BR.detach().tolist(), clipped_BR.tolist(), gradient_BR.tolist()


def test_gspo_has_one_ratio_a_sequence() -> None:
    # geometric means sqrt(1 * 1.21) = 1.1, inside; and 0.5, below 0.8 with A < 0: held
    ratio_BR = torch.tensor([[1.0, 1.21, INF], [0.5, NAN, NAN]])
    loss, clipped, gradient = _variant(gspo_loss, ratio_BR, [2.0, -1.0], clip_low=0.2, clip_high=0.2, dual_clip=None)
    torch.testing.assert_close(torch.tensor(loss), torch.tensor([[-2.2, -2.2, 0.0], [0.8, 0.0, 0.0]]))
    assert clipped == [[False] * 3, [True, False, False]]
    # each token moves the ratio by half its share, and both tokens carry it: d/dlogp = -A s (1/2 + 1/2)
    torch.testing.assert_close(torch.tensor(gradient), torch.tensor([[-2.2, -2.2, 0.0], [0.0, 0.0, 0.0]]))


def test_cispo_weighs_the_log_prob_and_keeps_the_gradient_of_bounded_tokens() -> None:
    ratio_BR = torch.tensor([[0.5, 3.0, NAN], [3.0, INF, 1.0]])
    loss, clipped, gradient = _variant(cispo_loss, ratio_BR, [2.0, -1.0], clip_high=0.5)
    # -min(ratio, 1.5) * A * (-2)
    torch.testing.assert_close(torch.tensor(loss), torch.tensor([[2.0, 6.0, 0.0], [-3.0, 0.0, 0.0]]))
    assert clipped == [[False, True, False], [True, False, False]]
    torch.testing.assert_close(torch.tensor(gradient), torch.tensor([[-1.0, -3.0, 0.0], [1.5, 0.0, 0.0]]))


def test_at_ratio_one_every_objective_has_the_same_gradient() -> None:
    """The first tick of a step is on-policy: the variants differ in what they do to other ratios."""
    ones_BR, clips = torch.ones(2, 3), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    want = _variant(policy_loss, ones_BR, [2.0, -1.0], **clips)[2]
    assert _variant(cispo_loss, ones_BR, [2.0, -1.0], clip_high=0.2)[2] == want
    assert _variant(gspo_loss, ones_BR, [2.0, -1.0], **clips)[2] == want


def test_clip_flags_count_unmasked_tokens_only() -> None:
    _, clipped_BR = policy_loss(
        torch.full((1, 2), math.log(2.0)),
        torch.zeros(1, 2),
        torch.ones(1),
        torch.tensor([[True, False]]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_clamp=20.0,
        weight_BR=None,
    )
    assert clipped_BR.tolist() == [[True, False]]


def test_k3_by_hand_and_its_gradient() -> None:
    logp_BR = torch.log(torch.tensor([[0.5, 0.5, 0.25]])).requires_grad_()
    kl_BR = kl_estimate(logp_BR, torch.log(torch.tensor([[0.5, 0.25, 0.5]])))
    expected_BR = torch.tensor([[0.0, 0.5 + math.log(2) - 1, 2 - math.log(2) - 1]])
    torch.testing.assert_close(kl_BR, expected_BR, atol=1e-6, rtol=0)
    kl_BR.sum().backward()
    # d/dlogp (exp(d) - d - 1) = 1 - exp(d)
    assert logp_BR.grad is not None
    torch.testing.assert_close(logp_BR.grad, torch.tensor([[0.0, 0.5, -1.0]]), atol=1e-6, rtol=0)


def test_c12_kl_estimators_by_hand() -> None:
    # d = log(ref) - log(policy) = log 2 and log 1/2
    logp_BR, ref_BR = torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    ln2 = math.log(2)
    for estimator, value, slope in [
        ("k1", [-ln2, ln2], [1.0, 1.0]),
        ("k2", [ln2**2 / 2, ln2**2 / 2], [-ln2, ln2]),
        ("k3", [2 - ln2 - 1, 0.5 + ln2 - 1], [1 - 2.0, 1 - 0.5]),
    ]:
        leaf_BR = logp_BR.clone().requires_grad_()
        kl_BR = kl_estimate(leaf_BR, ref_BR, estimator=estimator)  # type: ignore[arg-type]
        kl_BR.sum().backward()
        torch.testing.assert_close(kl_BR.detach(), torch.tensor([value]), atol=1e-6, rtol=0)
        torch.testing.assert_close(leaf_BR.grad, torch.tensor([slope]), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"estimator=k3\+ is unknown; use k1, k2 or k3"):
        kl_estimate(logp_BR, ref_BR, estimator="k3+")  # type: ignore[arg-type]


def test_c20_k3_averages_to_the_kl_divergence_and_is_fp32() -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = float((p_V * (p_V / q_V).log()).sum())
    assert float((p_V * kl_estimate(p_V.log(), q_V.log())).sum()) == pytest.approx(exact, rel=1e-5)
    assert kl_estimate(p_V.log().bfloat16(), q_V.log().bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("token_truncate", [[1.0, 2.0, 0.5], [0.5, 2.0, 1.0]]),
        ("token_mask", [[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]]),
        # over the sequences: 1 * 4 * 0.5 = 2 and, its last token masked, 0.25 * 4 = 1
        ("sequence_truncate", [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]),
        ("sequence_mask", [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_importance_weights_by_hand(how: str, want: list[list[float]]) -> None:
    ratio_BR = torch.tensor([[1.0, 4.0, 0.5], [0.25, 4.0, 7.0]])
    mask_BR = torch.tensor([[1, 1, 1], [1, 1, 0]])
    trainer_BR = ratio_BR.log().requires_grad_()
    options: dict[str, Any] = {"how": how, "cap": 2.0, "floor": 0.5}
    weight_BR = importance_weight(trainer_BR, torch.zeros(2, 3), mask_BR, **options)
    torch.testing.assert_close(weight_BR, torch.tensor(want), atol=1e-5, rtol=0)
    assert not weight_BR.requires_grad
    assert float(importance_weight(torch.zeros(1, 1), torch.full((1, 1), -1000.0), mask_BR[:1, :1], **options)) == (
        2.0 if how.endswith("truncate") else 0.0
    )


def test_a_sequence_out_of_bounds_is_dropped_whole() -> None:
    ratio_BR = torch.tensor([[1.5, 1.5], [1.5, 1.2]])
    weight_BR = importance_weight(ratio_BR.log(), torch.zeros(2, 2), torch.ones(2, 2), how="sequence_mask", cap=2.0)
    torch.testing.assert_close(weight_BR, torch.tensor([[0.0, 0.0], [1.8, 1.8]]))


C3_LOSS_BR = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0], [7.0, 9.0, 9.0]])
C3_MASK_BR = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
C3_WANT = {
    "token_mean": 22 / 6,
    "sequence_mean": (1.5 + 4 + 7) / 3,
    "sequence_sum": (3 + 12 + 7) / 3,
    "fixed_length": 22 / (3 * 4),
}


def test_aggregations_at_their_published_values() -> None:
    values = {
        how: float(aggregate(C3_LOSS_BR, C3_MASK_BR, how=how, tokens=6, sequences=3, max_response=3))  # type: ignore[arg-type]
        for how in C3_WANT
    }
    assert values == pytest.approx(
        {"token_mean": 3.6667, "sequence_mean": 4.1667, "sequence_sum": 7.3333, "fixed_length": 2.4444}, abs=5e-5
    )


@pytest.mark.parametrize("how", list(C3_WANT))
@pytest.mark.parametrize("cuts", [[0, 3], [0, 2, 3], [0, 1, 2, 3]])
def test_c3_micro_batches_add_up_to_the_global_mean(how: str, cuts: list[int]) -> None:
    shares = [
        aggregate(
            C3_LOSS_BR[start:stop],
            C3_MASK_BR[start:stop],
            how=how,  # type: ignore[arg-type]
            tokens=6,
            sequences=3,
            max_response=4,
        )
        for start, stop in pairwise(cuts)
    ]
    assert float(sum(shares)) == pytest.approx(C3_WANT[how], rel=1e-6)


def test_aggregate_takes_counts_as_tensors_and_low_precision_losses() -> None:
    for how, want in C3_WANT.items():
        share = aggregate(
            C3_LOSS_BR.bfloat16(),
            C3_MASK_BR.bool(),
            how=how,  # type: ignore[arg-type]
            tokens=torch.tensor(6),
            sequences=torch.tensor(3),
            max_response=4,
        )
        assert share.dtype == torch.float32
        assert float(share) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("how", list(C3_WANT))
def test_c6_a_micro_batch_of_padding_adds_zero_and_no_gradient(how: str) -> None:
    loss_BR = torch.tensor([[INF, NAN], [1.0, -INF]], requires_grad=True)
    share = aggregate(
        loss_BR,
        torch.zeros(2, 2, dtype=torch.bool),
        how=how,  # type: ignore[arg-type]
        tokens=0,
        sequences=0,
        max_response=2,
    )
    assert torch.equal(share.detach(), torch.tensor(0.0))
    share.backward()
    assert loss_BR.grad is not None
    assert torch.equal(loss_BR.grad, torch.zeros(2, 2))


def test_c6_a_sequence_without_tokens_adds_zero_to_a_sequence_mean() -> None:
    mask_BR = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    share = aggregate(C3_LOSS_BR, mask_BR, how="sequence_mean", tokens=3, sequences=3, max_response=4)
    assert float(share) == pytest.approx((1.5 + 0 + 7) / 3)


def test_aggregate_refuses_an_unknown_way() -> None:
    with pytest.raises(ValueError, match="how=mean"):
        aggregate(
            C3_LOSS_BR,
            C3_MASK_BR,
            how="mean",  # type: ignore[arg-type]
            tokens=6,
            sequences=3,
            max_response=4,
        )
