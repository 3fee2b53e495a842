"""Rows coded without a basis: bits go to the tokens that carry the energy.

A row is rotated, so that its coordinates look Gaussian whatever the row was, scaled by its rms, and every coordinate
gets the same number of bits, 0 to 8, in the end half log2(energy / theta): reverse water-filling over the tokens of a
micro-batch. Rows at 0 bits are not sent and decode to zeros.

The payload is one uint8 vector whose size both ends know: the largest rms in fp32 (4 bytes); one bit a row, whether it
is sent; of each row sent, how far its rms lies below the largest; the codes, rows of equal bits together; zeros up to
the size. How many bits a row has follows from the rms of all, which both ends know: no bits are spent on saying so. A
payload that starts with four bytes 255 (or holds nothing else) says that the rows were not finite.

Legend: N rows, A rows that are sent, H hidden, K steps of the rms, b bits.
"""

import math
from collections.abc import Callable
from functools import cache

import torch

from megatron_grpo.ops.bits import CODE_BITS, pack_bits, packed_bytes, unpack_bits
from megatron_grpo.ops.lowrank import orthonormal
from megatron_grpo.ops.quantize import bit_gains, gaussian_codes, gaussian_values

_TOP_BYTES = 4
_STEP_BITS = 6
_STEPS = 2**_STEP_BITS
_STEPS_PER_OCTAVE = 8
_WIDTHS = range(1, CODE_BITS + 1)
_BROKEN = 255
_LARGEST_HADAMARD = 64
_LARGEST_DENSE = 256
_CHUNK = 256


