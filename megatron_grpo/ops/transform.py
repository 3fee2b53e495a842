"""Transform coding of boundary rows: divide by the norm, predict, rotate, scale by the spread, quantise.

Both ends hold a :class:`TransformFit`; of the data only a row's own numbers are used, so a row codes alike wherever and
with whatever others it crosses, and takes :attr:`Spec.row_bits` whatever it holds. With unit row u (mean square 1):

    u ~ predicted + gain * V (spread * level),   predicted = W^T [1, huge, context]

W is a ridge regression on what both ends know of the row (:class:`Moments` says what that may be). V and the spread
are the eigenvectors and standard deviations of what it leaves over; bits go to the channels by reverse water-filling.

Which errors matter, the rows do not say: a small channel may decide the next token. The gradients of the loss with
respect to the rows do. With their second moment G (a share of it flat, :data:`FLAT_SHARE`) an error e counts as
e^T G e, which for small errors is what it adds to the loss's curvature (the Fisher metric, where the loss is the
log-prob of what was sampled). So rows are analysed by E = G^(1/2) U and rebuilt by V = G^(-1/2) U, with U and the
spread from G^(1/2) R G^(1/2), R the covariance of what is left over. Without gradients G is the identity and E is V.

Two bytes a row carry the norm and the gain, the residual's rms in units of its spread. The gain matters: what is left
over differs by token, and without a scale of its own the quantiser's range fits few of them.

A few tokens have norms far above all others, and one direction in common. They are told by the transmitted norm, have
a mean of their own (the flag ``huge``), and no part in the regression on the context.

Where the row before in its sequence is part of what is known, rows are coded column by column: it is known as decoded.

Legend: N rows, H hidden, C numbers of context, F = 2 + C features, D = F + H, K kept channels, A of them with bits.
"""

import math
from dataclasses import dataclass

import torch

from megatron_grpo.ops.bits import CODE_BITS, pack_bits, packed_bytes, unpack_bits
from megatron_grpo.ops.lowrank import random_basis
from megatron_grpo.ops.quantize import allocate_bits, mixed_codes, mixed_values
from megatron_grpo.ops.rows import Walk

_SCALAR_BITS = 16  # 10 of the norm, 6 of the gain
_GAIN_CODES = 64
_ZERO, _BROKEN = 0, 1023  # codes of the norm that stand for a row of zeros and for one that is not finite
_HUGE = 6.0  # times the typical norm
_FLAGS = 2
_CHANNELS_PER_BIT = 0.7  # more channels than that get no bits at any budget
_RIDGE = 0.5  # times features over rows, relative to a feature's mean square
_SHRINKAGE = 0.5  # weight of a flat covariance, in rows per hidden channel
_FLOOR = 1e-8  # least variance of a channel of unit rows

FLAT_SHARE = 0.1
"""Of the metric of gradients: what one of them says of channels that it hardly touches is not to be trusted."""


@dataclass(frozen=True, slots=True)
class _Octaves:
    """Positive numbers in ``steps`` an octave; code ``middle`` is 1."""

    steps: int
    middle: int
    least: int
    most: int

    def codes(self, log2_N: torch.Tensor) -> torch.Tensor:
        """int32; NaN counts as 1."""
        codes_N = (log2_N * self.steps).round() + self.middle
        return codes_N.nan_to_num(nan=self.middle).clamp(self.least, self.most).to(torch.int32)

    def logs(self, codes_N: torch.Tensor) -> torch.Tensor:
        return (codes_N.float() - self.middle) / self.steps


