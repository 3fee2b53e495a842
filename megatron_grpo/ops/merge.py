"""The mergers' arithmetic: elementwise on tensors of one shape, so any shard may be merged on its own."""

import torch


def ema(m: torch.Tensor, g: torch.Tensor, beta: float) -> torch.Tensor:
    """beta m + (1 - beta) g."""
    return beta * m + (1.0 - beta) * g


def signed_ema(g_comp: torch.Tensor, m: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha g + (1 - alpha) |g| sign(m): the size of the fast gradient, partly with the anchor's signs.

    sign(0) is 0, so where m is exactly 0 the result is alpha g.
    """
    return alpha * g_comp + (1.0 - alpha) * g_comp.abs() * m.sign()


def delayed_ef(g_comp: torch.Tensor, correction: torch.Tensor, lam: float) -> torch.Tensor:
    """g + lam correction, where the correction is the anchor's gradient minus the fast one it repeats."""
    return g_comp + lam * correction


def agreement_sums(g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """sum(g m), sum(g g), sum(m m), elements of equal sign, elements compared: fp64 ``[5]``.

    They add up over shards. Only elements where neither is 0 are compared for sign. The cosine is
    [0] / sqrt([1] [2]), the agreement [3] / [4].
    """
    g, m = g.double(), m.double()
    compared = (g != 0) & (m != 0)
    equal = compared & (g.sign() == m.sign())
    sums = [(g * m).sum(), g.square().sum(), m.square().sum(), equal.sum().double(), compared.sum().double()]
    return torch.stack(sums)
