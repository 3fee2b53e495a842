"""What a linear Gaussian codec could reach at the same bits: reverse water-filling with the Gaussian test channel.

Rows are scaled to norm 1, and their mean and a ridge prediction from token embedding and previous row are taken off.
What is left is coded in its eigenbasis: a channel of variance v gets half log2(v / theta) bits and an error of theta
(Cover and Thomas 2006, 10.3.3), which noise of that size stands for. The previous row is the true one, not the decoded
one: a limit may be generous. Legend: N rows, H hidden, C context, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from megatron_grpo.ops.rows import Rows

HUGE = 6.0
"""Rows whose norm exceeds so many medians pass unchanged and free: a limit may be generous."""
SCALE_BITS = 16
"""Of a row's norm; it passes exactly."""
PRIOR_ROWS = 800
"""The ridge, as so many rows of a mean context; a few hundred to a few thousand were equally good."""
_BISECTIONS = 80


def water_level(variance_H: torch.Tensor, bits: float) -> float:
    """theta with sum over channels of max(0, half log2(variance / theta)) = ``bits``; fp64."""
    low, high = -200.0, variance_H.double().clamp(min=1e-60).log2().max().item()
    log_H = variance_H.double().clamp(min=1e-60).log2()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if ((log_H - middle).clamp(min=0.0).sum() / 2).item() > bits:
            low = middle
        else:
            high = middle
    return float(2.0**high)


def gaussian_channel(
    u_NH: torch.Tensor, variance_H: torch.Tensor, theta: float, generator: torch.Generator
) -> torch.Tensor:
    """Coordinates as an ideal code would give them back: mean squared error min(theta, variance) in each channel."""
    kept_H = (1.0 - theta / variance_H.clamp(min=1e-30)).clamp(min=0.0)
    noise_NH = torch.randn(u_NH.shape, generator=generator).to(u_NH)
    return kept_H * u_NH + (theta * kept_H).sqrt() * noise_NH


def context_rows(unit_NH: torch.Tensor, rows: Rows, embedding_VH: torch.Tensor) -> torch.Tensor:
    """What both ends know of each row, ``[N, C]``: its token's embedding and the row before it, of norm 1; C = 2 H."""
    assert rows.tokens_N is not None
    before_N = rows.previous()
    previous_NH = torch.where(before_N[:, None] < 0, 0.0, unit_NH[before_N])
    return torch.cat([normalize(embedding_VH[rows.tokens_N], dim=-1), previous_NH], dim=1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Linear, from what both ends know of a row: ``(context - context_mean_C) @ weight_CH``."""

    embedding_VH: torch.Tensor
    weight_CH: torch.Tensor
    context_mean_C: torch.Tensor

    def of(self, unit_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        return (context_rows(unit_NH, rows, self.embedding_VH) - self.context_mean_C) @ self.weight_CH


def fit_ridge(target_NH: torch.Tensor, context_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ridge regression, in fp64, of targets of mean 0: weights ``[C, H]`` and the mean context ``[C]``, fp32."""
    context_NC = context_NC.double()
    mean_C = context_NC.mean(dim=0)
    context_NC = context_NC - mean_C
    gram_CC = context_NC.T @ context_NC
    gram_CC.diagonal().add_(PRIOR_ROWS * gram_CC.diagonal().mean() / len(context_NC))
    weight_CH = torch.linalg.solve(gram_CC, context_NC.T @ target_NH.double())
    return weight_CH.float(), mean_C.float()


@dataclass(frozen=True, slots=True)
class LinearLimit:
    """The fitted codec of one boundary.

    Attributes:
        prediction: of what is left after the mean; ``None`` without one.
        variance_H: of what is left then, along the columns of ``basis_HH``.
        huge: norm from which a row passes unchanged.
    """

    mean_H: torch.Tensor
    prediction: Prediction | None
    basis_HH: torch.Tensor
    variance_H: torch.Tensor
    huge: float

    def code(self, x_NH: torch.Tensor, rows: Rows, share: float, generator: torch.Generator) -> torch.Tensor:
        """The rows as they would arrive at ``share`` of the bits of a bfloat16 crossing."""
        bits = max(share * 16 * x_NH.shape[1] - SCALE_BITS, 0.0)
        norm_N1 = x_NH.norm(dim=-1, keepdim=True)
        unit_NH = normalize(x_NH, dim=-1)
        known_NH = self.mean_H + (0.0 if self.prediction is None else self.prediction.of(unit_NH, rows))
        theta = water_level(self.variance_H, bits)
        left_NH = gaussian_channel((unit_NH - known_NH) @ self.basis_HH, self.variance_H, theta, generator)
        coded_NH = (known_NH + left_NH @ self.basis_HH.T) * norm_N1
        return torch.where(norm_N1 > self.huge, x_NH, coded_NH)


def fit_limit(parts: list[tuple[torch.Tensor, Rows]], embedding_VH: torch.Tensor | None) -> LinearLimit:
    """Fit on rows seen; ``embedding_VH`` given: with a prediction from it and from the row before."""
    x_NH = torch.cat([part_NH for part_NH, _ in parts])
    norm_N = x_NH.norm(dim=-1)
    huge = HUGE * norm_N.median().item()
    usual_N = norm_N <= huge
    unit_NH = normalize(x_NH, dim=-1)[usual_N]
    mean_H = unit_NH.mean(dim=0)
    left_NH, prediction = unit_NH - mean_H, None
    if embedding_VH is not None:
        contexts = [context_rows(normalize(part_NH, dim=-1), rows, embedding_VH) for part_NH, rows in parts]
        context_NC = torch.cat(contexts)[usual_N]
        halves_N = torch.cat([rows.sequences_N * 2 >= rows.batch for _, rows in parts])[usual_N]
        prediction = Prediction(embedding_VH, *fit_ridge(left_NH, context_NC))
        left_NH = _left_over(left_NH, context_NC, halves_N)
    left_NH = left_NH.double()
    variance_H, basis_HH = torch.linalg.eigh(left_NH.T @ left_NH / len(left_NH))
    return LinearLimit(mean_H, prediction, basis_HH.float(), variance_H.clamp(min=0.0).float(), huge)


def _left_over(target_NH: torch.Tensor, context_NC: torch.Tensor, halves_N: torch.Tensor) -> torch.Tensor:
    """What a prediction leaves over of rows it was not fitted on: each half under the fit on the other."""
    left_NH = target_NH.clone()
    for tested_N in (halves_N, ~halves_N):
        weight_CH, mean_C = fit_ridge(target_NH[~tested_N], context_NC[~tested_N])
        left_NH[tested_N] -= (context_NC[tested_N] - mean_C) @ weight_CH
    return left_NH