# Rounding costs 4e-5 of a row's energy, and 1e-3 of what is left over of it, which is far from what quantising costs.
_NORM = _Octaves(steps=32, middle=512, least=_ZERO + 1, most=_BROKEN - 1)
_GAIN = _Octaves(steps=4, middle=40, least=0, most=_GAIN_CODES - 1)


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes of a fit and of a payload, which both ends know without any data.

    Attributes:
        hidden: H.
        context: C, 0 where nothing is known.
        chained: whether the last H numbers of the context are the row before.
        kept: K, the channels that a fit keeps.
        code_bits: bits of a row's codes, shared out over the channels.
        max_bits: most bits of a channel.
    """

    hidden: int
    context: int
    kept: int
    code_bits: int
    max_bits: int = CODE_BITS
    chained: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.kept <= self.hidden:
            raise ValueError(f"kept={self.kept} channels must be from 1 to the hidden size {self.hidden}")
        if not 1 <= self.code_bits <= self.kept * self.max_bits:
            most = self.kept * self.max_bits
            raise ValueError(f"code_bits={self.code_bits} must be from 1 to {most}, {self.max_bits} a kept channel")

    @property
    def row_bits(self) -> int:
        """Bits of a coded row."""
        return _SCALAR_BITS + self.code_bits

    @property
    def flat_size(self) -> int:
        """Numbers that cross when a fit does."""
        return 1 + self.kept + (_FLAGS + self.context + self.kept) * self.hidden

    def payload_bytes(self, rows: int) -> int:
        """Bytes of ``rows`` coded rows; :attr:`row_bits` each, rounded up once."""
        return rows * _SCALAR_BITS // 8 + packed_bytes(rows * self.code_bits, 1)


def fixed_spec(hidden: int, context: int, *, rank: int, bits: int, chained: bool = False) -> Spec:
    """``rank`` channels of ``bits`` bits each."""
    return Spec(hidden, context, rank, rank * bits, bits, chained)


def waterfill_spec(hidden: int, context: int, *, share: float, chained: bool = False) -> Spec:
    """Rows of at most ``share`` of their bytes in bf16, the bits shared out by variance.

    Raises:
        ValueError: not even one bit would be left for the codes, or more than 8 bits a channel.
    """
    code_bits = math.floor(share * 16 * hidden + 1e-6) - _SCALAR_BITS
    if code_bits < 1:
        least = (_SCALAR_BITS + 1) / (16 * hidden)
        raise ValueError(f"share={share} leaves no bits for rows of hidden size {hidden}; use at least {least:.4f}")
    kept = min(hidden, math.ceil(code_bits * _CHANNELS_PER_BIT))
    return Spec(hidden, context, kept, code_bits, chained=chained)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over rows that a fit is made from. They add up over micro-batches and data-parallel ranks.

    Context is what both ends know of a row before it crosses, ``[N, C]`` in any scale: the embedding of its token,
    the :func:`unit_rows` of the row before it in its sequence (as decoded when rows are coded; zeros before the first),
    and a flag for the first row of a sequence, which is unlike all others.

    Attributes:
        second_DD: fp32, weighted sum of the products of [1, huge, context, unit row].
        tally_4: fp64, rows, those of ordinary norm, the sum of log2 of the ordinary norms, and rows of gradients.
        gradient_HH: fp32, sum of the outer products of the loss's gradients with respect to the rows; ``None`` where
            they do not matter.
        by_energy: weigh every row by its squared norm, as it counts in the energy of rows as they are.
    """

    second_DD: torch.Tensor
    tally_4: torch.Tensor
    gradient_HH: torch.Tensor | None = None
    by_energy: bool = False

    @classmethod
    def zeros(
        cls, hidden: int, context: int, device: torch.device, *, by_energy: bool = False, by_gradients: bool = False
    ) -> "Moments":
        size = _FLAGS + context + hidden
        second_DD = torch.zeros(size, size, device=device)
        gradient_HH = torch.zeros(hidden, hidden, device=device) if by_gradients else None
        return cls(second_DD, torch.zeros(4, dtype=torch.float64, device=device), gradient_HH, by_energy)

    def add(self, x_NH: torch.Tensor, context_NC: torch.Tensor | None = None) -> None:
        """Add rows of one micro-batch. Rows of zeros and rows that are not finite are left out.

        Huge are those above six times the median norm of this call, so it should see whole sequences.
        """
        x_NH = x_NH.float()
        norm_N = torch.linalg.vector_norm(x_NH, dim=-1)
        fine_N = norm_N.isfinite() & (norm_N > 0)
        if context_NC is not None:
            fine_N = fine_N & context_NC.isfinite().all(dim=-1)
        x_NH, norm_N = x_NH[fine_N], norm_N[fine_N]
        context_NC = None if context_NC is None else context_NC[fine_N]
        if len(x_NH) == 0:
            return
        huge_N = norm_N > _HUGE * norm_N.median()
        z_ND = torch.cat([_features(huge_N, context_NC), unit_rows(x_NH)], dim=-1)
        if self.by_energy:
            z_ND *= norm_N[:, None]
        self.second_DD.add_(z_ND.T @ z_ND)
        ordinary_N = (~huge_N).double()
        self.tally_4[:3].add_(
            torch.stack([torch.ones_like(ordinary_N), ordinary_N, ordinary_N * norm_N.double().log2()]).sum(dim=1)
        )

    def add_gradients(self, grad_NH: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's rows; those of zeros and those that are not finite are left out."""
        assert self.gradient_HH is not None
        grad_NH = grad_NH.float()
        norm_N = torch.linalg.vector_norm(grad_NH, dim=-1)
        grad_NH = grad_NH[norm_N.isfinite() & (norm_N > 0)]
        self.gradient_HH.add_(grad_NH.T @ grad_NH)
        self.tally_4[3] += len(grad_NH)

    def tensors(self) -> list[torch.Tensor]:
        """The sums themselves, to be summed over ranks in place."""
        return [self.second_DD, self.tally_4, *([] if self.gradient_HH is None else [self.gradient_HH])]


@dataclass(frozen=True, slots=True, eq=False)
class TransformFit:
    """What both ends hold of one direction of a boundary, every number a bfloat16, and what only the sender has.

    Attributes:
        flat_n: all of the former as it crosses, bfloat16 ``[spec.flat_size]``; the rest is read off it, in fp32.
        log_norm: log2 of the typical norm, a scalar.
        weights_FH: W, prediction of unit rows.
        basis_HK: V, falling variance.
        analysis_HK: E, of the sender, fp32: channels of a row are its products with E. Before V is rounded, and without
            a metric, the two are one.
        spread_K: standard deviation of the channels.
        chain_HA: what the row before predicts of the sender's channels; ``None`` where rows are not chained.
        bits_A: int32, of each channel that has any.
        channels: how many channels have at least 1, 2, ... bits. Those with more bits come first.
    """

    spec: Spec
    flat_n: torch.Tensor
    log_norm: torch.Tensor
    weights_FH: torch.Tensor
    basis_HK: torch.Tensor
    analysis_HK: torch.Tensor
    spread_K: torch.Tensor
    chain_HA: torch.Tensor | None
    bits_A: torch.Tensor
    channels: tuple[int, ...]

    @property
    def active(self) -> int:
        """A, the channels that have bits at all."""
        return self.channels[0]


def unit_rows(x_NH: torch.Tensor) -> torch.Tensor:
    """Rows of mean square 1, fp32; rows of zeros stay zeros, rows that are not finite turn NaN."""
    x_NH = x_NH.float()
    norm_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True)
    scaled_NH = x_NH * (math.sqrt(x_NH.shape[-1]) / norm_N1)
    return torch.where(norm_N1 == 0, 0.0, torch.where(norm_N1.isfinite(), scaled_NH, math.nan))


