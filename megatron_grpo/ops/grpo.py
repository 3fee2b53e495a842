"""GRPO's loss, token by token: surrogates, KL, importance weights, aggregation. Advantages are in ``ops.advantages``.

Legend: B sequences, R response. All maths is fp32. A mask is bool or 0/1 numbers; what stands at a masked
position, inf and NaN included, reaches neither a result nor a gradient.
"""

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Estimator = Literal["k1", "k2", "k3"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


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
    ratio = exp(clamp(logp - old_logp, +-log_ratio_clamp)). ``dual_clip`` ``None`` sets no bound. A ``clip_high``
    above ``clip_low`` is DAPO's clip-higher (Yu et al. 2025).

    Args:
        weight_BR: constant factor of each token, ``None`` for 1.

    Returns:
        Loss fp32 ``[B, R]``, 0 where masked, and bool ``[B, R]``: unmasked tokens where either clip is in
        force, so that the token has no gradient.
    """
    mask_BR = mask_BR.bool()
    ratio_BR = _log_ratio(logp_BR, old_logp_BR, mask_BR).clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    loss_BR, clipped_BR = _surrogate(ratio_BR, advantage_B, clip_low, clip_high, dual_clip)
    return _finish(loss_BR, clipped_BR, mask_BR, weight_BR)


def gspo_loss(
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
    """The surrogate of :func:`policy_loss` under one ratio for a whole sequence (GSPO, Zheng et al. 2025).

    ratio = exp(mean over the sequence's tokens of logp - old_logp), the same at each of them, so that
    ``aggregate(how="sequence_mean")`` gives the paper's mean over sequences. Arguments and results are those of
    :func:`policy_loss`.
    """
    mask_BR = mask_BR.bool()
    log_ratio_BR = _log_ratio(logp_BR, old_logp_BR, mask_BR)
    mean_B1 = log_ratio_BR.sum(dim=-1, keepdim=True) / mask_BR.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio_BR = mean_B1.clamp(-log_ratio_clamp, log_ratio_clamp).exp().expand_as(log_ratio_BR)
    loss_BR, clipped_BR = _surrogate(ratio_BR, advantage_B, clip_low, clip_high, dual_clip)
    return _finish(loss_BR, clipped_BR, mask_BR, weight_BR)


def cispo_loss(
    logp_BR: torch.Tensor,
    old_logp_BR: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    clip_high: float,
    log_ratio_clamp: float,
    weight_BR: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss = -min(ratio, 1 + clip_high) A logp, no gradient through the ratio (CISPO, MiniMax-M1, 2025).

    The paper sets no lower bound. A bounded token keeps its gradient, at the bound's weight.

    Returns:
        Loss fp32 ``[B, R]``, 0 where masked, and bool ``[B, R]``: unmasked tokens whose ratio is bounded.
    """
    mask_BR = mask_BR.bool()
    log_ratio_BR = _log_ratio(logp_BR, old_logp_BR, mask_BR).detach()
    ratio_BR = log_ratio_BR.clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    kept_BR = torch.where(mask_BR, logp_BR.float(), 0.0)
    loss_BR = -ratio_BR.clamp(max=1.0 + clip_high) * advantage_B.float()[:, None] * kept_BR
    return _finish(loss_BR, ratio_BR > 1.0 + clip_high, mask_BR, weight_BR)


def _log_ratio(logp_BR: torch.Tensor, old_logp_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_BR, logp_BR.float() - old_logp_BR.float(), 0.0)


def _surrogate(
    ratio_BR: torch.Tensor, advantage_B: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss of given ratios, and where a clip holds it."""
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
    return loss_BR, clipped_BR


def _finish(
    loss_BR: torch.Tensor, clipped_BR: torch.Tensor, mask_BR: torch.Tensor, weight_BR: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if weight_BR is not None:
        loss_BR = loss_BR * weight_BR.detach().float()
    return torch.where(mask_BR, loss_BR, 0.0), clipped_BR & mask_BR


def kl_estimate(
    logp_BR: torch.Tensor,
    ref_logp_BR: torch.Tensor,
    mask_BR: torch.Tensor | None = None,
    *,
    estimator: Estimator = "k3",
) -> torch.Tensor:
    """Schulman's estimates (2020) of KL(policy, reference) at sampled tokens, fp32; d = ref_logp - logp.

    k1 = -d: unbiased, may be negative; its gradient is zero on average, so as a loss it only adds noise. k2 = d^2 / 2:
    biased, but its gradient is that of the KL. k3 = exp(d) - d - 1: unbiased and never negative.

    With a mask it is 0 where masked, forward and backward. Without one an infinite d gives NaN gradients.

    Raises:
        ValueError: an unknown ``estimator``.
    """
    difference_BR = ref_logp_BR.float() - logp_BR.float()
    if mask_BR is not None:
        difference_BR = torch.where(mask_BR.bool(), difference_BR, 0.0)
    if estimator == "k1":
        return -difference_BR
    if estimator == "k2":
        return difference_BR.square() / 2
    if estimator == "k3":
        return torch.expm1(difference_BR) - difference_BR
    raise ValueError(f"estimator={estimator} is unknown; use k1, k2 or k3")


def importance_weight(
    logp_trainer_BR: torch.Tensor,
    logp_sampler_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    how: Correction,
    cap: float,
    floor: float = 0.0,
) -> torch.Tensor:
    """Weight of each token for what was sampled by another policy than is trained, fp32 ``[B, R]``, no gradient.

    w = exp(logp_trainer - logp_sampler) of a token, or with ``sequence_*`` the product over its sequence.
    ``*_truncate``: clamp(w, floor, cap) (Ionides 2008; Yao et al. 2025). ``*_mask``: w, but 0 outside [floor, cap]
    (IcePop, Ling team 2025; Liu et al. 2025).
    """
    difference_BR = logp_trainer_BR.detach().float() - logp_sampler_BR.detach().float()
    difference_BR = torch.where(mask_BR.bool(), difference_BR, 0.0)
    if how.startswith("sequence"):
        difference_BR = difference_BR.sum(dim=-1, keepdim=True).expand_as(difference_BR)
    weight_BR = difference_BR.exp()
    if how.endswith("truncate"):
        return weight_BR.clamp(floor, cap)
    return weight_BR.masked_fill((weight_BR < floor) | (weight_BR > cap), 0.0)


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
    tokens (DAPO, Yu et al. 2025). sequence_mean: sum over sequences of the mean over their tokens, / sequences (GRPO,
    Shao et al. 2024; a sequence without tokens adds 0). sequence_sum: sum / sequences. fixed_length: sum /
    (sequences * max_response) (Dr. GRPO, Liu et al. 2025).

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
    if how == "sequence_sum":
        return kept_BR.sum() / _at_least_one(sequences, kept_BR)
    if how == "fixed_length":
        return kept_BR.sum() / (_at_least_one(sequences, kept_BR) * max_response)
    raise ValueError(f"how={how} is unknown; use token_mean, sequence_mean, sequence_sum or fixed_length")


def _at_least_one(count: int | float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float32, device=like.device).clamp(min=1.0)
