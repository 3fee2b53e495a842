"""Scalar quantisers: Lloyd-Max for Gaussian numbers, bits shared out by variance, and a symmetric one per row.

Codes are uint8 and fit into their number of bits, whatever the input; numbers that are not finite must be dealt with
by the caller (:func:`absmax_codes` says what it does). Legend: N rows, C channels, L levels = 2**bits.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from megatron_grpo.ops.bits import CODE_BITS

_SWEEPS = 500
_REACH = 6.0
_CELLS = 16384


@dataclass(frozen=True, slots=True, eq=False)
class LloydMax:
    """The best quantiser of a standard normal number, in fp64 on the CPU.

    Attributes:
        levels_L: ascending; each is the mean of the numbers that it stands for.
        edges: ``[L - 1]``, midway between neighbouring levels.
        distortion: mean square error of a standard normal number.
    """

    levels_L: torch.Tensor
    edges: torch.Tensor
    distortion: float


@cache
def lloyd_max(bits: int) -> LloydMax:
    """Lloyd's iteration from the companding start (Max 1960, Lloyd 1982); computed once a process.

    Raises:
        ValueError: ``bits`` outside 1..8.
    """
    if not 1 <= bits <= CODE_BITS:
        raise ValueError(f"bits={bits} must be from 1 to {CODE_BITS}")
    half = 1 << (bits - 1)
    fractions = (torch.arange(half, dtype=torch.float64) + 0.5) / half
    upper = math.sqrt(6.0) * torch.erfinv(fractions)  # quantiles of variance 3: best for many levels
    for _ in range(_SWEEPS):
        edges = torch.cat([upper.new_zeros(1), (upper[1:] + upper[:-1]) / 2, upper.new_full((1,), math.inf)])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = -torch.erfc(edges / math.sqrt(2)).diff() / 2
        upper = -density.diff() / mass
    levels_L = torch.cat([-upper.flip(0), upper])
    distortion = 1.0 - 2.0 * float((mass * upper.square()).sum())
    return LloydMax(levels_L, (levels_L[1:] + levels_L[:-1]) / 2, distortion)


def gaussian_distortion(bits: int) -> float:
    """Mean square error of a standard normal number at ``bits`` bits; 1 at 0 bits."""
    return lloyd_max(bits).distortion if bits else 1.0


def gaussian_codes(z: torch.Tensor, bits: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Codes of numbers of unit variance, uint8 of z's shape, code i for the i-th level from below.

    The nearest level, found by a table of narrow cells, since a search costs ten times as much: numbers within
    4e-4 of an edge may go either way. NaN gets some valid code.

    Args:
        generator: of z's device, for stochastic rounding: the mean over draws is z between the outermost levels.

    Raises:
        ValueError: ``bits`` outside 1..8.
    """
    if generator is None:
        return _look_up(z, _cells(bits, False, z.device))
    lower = _look_up(z, _cells(bits, True, z.device))
    levels_L = _levels(bits, torch.float32, z.device)
    below, above = (_pick(levels_L, codes) for codes in (lower, lower + 1))
    draws = torch.rand(z.shape, generator=generator, device=z.device)
    return lower + (draws * (above - below) < z.float() - below).to(torch.uint8)


