"""GRPO's numbers: advantages of a group, clipped surrogate, KL, importance weights, aggregation.

Legend: B sequences (groups in ``group_advantages``), G group, R response. All maths is fp32 unless said. A
mask is bool or 0/1 numbers; what stands at a masked position, inf and NaN included, reaches neither a result
nor a gradient.
"""

from typing import Literal

import torch

DEAD_GROUP_STD = 1e-6
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def dead_groups(reward_BG: torch.Tensor) -> torch.Tensor:
    """Bool ``[B]``: groups without a difference to learn from, of sample std <= 1e-6 in float64."""
    return reward_BG.double().std(dim=-1, correction=1) <= DEAD_GROUP_STD


def group_advantages(reward_BG: torch.Tensor, *, eps: float, std: Literal["sample", "none"]) -> torch.Tensor:
    """(reward - mean) / (std + eps) within each group, fp32 ``[B, G]``.

    Shao et al. 2024; std "none" leaves out the division (Liu et al. 2025). Computed in float64 with the
    sample standard deviation (ddof 1). A dead group (see :func:`dead_groups`)
    gets exactly 0: it stays in the batch, counts in the denominators and adds no policy gradient.

    Raises:
        ValueError: a group of fewer than 2, or an unknown ``std``.
    """
    if reward_BG.shape[-1] < 2:
        raise ValueError(f"group_size={reward_BG.shape[-1]} gives no advantage; use at least 2")
    reward_BG = reward_BG.double()
    centred_BG = reward_BG - reward_BG.mean(dim=-1, keepdim=True)
    if std == "sample":
        centred_BG = centred_BG / (reward_BG.std(dim=-1, correction=1, keepdim=True) + eps)
    elif std != "none":
        raise ValueError(f"std={std} is unknown; use sample or none")
    return centred_BG.masked_fill(dead_groups(reward_BG)[:, None], 0.0).float()


def policy_loss(
    logp_BR: torch.Tensor,
    old_logp_BR: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    log_ratio_clamp: float,
    weight_BR: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate of PPO (Schulman et al. 2017) with separate ranges and dual clip (Ye et al. 2020).

    loss = max(-ratio A, -clip(ratio, 1 - low, 1 + high) A), for A < 0 at most -dual_clip A;
    ratio = exp(clamp(logp - old_logp, +-log_ratio_clamp)). ``dual_clip`` ``None`` sets no bound.

    Args:
        weight_BR: constant factor of each token, ``None`` for 1.

    Returns:
        Loss fp32 ``[B, R]``, 0 where masked, and bool ``[B, R]``: unmasked tokens where either clip is in
        force, so that the token has no gradient.
    """
    mask_BR = mask_BR.bool()
    log_ratio_BR = torch.where(mask_BR, logp_BR.float() - old_logp_BR.float(), 0.0)
    ratio_BR = log_ratio_BR.clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    advantage_B1 = advantage_B.float()[:, None]
    plain_BR = -ratio_BR * advantage_B1
    bounded_BR = -ratio_BR.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_B1
    clipped_BR = bounded_BR > plain_BR
    loss_BR = torch.where(clipped_BR, bounded_BR, plain_BR)
    if dual_clip is not None:
        ceiling_B1 = -dual_clip * advantage_B1
        above_BR = (advantage_B1 < 0) & (loss_BR > ceiling_B1)
        loss_BR = torch.where(above_BR, ceiling_B1, loss_BR)
        clipped_BR = clipped_BR | above_BR
    if weight_BR is not None:
        loss_BR = loss_BR * weight_BR.detach().float()
    return torch.where(mask_BR, loss_BR, 0.0), clipped_BR & mask_BR


def k3_kl(logp_BR: torch.Tensor, ref_logp_BR: torch.Tensor, mask_BR: torch.Tensor | None = None) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy, reference): exp(d) - d - 1 with d = ref_logp - logp, fp32.

    With a mask it is 0 where masked, forward and backward. Without one an infinite d gives NaN gradients.
    """
    difference_BR = ref_logp_BR.float() - logp_BR.float()
    if mask_BR is not None:
        difference_BR = torch.where(mask_BR.bool(), difference_BR, 0.0)
    return torch.expm1(difference_BR) - difference_BR


def importance_weight(logp_trainer_BR: torch.Tensor, logp_sampler_BR: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance weight min(exp(logp_trainer - logp_sampler), cap), fp32, without gradient."""
    difference_BR = logp_trainer_BR.detach().float() - logp_sampler_BR.detach().float()
    return difference_BR.exp().clamp(max=cap)


def aggregate(
    per_token_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    how: Aggregation,
    tokens: int | float | torch.Tensor,
    sequences: int | float | torch.Tensor,
    max_response: int,
) -> torch.Tensor:
    """This micro-batch's share of the loss, an fp32 scalar.

    The shares of all micro-batches and ranks add up to the loss, however they are cut. token_mean: sum /
    tokens. sequence_mean: sum over sequences of the mean over their tokens, / sequences (a sequence without
    tokens adds 0). fixed_length: sum / (sequences * max_response).

    Args:
        tokens, sequences: counts over the whole minibatch and all ranks; 0 is taken as 1.

    Raises:
        ValueError: an unknown ``how``.
    """
    mask_BR = mask_BR.bool()
    kept_BR = torch.where(mask_BR, per_token_BR.float(), 0.0)
    if how == "token_mean":
        return kept_BR.sum() / _at_least_one(tokens, kept_BR)
    if how == "sequence_mean":
        means_B = kept_BR.sum(dim=-1) / mask_BR.sum(dim=-1).clamp(min=1)
        return means_B.sum() / _at_least_one(sequences, kept_BR)
    if how == "fixed_length":
        return kept_BR.sum() / (_at_least_one(sequences, kept_BR) * max_response)
    raise ValueError(f"how={how} is unknown; use token_mean, sequence_mean or fixed_length")


def _at_least_one(count: int | float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float32, device=like.device).clamp(min=1.0)