class Rotation:
    """A fixed random orthogonal map of H coordinates; equal seeds give equal maps.

    Random signs, then a Kronecker product of Hadamard matrices of at most 64 rows and, for what of H is no power of
    two, the orthogonal factor of a Gaussian matrix. If that part of H exceeds 256, one such matrix is the whole map.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._signs_H = torch.randint(0, 2, (hidden,), generator=generator).float() * 2 - 1
        power = hidden & -hidden
        odd = hidden // power
        if odd > _LARGEST_DENSE:
            power, odd = 1, hidden
        factors = []
        while power > 1:
            factors.append(hadamard(min(power, _LARGEST_HADAMARD)))
            power //= len(factors[-1])
        if odd > 1:
            factors.append(orthonormal(torch.randn(odd, odd, generator=generator)))
        self._factors = factors

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Rotated rows, fp32 ``[N, H]``."""
        return self._by_chunk(lambda x_nH: self._product(x_nH.float() * self._signs_H, transposed=False), x_NH)

    def inverse(self, y_NH: torch.Tensor) -> torch.Tensor:
        """The rows whose rotation is ``y_NH``, fp32 ``[N, H]``."""
        return self._by_chunk(lambda y_nH: self._product(y_nH.float(), transposed=True) * self._signs_H, y_NH)

    def _by_chunk(self, rotate: Callable[[torch.Tensor], torch.Tensor], x_NH: torch.Tensor) -> torch.Tensor:
        """A few rows at a time, so that what lies between the factors stays in the cache: twice as fast on a CPU."""
        self._signs_H = self._signs_H.to(x_NH.device)
        self._factors = [factor_ff.to(x_NH.device) for factor_ff in self._factors]
        out_NH = torch.empty(x_NH.shape, device=x_NH.device)
        for x_nH, out_nH in zip(torch.split(x_NH, _CHUNK), torch.split(out_NH, _CHUNK), strict=True):
            out_nH.copy_(rotate(x_nH))
        return out_NH

    def _product(self, x_NH: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """The Kronecker product, factor by factor: each acts on its own digit of the coordinate's number."""
        shape, stride = x_NH.shape, 1
        for factor_ff in self._factors:
            factor_ff = factor_ff.T if transposed else factor_ff
            digits = x_NH.reshape(-1, len(factor_ff), stride)
            # where it is one plain matrix product, einsum would not see it
            plain = stride == 1
            x_NH = digits.squeeze(-1) @ factor_ff.T if plain else torch.einsum("ij,njk->nik", factor_ff, digits)
            stride *= len(factor_ff)
        return x_NH.reshape(shape)


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal symmetric Hadamard matrix (Sylvester), fp32 ``[size, size]``; ``size`` a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def payload_bytes(rows: int, hidden: int, share: float) -> int:
    """Size of the payload: ``share`` of the rows in bf16, rounded up.

    Raises:
        ValueError: ``share`` not above 0 or above 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must be above 0 and at most 1")
    return math.ceil(rows * hidden * 2 * share)


def encode(
    x_NH: torch.Tensor, rotation: Rotation, share: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The payload of a micro-batch's rows, uint8 ``[payload_bytes]``, on their device.

    The budget is used up to less than one further bit of one row and at most 6 bytes. Where it is too small for any
    row, all decode to zeros. A number that is not finite anywhere makes every row decode to NaN.

    Args:
        share: the budget, as :func:`payload_bytes` has it.
        generator: of x's device, for stochastic rounding of the codes.
    """
    rows, hidden = x_NH.shape
    size = payload_bytes(rows, hidden, share)
    if not rows:
        return x_NH.new_empty(0, dtype=torch.uint8)
    pool = _pool(rows, size)
    low, high = x_NH.aminmax()
    peak = torch.maximum(-low, high).float()
    packed = _packed(x_NH, peak, rotation, pool, generator) if pool > 0 else x_NH.new_empty(0, dtype=torch.uint8)
    payload = torch.nn.functional.pad(packed, (0, size - len(packed)))
    return payload.masked_fill_(~peak.isfinite(), _BROKEN)


def _packed(
    x_NH: torch.Tensor, peak: torch.Tensor, rotation: Rotation, pool: int, generator: torch.Generator | None
) -> torch.Tensor:
    """The payload without its padding."""
    rms_N = torch.linalg.vector_norm(x_NH.float() / peak, dim=1) / math.sqrt(x_NH.shape[1])  # squares stay in range
    rms_N = rms_N.nan_to_num(nan=0.0)
    top = rms_N.amax()
    steps_N = (_STEPS_PER_OCTAVE * (top / rms_N).log2()).round()
    steps_N = torch.where(steps_N < _STEPS, steps_N, _STEPS).long()  # rows of zeros, also where all are, are too small
    sent_N = _rows_sent(steps_N, pool, x_NH.shape[1])
    steps_A = steps_N[sent_N]
    order_A, counts = _by_bits(steps_A, pool, x_NH.shape[1])
    rms_A = _rms(peak * top, steps_A[order_A])
    z_AH = rotation.forward(x_NH[sent_N.nonzero().squeeze(1)[order_A]].float() / rms_A[:, None])
    runs = zip(_WIDTHS, torch.split(z_AH, counts), strict=True)
    codes = [pack_bits(gaussian_codes(z_aH, bits, generator), bits) for bits, z_aH in runs if len(z_aH)]
    steps = pack_bits(steps_A.to(torch.uint8), _STEP_BITS)
    return torch.cat([(peak * top).view(1).view(torch.uint8), pack_bits(sent_N.to(torch.uint8), 1), steps, *codes])


def decode(
    payload: torch.Tensor, rows: int, hidden: int, rotation: Rotation, share: float, dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``[N, H]`` of ``dtype`` from the payload that :func:`encode` made of as many rows at the same share.

    Each row sent is its estimate of least mean square error: shrunk by the distortion of its bits.
    """
    broken = (payload[:_TOP_BYTES] == _BROKEN).all()
    out_NH = torch.empty(rows, hidden, dtype=dtype, device=payload.device).fill_(torch.where(broken, math.nan, 0.0))
    pool = _pool(rows, payload_bytes(rows, hidden, share))
    if pool > 0:
        rows_A, z_AH = _unpacked(payload.masked_fill(broken, 0), rows, hidden, pool)
        out_NH[rows_A] = rotation.inverse(z_AH).to(dtype)
    return out_NH


def _unpacked(payload: torch.Tensor, rows: int, hidden: int, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows were sent, int64 ``[A]``, and their rotated estimates, fp32 ``[A, H]``."""
    reader = _Reader(payload)
    top = reader.take(_TOP_BYTES).clone().view(torch.float32)
    rows_A = reader.codes(rows, 1).nonzero().squeeze(1)
    steps_A = reader.codes(len(rows_A), _STEP_BITS).long()
    order_A, counts = _by_bits(steps_A, pool, hidden)
    z_AH = torch.empty(len(rows_A), hidden, device=payload.device)
    for bits, z_aH in zip(_WIDTHS, torch.split(z_AH, counts), strict=True):
        if len(z_aH):
            codes = reader.codes(z_aH.numel(), bits)
            z_aH.copy_(gaussian_values(codes, bits, torch.float32).view_as(z_aH))
    return rows_A[order_A], z_AH.mul_(_rms(top, steps_A[order_A])[:, None])


class _Reader:
    """Takes one piece after the other off a payload."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._rest = payload

    def take(self, size: int) -> torch.Tensor:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def codes(self, count: int, bits: int) -> torch.Tensor:
        return unpack_bits(self.take(packed_bytes(count, bits)), count, bits)


def _rms(top: torch.Tensor, steps_A: torch.Tensor) -> torch.Tensor:
    """The rms that a row is scaled by: the largest, lowered by its steps."""
    return top * torch.exp2(steps_A / -_STEPS_PER_OCTAVE).float()


def _pool(rows: int, size: int) -> int:
    """Bits of a payload that are free for steps and codes; packing the steps may leave up to 7 of them empty."""
    return 8 * (size - _TOP_BYTES - packed_bytes(rows, 1)) - 7 * _STEP_BITS


def _bit_cost(hidden: int) -> int:
    """Bits of the payload that one further bit of a row takes, padding included."""
    return packed_bytes(hidden, 1) * 8


@cache
def _purchases(hidden: int, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Which bit to buy next: ``[K * b]`` numbers k * widths + b in the order of what the b-th bit of a row that lies k
    steps below the largest takes off the distortion for each bit it costs, and these costs.

    On the CPU, so that ends of different hardware hold the same order.

    Args:
        first: with the first bit of a row, which has the row's step to pay for as well; else from the second on.
    """
    energy_K1 = torch.exp2(torch.arange(_STEPS, dtype=torch.float64) * (-2 / _STEPS_PER_OCTAVE))[:, None]
    cost_b = torch.full((CODE_BITS,), _bit_cost(hidden))
    cost_b[0] += _STEP_BITS
    gain_Kb = energy_K1 * bit_gains(CODE_BITS) / cost_b
    if not first:
        gain_Kb, cost_b = gain_Kb[:, 1:], cost_b[1:]
    order = gain_Kb.flatten().argsort(descending=True, stable=True)
    return order, cost_b.repeat(_STEPS)[order]


def _rows_sent(steps_N: torch.Tensor, pool: int, hidden: int) -> torch.Tensor:
    """Which rows get a bit at all, bool ``[N]``; rows at ``_STEPS`` never."""
    return _spend(steps_N, pool, *_purchases(hidden, True)) > 0


def _by_bits(steps_A: torch.Tensor, pool: int, hidden: int) -> tuple[torch.Tensor, list[int]]:
    """The rows sent, by rising bits, int64 ``[A]``, and how many have 1, 2, ... bits.

    A function of what the payload says before the codes, so that both ends agree.
    """
    left = pool - len(steps_A) * (_bit_cost(hidden) + _STEP_BITS)
    bits_A = 1 + _spend(steps_A, left, *_purchases(hidden, False))
    return bits_A.argsort(stable=True), torch.bincount(bits_A, minlength=CODE_BITS + 1)[1:].tolist()


def _spend(steps_N: torch.Tensor, pool: int, order: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Share out ``pool`` bits in the order of :func:`_purchases`: how many bits each row gets, int64 ``[N]``.

    Rows of equal steps are served as one class, but for the class at which the pool runs out, where the first rows
    are served.
    """
    order, cost = order.to(steps_N.device), cost.to(steps_N.device)
    class_of = order // (len(order) // _STEPS)
    count_K = torch.bincount(steps_N, minlength=_STEPS + 1)
    need = count_K[class_of] * cost
    served = need.cumsum(0) <= pool
    bits_K = torch.zeros_like(count_K).index_add_(0, class_of, served.long())
    last = served.sum().clamp(max=len(order) - 1)
    left = torch.where(served.all(), 0, pool - (need * served).sum())
    here_N = steps_N == class_of[last]
    one_more_N: torch.Tensor = here_N & (here_N.cumsum(0) <= left // cost[last])
    return bits_K[steps_N] + one_more_N
