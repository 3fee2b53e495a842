"""The mergers' arithmetic: elementwise on tensors of one shape, so any shard may be merged on its own."""

import torch


def ema(m: torch.Tensor, g: torch.Tensor, beta: float) -> torch.Tensor:
    """beta m + (1 - beta) g."""
    return beta * m + (1.0 - beta) * g


def signed_ema(g_comp: torch.Tensor, m: torch.Tensor, alpha: float, fade: float = 1.0) -> torch.Tensor:
    """(1 - w) g + w |g| sign(m), w = (1 - alpha) fade: the size of the fast gradient, partly with the anchor's signs.

    ``fade`` in 0..1 is what is left of the anchor's weight; 1 gives the source's rule bit for bit, alpha g +
    (1 - alpha) |g| sign(m). sign(0) is 0, so where m is exactly 0 the result is (1 - w) g.
    Where the signs differ it is (1 - 2w) g: up to w = 1/2 no sign is flipped, such elements are only damped.
    """
    own = alpha + (1.0 - alpha) * (1.0 - fade)
    return own * g_comp + (1.0 - alpha) * fade * g_comp.abs() * m.sign()


def delayed_ef(g_comp: torch.Tensor, correction: torch.Tensor, lam: float) -> torch.Tensor:
    """g + lam correction, where the correction is the anchor's gradient minus the fast one it repeats."""
    return g_comp + lam * correction


def agreeing(m: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Where the signs of both are equal and not 0: bool, of their shape."""
    return (m.sign() == mean.sign()) & (m != 0)


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