def fit(moments: Moments, spec: Spec) -> TransformFit:
    """The transform that suits the rows of ``moments``; without any, some orthonormal basis. Deterministic.

    Few rows make a large ridge and a covariance drawn towards a flat one, so that nothing is ever undefined.
    """
    features = _FLAGS + spec.context
    rows, ordinary, log_sum, gradients = moments.tally_4
    total = moments.second_DD[0, 0].double()
    mean_DD = moments.second_DD.double() / torch.where(total > 0, total, 1.0)
    ff, fh, hh = mean_DD[:features, :features], mean_DD[:features, features:], mean_DD[features:, features:]
    ridge_F = ff.diagonal() * (_RIDGE * features / rows.clamp(min=1))
    ridge_F[:_FLAGS] = 0
    ridge_F += ff.diagonal() == 0
    weights_FH = torch.linalg.solve(ff + ridge_F.diag(), fh)
    explained_HH = weights_FH.T @ fh
    residual_HH = hh - explained_HH - explained_HH.T + weights_FH.T @ ff @ weights_FH
    flat_weight = spec.hidden / (spec.hidden + rows / _SHRINKAGE)
    residual_HH = residual_HH * (1 - flat_weight)
    residual_HH.diagonal().add_(flat_weight * hh.diagonal().mean())
    root_HH, inverse_HH = _metric_roots(moments.gradient_HH, gradients, like_HH=residual_HH)
    variance_H, vectors_HH = torch.linalg.eigh(root_HH @ residual_HH @ root_HH)
    kept = slice(-spec.kept, None)
    spread_K = variance_H[kept].flip(0).clamp(min=_FLOOR).sqrt()
    log_norm_1 = (log_sum / ordinary.clamp(min=1))[None]
    vectors_HK = vectors_HH[:, kept].flip(1)
    flat_n = _flatten(log_norm_1, spread_K, weights_FH, inverse_HH @ vectors_HK)
    return unflatten(flat_n, spec, (root_HH @ vectors_HK).float())


