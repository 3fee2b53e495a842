"""What a reward is worth within its group, by hand. Legend: B groups, G group, K rewards."""

import math

import pytest
import torch

from megatron_grpo.ops.advantages import (
    dead_groups,
    group_advantages,
    group_std,
    overlong_penalty,
    weighted_reward,
)

NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
    ("options", "hit", "miss"),
    [
        ({"std": "sample", "eps": 1e-6}, 1.499997, -0.499999),  # GRPO
        ({"std": "sample", "eps": 1e-4}, 1.4997, -0.4999),  # the same with a larger eps
        ({"std": "none", "eps": 1e-6}, 0.75, -0.25),  # Dr. GRPO
        # against the others: 1 - 0, whose std 0 divides nothing; (0 - 1/3) / (std [1, 0, 0] = 0.577350)
        ({"std": "sample", "eps": 1e-6, "baseline": "leave_one_out"}, 1.0, -0.577349),
        ({"std": "none", "eps": 1e-6, "baseline": "leave_one_out"}, 1.0, -1 / 3),  # RLOO
    ],
)
def test_one_hit_in_four_under_each_convention(options: dict[str, object], hit: float, miss: float) -> None:
    advantage_BG = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), **options)  # type: ignore[arg-type]
    places = 1e-4 if options["eps"] == 1e-4 else 1e-6
    torch.testing.assert_close(advantage_BG, torch.tensor([[hit, miss, miss, miss]]), atol=places, rtol=0)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("std", ["sample", "none"])
def test_b12_an_unscorable_sample_is_as_if_it_had_not_been_drawn(baseline: str, std: str) -> None:
    scored_BG = torch.tensor([[1.0, 0.0, 0.5], [0.25, 1.0, 1.0]])
    with_gap_BG = torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, 0.25, 1.0, 1.0]])
    want = group_advantages(scored_BG, eps=1e-6, std=std, baseline=baseline)  # type: ignore[arg-type]
    got = group_advantages(with_gap_BG, eps=1e-6, std=std, baseline=baseline)  # type: ignore[arg-type]
    assert got[0].tolist() == [want[0, 0], 0.0, want[0, 1], want[0, 2]]
    assert got[1].tolist() == [0.0, *want[1].tolist()]


def test_groups_with_fewer_than_two_scores_are_dead() -> None:
    reward_BG = torch.tensor([[NAN, NAN, NAN], [NAN, 1.0, NAN], [0.0, 1.0, NAN]])
    assert dead_groups(reward_BG).tolist() == [True, True, False]
    for baseline in ("group", "leave_one_out"):
        advantage_BG = group_advantages(reward_BG, eps=1e-6, std="sample", baseline=baseline)  # type: ignore[arg-type]
        assert advantage_BG[:2].tolist() == [[0.0] * 3] * 2
        assert advantage_BG[2, 2] == 0.0 and advantage_BG[2, 0] == -advantage_BG[2, 1] != 0.0


def test_group_std_is_two_pass() -> None:
    # E[x^2] - E[x]^2 in fp32 would lose all of it; by hand sqrt(((5e-6)^2 * 2) / 1) = 7.07e-6
    reward_BG = torch.tensor([[1.0, 1.00001], [1e6, 1e6 + 1e-3]], dtype=torch.float64)
    torch.testing.assert_close(
        group_std(reward_BG), torch.tensor([1e-5, 1e-3], dtype=torch.float64) / 2**0.5, rtol=1e-4, atol=0
    )


def test_rewards_are_summed_by_weight_without_those_that_are_missing() -> None:
    score_KB = torch.tensor([[1.0, 0.0, NAN, NAN], [0.5, NAN, 1.0, NAN]])
    total_B = weighted_reward(score_KB, torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(total_B, torch.tensor([1.1, 0.0, 0.2, NAN]), equal_nan=True)


def test_b12_a_reward_that_failed_leaves_its_sample_without_one() -> None:
    """One with nothing to say does not; nor does a failure that has no weight, or a word that has none give a score."""
    score_KB = torch.tensor([[1.0, INF, NAN, 1.0, NAN], [INF, -1.0, 0.5, NAN, NAN], [0.0, 0.0, 0.0, INF, 3.0]])
    total_B = weighted_reward(score_KB, torch.tensor([1.0, -2.0, 0.0]))
    torch.testing.assert_close(total_B, torch.tensor([NAN, NAN, -1.0, 1.0, NAN]), equal_nan=True)


def test_overlong_penalty_by_hand() -> None:
    length_B = torch.tensor([1, 80, 85, 90, 100, 120])
    assert overlong_penalty(length_B, limit=100, buffer=20).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(length_B, limit=100, buffer=0).tolist() == [0.0] * 6


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


def test_b10_advantages_do_not_depend_on_reward_offset_or_order() -> None:
    reward_BG = torch.tensor([[0.25, 0.5, 1.0, 0.0]])
    advantage_BG = group_advantages(reward_BG, eps=1e-6, std="sample")
    shifted_BG = group_advantages(reward_BG + 1000, eps=1e-6, std="sample")
    torch.testing.assert_close(shifted_BG, advantage_BG)
    torch.testing.assert_close(group_advantages(reward_BG.flip(1), eps=1e-6, std="sample").flip(1), advantage_BG)


def test_b7_advantages_refuse_a_group_of_one_and_an_unknown_std() -> None:
    with pytest.raises(ValueError, match=r"group_size=1 .*at least 2"):
        group_advantages(torch.ones(3, 1), eps=1e-6, std="sample")
    with pytest.raises(ValueError, match="std=population"):
        group_advantages(torch.ones(3, 2), eps=1e-6, std="population")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="baseline=median"):
        group_advantages(torch.ones(3, 2), eps=1e-6, std="none", baseline="median")  # type: ignore[arg-type]