def gaussian_values(codes: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The levels that codes stand for, of ``dtype`` and the codes' shape. As estimates they are the best in the mean
    square, and so shrunk: their mean square is 1 - distortion."""
    return _pick(_levels(bits, dtype, codes.device), codes)


def mixed_codes(z_NC: torch.Tensor, bits_C: torch.Tensor) -> torch.Tensor:
    """:func:`gaussian_codes` where each channel has bits of its own: uint8 ``[N, C]``.

    Args:
        bits_C: int32, each from 1 to 8.
    """
    table = _all_cells(z_NC.device)
    return _pick(table, _cell(z_NC).to(torch.int32).add_((bits_C - 1) * _CELLS))


def mixed_values(codes_NC: torch.Tensor, bits_C: torch.Tensor) -> torch.Tensor:
    """:func:`gaussian_values` of :func:`mixed_codes`, fp32."""
    return _pick(_all_levels(codes_NC.device), codes_NC + ((bits_C - 1) << CODE_BITS))


def _look_up(z: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _pick(table, _cell(z))


def _cell(z: torch.Tensor) -> torch.Tensor:
    """The narrow cell that a number lies in, as a float."""
    cell = z.float() * (_CELLS / (2 * _REACH))
    return cell.add_(_CELLS / 2).nan_to_num_(nan=0.0).clamp_(0, _CELLS - 1)


def _pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]``; int32 indices are the fastest."""
    return table.index_select(0, index.to(torch.int32).flatten()).view(index.shape)


@cache
def _levels(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return lloyd_max(bits).levels_L.to(device=device, dtype=dtype)


@cache
def _cells(bits: int, lower: bool, device: torch.device) -> torch.Tensor:
    """uint8 ``[_CELLS]``: the code for each cell of ``[-_REACH, _REACH)``, by nearest level or by the level below
    (the last but one at most)."""
    middles = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) * (2 * _REACH / _CELLS) - _REACH
    quantiser = lloyd_max(bits)
    edges = quantiser.levels_L[1:-1] if lower else quantiser.edges
    return torch.bucketize(middles, edges).to(device=device, dtype=torch.uint8)


@cache
def _all_cells(device: torch.device) -> torch.Tensor:
    """:func:`_cells` of 1 to 8 bits, one after the other."""
    return torch.cat([_cells(bits, False, device) for bits in range(1, CODE_BITS + 1)])


@cache
def _all_levels(device: torch.device) -> torch.Tensor:
    """The levels of 1 to 8 bits, each in a room of 256."""
    rooms = [_levels(bits, torch.float32, device) for bits in range(1, CODE_BITS + 1)]
    return torch.cat([torch.nn.functional.pad(levels_L, (0, 2**CODE_BITS - len(levels_L))) for levels_L in rooms])


def bit_gains(max_bits: int) -> torch.Tensor:
    """What each further bit takes off the distortion of unit variance, D(b) - D(b + 1): fp64, falling, on the CPU."""
    curve = [gaussian_distortion(bits) for bits in range(max_bits + 1)]
    return -torch.tensor(curve, dtype=torch.float64).diff()


def allocate_bits(variance_C: torch.Tensor, budget: int, max_bits: int = CODE_BITS) -> torch.Tensor:
    """Bits of each channel, int64 ``[C]``, with the least total distortion: reverse water-filling in whole bits.

    Greedy, which is exact because each further bit of a channel gains less than the one before: the next bit goes to
    the channel whose distortion falls most, among equals to the first. Channels of variance 0 (or of none, NaN) get
    bits only when no other can take more.

    Args:
        budget: bits of a row; the sum is min(budget, max_bits * C).

    Raises:
        ValueError: ``max_bits`` outside 1..8, or a negative ``budget``.
    """
    if not 1 <= max_bits <= CODE_BITS:
        raise ValueError(f"max_bits={max_bits} must be from 1 to {CODE_BITS}")
    if budget < 0:
        raise ValueError(f"budget={budget} must be at least 0")
    variance_C1 = variance_C.double().nan_to_num(nan=0.0).clamp(min=0.0)[:, None]
    gain_Cb = variance_C1 * bit_gains(max_bits).to(variance_C.device)
    best = gain_Cb.flatten().argsort(descending=True, stable=True)[:budget]
    return torch.bincount(best // max_bits, minlength=len(variance_C))


def absmax_codes(
    z_NC: torch.Tensor, bits: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes under a scale of each row's own: codes uint8 ``[N, C]``, scale fp32 ``[N]``.

    Level q = round(z / scale) from -top to top, top = 2**(bits - 1) - 1, coded as q + top; the scale, one level's
    height, is the row's largest magnitude over top. A row with a number that is not finite decodes to NaN throughout.

    Args:
        bits: 2 to 8.
        generator: of z's device, for stochastic rounding: the mean over draws is z.

    Raises:
        ValueError: ``bits`` outside 2..8.
    """
    top = _top_level(bits)
    z_NC = z_NC.float()
    scale_N = z_NC.abs().amax(dim=-1) / top
    level_NC = z_NC / scale_N[:, None]
    if generator is None:
        level_NC = level_NC.round_()
    else:
        level_NC = level_NC.add_(torch.rand(z_NC.shape, generator=generator, device=z_NC.device)).floor_()
    level_NC = level_NC.nan_to_num_(nan=0.0).clamp_(-top, top)  # 0 / 0 in a row of zeros, too
    return level_NC.add_(top).to(torch.uint8), scale_N


def absmax_values(codes_NC: torch.Tensor, scale_N: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`absmax_codes` up to rounding, fp32 ``[N, C]``.

    Raises:
        ValueError: ``bits`` outside 2..8.
    """
    return (codes_NC.float() - _top_level(bits)) * scale_N.float()[:, None]


def _top_level(bits: int) -> int:
    if not 2 <= bits <= CODE_BITS:
        raise ValueError(f"bits={bits} must be from 2 to {CODE_BITS}: one bit leaves no level but zero")
    return (1 << (bits - 1)) - 1