def _metric_roots(
    gradient_HH: torch.Tensor | None, rows: torch.Tensor, *, like_HH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """G^(1/2) and G^(-1/2), mean eigenvalue of G 1, of the dtype of ``like_HH``; without gradients the identity."""
    hidden = len(like_HH)
    eye_HH = torch.eye(hidden, dtype=like_HH.dtype, device=like_HH.device)
    if gradient_HH is None:
        return eye_HH, eye_HH
    gradient_HH = gradient_HH.to(like_HH.dtype)
    scale = gradient_HH.diagonal().mean()
    metric_HH = gradient_HH / torch.where(scale > 0, scale, 1.0)
    flat_share = FLAT_SHARE + (1 - FLAT_SHARE) * hidden / (hidden + rows)
    value_H, vectors_HH = torch.linalg.eigh((1 - flat_share) * metric_HH + flat_share * eye_HH)
    root_H = value_H.clamp(min=_FLOOR).sqrt()
    return (vectors_HH * root_H) @ vectors_HH.T, (vectors_HH / root_H) @ vectors_HH.T


def random_fit(spec: Spec, seed: int, device: torch.device) -> TransformFit:
    """A random basis without prediction, all channels alike: equal seeds give equal bits."""
    weights_FH = torch.zeros(_FLAGS + spec.context, spec.hidden)
    basis_HK = random_basis(spec.hidden, spec.kept, seed)
    flat_n = _flatten(torch.zeros(1), torch.ones(spec.kept), weights_FH, basis_HK)
    return unflatten(flat_n.to(device), spec)


def unflatten(flat_n: torch.Tensor, spec: Spec, analysis_HK: torch.Tensor | None = None) -> TransformFit:
    """The fit that crossed as ``flat_n`` (:attr:`TransformFit.flat_n`), on its device.

    Args:
        analysis_HK: what the sender kept of the fit; ``None`` at the receiver, and without a metric.
    """
    features = _FLAGS + spec.context
    sizes = [1, spec.kept, features * spec.hidden, spec.hidden * spec.kept]
    log_norm_1, spread_K, weights, basis = torch.split(flat_n.float(), sizes)
    bits_K = allocate_bits(spread_K.square(), spec.code_bits, spec.max_bits)
    channels = tuple(count for bits in range(spec.max_bits) if (count := int((bits_K > bits).sum())) > 0)
    weights_FH, basis_HK = weights.view(features, spec.hidden), basis.view(spec.hidden, spec.kept)
    analysis_HK = basis_HK if analysis_HK is None else analysis_HK.to(flat_n.device)
    chain_HA = None
    if spec.chained:
        active = slice(channels[0])
        chain_HA = weights_FH[-spec.hidden :] @ analysis_HK[:, active] / spread_K[active]
    return TransformFit(
        spec=spec,
        flat_n=flat_n,
        log_norm=log_norm_1[0],
        weights_FH=weights_FH,
        basis_HK=basis_HK,
        analysis_HK=analysis_HK,
        spread_K=spread_K,
        chain_HA=chain_HA,
        bits_A=bits_K[: channels[0]].to(torch.int32),
        channels=channels,
    )


def _flatten(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten().to(torch.bfloat16) for part in parts])


