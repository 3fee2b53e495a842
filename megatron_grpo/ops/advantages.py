"""What a reward is worth within its group: baselines, deviations, dead groups; several rewards as one; length terms.

Legend: B sequences (groups in ``*_BG``), G group, K rewards. Statistics are two-pass and in float64. NaN is an
unscorable sample: it enters no statistic and gets the advantage 0.
"""

from typing import Literal

import torch

DEAD_GROUP_STD = 1e-6
Baseline = Literal["group", "leave_one_out"]
Std = Literal["sample", "none"]


def group_std(reward_BG: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation (ddof 1) of each group's scored samples, float64 ``[B]``; 0 of fewer than two."""
    centred_BG, count_B1 = _centred(reward_BG.double())
    return (centred_BG.square().sum(dim=-1) / (count_B1[:, 0] - 1).clamp(min=1)).sqrt()


def dead_groups(reward_BG: torch.Tensor) -> torch.Tensor:
    """Bool ``[B]``: groups without a difference to learn from, of sample std <= 1e-6 in float64."""
    return group_std(reward_BG) <= DEAD_GROUP_STD


def group_advantages(reward_BG: torch.Tensor, *, eps: float, std: Std, baseline: Baseline = "group") -> torch.Tensor:
    """(reward - baseline) / (std + eps) within each group, fp32 ``[B, G]``.

    baseline "group": mean and deviation of the whole group (GRPO, Shao et al. 2024). baseline "leave_one_out": mean
    and deviation of the *other* samples (RLOO, Ahmadian et al. 2024); where these do not differ the difference is
    left as it is, since a division would make it 1 / eps. std "none" leaves out the division for all (Dr. GRPO, Liu
    et al. 2025). A dead group (see :func:`dead_groups`) gets exactly 0.

    Raises:
        ValueError: a group of fewer than 2, an unknown ``std`` or ``baseline``.
    """
    if reward_BG.shape[-1] < 2:
        raise ValueError(f"group_size={reward_BG.shape[-1]} gives no advantage; use at least 2")
    if std not in ("sample", "none"):
        raise ValueError(f"std={std} is unknown; use sample or none")
    reward_BG = reward_BG.double()
    if baseline == "group":
        advantage_BG, _ = _centred(reward_BG)
        if std == "sample":
            advantage_BG = advantage_BG / (group_std(reward_BG)[:, None] + eps)
    elif baseline == "leave_one_out":
        advantage_BG = _leave_one_out(reward_BG, eps=eps, scaled=std == "sample")
    else:
        raise ValueError(f"baseline={baseline} is unknown; use group or leave_one_out")
    return advantage_BG.masked_fill(dead_groups(reward_BG)[:, None], 0.0).float()


def _centred(reward_BG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """reward - mean of the scored samples (0 where unscored), and how many ``[B, 1]`` these are."""
    scored_BG = ~reward_BG.isnan()
    count_B1 = scored_BG.sum(dim=-1, keepdim=True)
    mean_B1 = torch.where(scored_BG, reward_BG, 0.0).sum(dim=-1, keepdim=True) / count_B1.clamp(min=1)
    return torch.where(scored_BG, reward_BG - mean_B1, 0.0), count_B1


def _leave_one_out(reward_BG: torch.Tensor, *, eps: float, scaled: bool) -> torch.Tensor:
    """Each sample against the others of its group: ``[B, G, G]`` with the sample itself made unscored."""
    group = reward_BG.shape[-1]
    own_GG = torch.eye(group, dtype=torch.bool, device=reward_BG.device)
    others_BGG = reward_BG[:, None, :].expand(-1, group, -1).masked_fill(own_GG, torch.nan)
    scored_BGG = ~others_BGG.isnan()
    mean_BG = torch.where(scored_BGG, others_BGG, 0.0).sum(dim=-1) / scored_BGG.sum(dim=-1).clamp(min=1)
    difference_BG = torch.where(reward_BG.isnan(), 0.0, reward_BG - mean_BG)
    if not scaled:
        return difference_BG
    std_BG = group_std(others_BGG.flatten(0, 1)).view_as(reward_BG)
    return difference_BG / torch.where(std_BG <= DEAD_GROUP_STD, 1.0, std_BG + eps)


def weighted_reward(score_KB: torch.Tensor, weight_K: torch.Tensor) -> torch.Tensor:
    """Sum over K rewards of weight x score ``[B]``; a reward that has nothing to say of a sample (NaN) adds nothing.

    NaN where none of weight says anything, or where one of weight could not score the sample (infinity).
    """
    said_KB = score_KB[weight_K != 0]
    total_B = (weight_K[weight_K != 0][:, None] * said_KB).nansum(dim=0)
    return total_B.masked_fill(said_KB.isinf().any(dim=0) | said_KB.isnan().all(dim=0), torch.nan)


def overlong_penalty(length_B: torch.Tensor, *, limit: int, buffer: int) -> torch.Tensor:
    """Soft overlong punishment, fp32 ``[B]`` in [-1, 0] (DAPO, Yu et al. 2025, equation 13).

    0 up to ``limit - buffer`` tokens, then linear down to -1 at ``limit``, and -1 beyond; 0 for a buffer of 0.
    """
    if buffer == 0:
        return torch.zeros(len(length_B), device=length_B.device)
    return ((limit - buffer - length_B.float()) / buffer).clamp(-1.0, 0.0)
