"""GRPO's numbers by hand. Legend: B sequences, G group, R response."""

import math
from itertools import pairwise

import pytest
import torch

from megatron_grpo.ops.grpo import (
    aggregate,
    dead_groups,
    group_advantages,
    importance_weight,
    k3_kl,
    policy_loss,
)

INF, NAN = math.inf, math.nan


def test_advantages_by_hand() -> None:
    # mean 0.25, sample variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    advantage_BG = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0, std="sample")
    assert advantage_BG.dtype == torch.float32
    assert advantage_BG.tolist() == [[1.5, -0.5, -0.5, -0.5]]
    plain_BG = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=1e-6, std="none")
    assert plain_BG.tolist() == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize(("dtype", "want"), [(torch.float32, 0.6196), (torch.float64, 0.61950)])
def test_b1_groups_of_low_variance_keep_their_size(dtype: torch.dtype, want: float) -> None:
    reward_BG = torch.tensor([[1.00000, 1.00001], [2.00000, 2.00001]], dtype=dtype)
    advantage_BG = group_advantages(reward_BG, eps=1e-6, std="sample")
    wanted_BG = torch.tensor([[-want, want]]).expand(2, 2)
    torch.testing.assert_close(advantage_BG, wanted_BG, atol=1e-4, rtol=0)


@pytest.mark.parametrize("std", ["sample", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [2, 3, 7, 8])
def test_b2_b6_equal_rewards_give_exactly_zero(std: str, dtype: torch.dtype, group: int) -> None:
    for value in (0.1, 1 / 3, 0.7, 1.0, 0.0, 1e4 + 0.1):
        reward_BG = torch.full((2, group), value, dtype=dtype)
        assert dead_groups(reward_BG).tolist() == [True, True]
        advantage_BG = group_advantages(reward_BG, eps=1e-6, std=std)  # type: ignore[arg-type]
        assert torch.equal(advantage_BG, torch.zeros(2, group))


def test_b2_a_dead_group_leaves_its_neighbour_alone() -> None:
    reward_BG = torch.tensor([[0.1, 0.1], [0.0, 1.0]])
    assert dead_groups(reward_BG).tolist() == [True, False]
    advantage_BG = group_advantages(reward_BG, eps=0.0, std="sample")
    torch.testing.assert_close(advantage_BG, torch.tensor([[0.0, 0.0], [-(0.5**0.5), 0.5**0.5]]))


def test_b4_one_hit_in_a_group_stays_bounded() -> None:
    # for a group of G the largest value possible is (G - 1) / sqrt(G)
    for group in (2, 4, 8, 64):
        reward_BG = torch.zeros(1, group)
        reward_BG[0, 0] = 1.0
        advantage_BG = group_advantages(reward_BG, eps=1e-6, std="sample")
        assert float(advantage_BG[0, 0]) == pytest.approx((group - 1) / group**0.5, rel=1e-4)


def test_advantages_do_not_depend_on_reward_offset_or_order() -> None:
    reward_BG = torch.tensor([[0.25, 0.5, 1.0, 0.0]])
    advantage_BG = group_advantages(reward_BG, eps=1e-6, std="sample")
    shifted_BG = group_advantages(reward_BG + 1000, eps=1e-6, std="sample")
    torch.testing.assert_close(shifted_BG, advantage_BG)
    torch.testing.assert_close(group_advantages(reward_BG.flip(1), eps=1e-6, std="sample").flip(1), advantage_BG)


def test_advantages_refuse_a_group_of_one_and_an_unknown_std() -> None:
    with pytest.raises(ValueError, match=r"group_size=1 .*at least 2"):
        group_advantages(torch.ones(3, 1), eps=1e-6, std="sample")
    with pytest.raises(ValueError, match="std=population"):
        group_advantages(torch.ones(3, 2), eps=1e-6, std="population")  # type: ignore[arg-type]


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


def test_policy_loss_clamps_the_log_ratio() -> None:
    loss, clipped, gradient = _loss(math.exp(5), -1.0, dual_clip=None, log_ratio_clamp=2.0)
    assert loss == pytest.approx(math.exp(2), rel=1e-6)
    assert not clipped
    assert gradient == 0.0


def test_policy_loss_weight_scales_loss_and_gradient_and_gets_none_itself() -> None:
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
    kl_BR = k3_kl(logp_BR, torch.full((2, 2), -1.0), mask_BR)
    assert loss_BR.tolist() == [[-2.0, 0.0], [0.0, 0.0]]
    assert clipped_BR.tolist() == [[False, False], [False, False]]
    assert kl_BR.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    (loss_BR + kl_BR).sum().backward()
    assert logp_BR.grad is not None
    assert logp_BR.grad.tolist() == [[-2.0, 0.0], [0.0, 0.0]]


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
    kl_BR = k3_kl(logp_BR, torch.log(torch.tensor([[0.5, 0.25, 0.5]])))
    expected_BR = torch.tensor([[0.0, 0.5 + math.log(2) - 1, 2 - math.log(2) - 1]])
    torch.testing.assert_close(kl_BR, expected_BR, atol=1e-6, rtol=0)
    kl_BR.sum().backward()
    # d/dlogp (exp(d) - d - 1) = 1 - exp(d)
    assert logp_BR.grad is not None
    torch.testing.assert_close(logp_BR.grad, torch.tensor([[0.0, 0.5, -1.0]]), atol=1e-6, rtol=0)


def test_k3_averages_to_the_kl_divergence_and_is_fp32() -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = float((p_V * (p_V / q_V).log()).sum())
    assert float((p_V * k3_kl(p_V.log(), q_V.log())).sum()) == pytest.approx(exact, rel=1e-5)
    assert k3_kl(p_V.log().bfloat16(), q_V.log().bfloat16()).dtype == torch.float32


def test_importance_weight_by_hand() -> None:
    trainer_BR = torch.log(torch.tensor([[0.5, 0.4, 0.1]])).requires_grad_()
    weight_BR = importance_weight(trainer_BR, torch.log(torch.tensor([[0.5, 0.1, 0.2]])), cap=2.0)
    torch.testing.assert_close(weight_BR, torch.tensor([[1.0, 2.0, 0.5]]))
    assert not weight_BR.requires_grad
    assert float(importance_weight(torch.zeros(1), torch.full((1,), -1000.0), cap=2.0)) == 2.0


C3_LOSS_BR = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0], [7.0, 9.0, 9.0]])
C3_MASK_BR = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
C3_WANT = {"token_mean": 22 / 6, "sequence_mean": (1.5 + 4 + 7) / 3, "fixed_length": 22 / (3 * 4)}


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