def encode_rows(
    fit: TransformFit, x_NH: torch.Tensor, context_NC: torch.Tensor | None = None, walk: Walk | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code rows of any dtype.

    Args:
        context_NC: as in :class:`Moments`, without the row before; ``None`` exactly if the fit has none.
        walk: along these rows; needed exactly if the fit is chained.

    Returns:
        The payload, uint8 ``[spec.payload_bytes(N)]``, and the rows as :func:`decode_rows` gives them, fp32 ``[N, H]``.
    """
    assert (walk is not None) == fit.spec.chained, "a chained fit codes along a walk, and no other does"
    x_NH = x_NH.float()
    if not len(x_NH):
        return x_NH.new_empty(0, dtype=torch.uint8), x_NH
    scale_N = _scale_codes(fit, x_NH)
    unit_NH = (x_NH / _scales(fit, scale_N)[:, None]).nan_to_num(nan=0.0)
    predicted_NH = _predict(fit, scale_N, context_NC)
    active = slice(fit.active)
    z_NA = (unit_NH - predicted_NH) @ fit.analysis_HK[:, active] / fit.spread_K[active]
    if walk is None:
        gain_N, codes_NA = _quantise(fit, z_NA)
        decoded_NH = _rebuild(fit, predicted_NH, gain_N, codes_NA, scale_N)
    else:
        parts = []
        assert fit.chain_HA is not None
        for column in walk.columns():
            before_nH = _before(walk, column, scale_N)
            gain_n, codes_nA = _quantise(fit, z_NA[column] - before_nH @ fit.chain_HA)
            predicted_nH = predicted_NH[column] + _from_before(fit, before_nH)
            decoded_nH = _rebuild(fit, predicted_nH, gain_n, codes_nA, scale_N[column])
            _pass_on(walk, column, decoded_nH)
            parts.append((gain_n, codes_nA, decoded_nH))
        gain_N, codes_NA, decoded_NH = (torch.cat(part) for part in zip(*parts, strict=True))
    scalars_N = scale_N * _GAIN_CODES + gain_N
    payload = torch.cat([*(byte.to(torch.uint8) for byte in (scalars_N & 255, scalars_N >> 8)), _pack(fit, codes_NA)])
    return payload, decoded_NH


def decode_rows(
    fit: TransformFit,
    payload: torch.Tensor,
    rows: int,
    context_NC: torch.Tensor | None = None,
    walk: Walk | None = None,
) -> torch.Tensor:
    """The rows ``[N, H]``, fp32.

    A row that was not finite, or whose norm is not, is NaN throughout; those after it are predicted as if it had been
    zeros. A row of zeros is zeros.
    """
    assert (walk is not None) == fit.spec.chained, "a chained fit codes along a walk, and no other does"
    low_N, high_N, packed = torch.split(payload, [rows, rows, len(payload) - 2 * rows])
    scalars_N = high_N.int() * 256 + low_N.int()
    scale_N, gain_N = scalars_N // _GAIN_CODES, scalars_N % _GAIN_CODES
    predicted_NH, codes_NA = _predict(fit, scale_N, context_NC), _unpack(fit, packed, rows)
    if walk is None:
        return _rebuild(fit, predicted_NH, gain_N, codes_NA, scale_N)
    decoded_NH = torch.empty_like(predicted_NH)
    for column in walk.columns():
        predicted_nH = predicted_NH[column] + _from_before(fit, _before(walk, column, scale_N))
        # of the shapes that the sender has: both ends go on from equal bits
        decoded_nH = _rebuild(fit, predicted_nH, gain_N[column], codes_NA[column], scale_N[column])
        _pass_on(walk, column, decoded_nH)
        decoded_NH[column] = decoded_nH
    return decoded_NH


def _before(walk: Walk, column: slice, scale_N: torch.Tensor) -> torch.Tensor:
    """The unit row before each of a column, as decoded; zeros before huge ones."""
    return walk.before_column(column).masked_fill(_huge(scale_N[column])[:, None], 0.0)


def _from_before(fit: TransformFit, before_nH: torch.Tensor) -> torch.Tensor:
    """What the row before adds to a prediction."""
    return before_nH @ fit.weights_FH[-fit.spec.hidden :]


def _pass_on(walk: Walk, column: slice, decoded_nH: torch.Tensor) -> None:
    walk.pass_on(column, unit_rows(decoded_nH).nan_to_num(nan=0.0))


def _quantise(fit: TransformFit, z_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains and codes of channels in units of their spread."""
    gain_N = _GAIN.codes(z_NA.square().mean(dim=-1).sqrt().log2())
    return gain_N, mixed_codes(z_NA / torch.exp2(_GAIN.logs(gain_N))[:, None], fit.bits_A)


def _rebuild(
    fit: TransformFit, predicted_NH: torch.Tensor, gain_N: torch.Tensor, codes_NA: torch.Tensor, scale_N: torch.Tensor
) -> torch.Tensor:
    active = slice(fit.active)
    z_NA = mixed_values(codes_NA, fit.bits_A) * fit.spread_K[active] * torch.exp2(_GAIN.logs(gain_N))[:, None]
    unit_NH = predicted_NH + z_NA @ fit.basis_HK[:, active].T
    scaled_NH = unit_NH * _scales(fit, scale_N)[:, None]
    return scaled_NH.masked_fill_((scale_N == _ZERO)[:, None], 0.0)


def _huge(scale_N: torch.Tensor) -> torch.Tensor:
    return _NORM.logs(scale_N) > math.log2(_HUGE)


def _predict(fit: TransformFit, scale_N: torch.Tensor, context_NC: torch.Tensor | None) -> torch.Tensor:
    """By what is known before any row crosses."""
    features_NF = _features(_huge(scale_N), context_NC)
    known = len(fit.weights_FH) - fit.spec.hidden * fit.spec.chained
    return features_NF @ fit.weights_FH[:known]


def _features(huge_N: torch.Tensor, context_NC: torch.Tensor | None) -> torch.Tensor:
    """``[N, F]``: 1, huge, and the context of the rows that are not."""
    flags = [torch.ones_like(huge_N, dtype=torch.float32), huge_N.float()]
    flags_N2 = torch.stack(flags, dim=-1)
    if context_NC is None:
        return flags_N2
    return torch.cat([flags_N2, context_NC.float().masked_fill(huge_N[:, None], 0.0)], dim=-1)


def _scale_codes(fit: TransformFit, x_NH: torch.Tensor) -> torch.Tensor:
    norm_N = torch.linalg.vector_norm(x_NH, dim=-1)
    codes_N = _NORM.codes(norm_N.log2() - fit.log_norm)
    codes_N = codes_N.masked_fill_(norm_N == 0, _ZERO)
    return codes_N.masked_fill_(~norm_N.isfinite(), _BROKEN)


def _scales(fit: TransformFit, scale_N: torch.Tensor) -> torch.Tensor:
    """Rms of the rows, as transmitted."""
    rms_N = torch.exp2(_NORM.logs(scale_N) + fit.log_norm) / math.sqrt(fit.spec.hidden)
    return rms_N.masked_fill_(scale_N == _BROKEN, math.nan)


def _pack(fit: TransformFit, codes_NA: torch.Tensor) -> torch.Tensor:
    """Bit planes, lowest first: channels with more than so many bits come first, so each plane is a run of them."""
    planes = [(codes_NA[:, :count] >> bit) & 1 for bit, count in enumerate(fit.channels)]
    return pack_bits(torch.cat(planes, dim=-1), 1)


def _unpack(fit: TransformFit, packed: torch.Tensor, rows: int) -> torch.Tensor:
    planes = unpack_bits(packed, rows * fit.spec.code_bits, 1).view(rows, fit.spec.code_bits)
    codes_NA = planes.new_zeros(rows, fit.active)
    for bit, plane in enumerate(torch.split(planes, list(fit.channels), dim=-1)):
        codes_NA[:, : plane.shape[1]] |= plane << bit
    return codes_NA
