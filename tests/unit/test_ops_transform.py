"""The transform codec on rows whose statistics are known.

Legend: N rows, H hidden, C numbers of context, K kept channels, T sequence length.
"""

import math

import pytest
import torch

from megatron_grpo.ops.rows import Walk, carrying_rows
from megatron_grpo.ops.transform import (
    FLAT_SHARE,
    Moments,
    Spec,
    TransformFit,
    decode_rows,
    encode_rows,
    fit,
    fixed_spec,
    random_fit,
    unflatten,
    unit_rows,
    waterfill_spec,
)

CPU = torch.device("cpu")
MAX_1960 = [1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499]
"""Mean square error of the best quantiser of a standard normal number at 0 to 5 bits (Max 1960, table I)."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator(seed))


def _moments(
    x_NH: torch.Tensor, context_NC: torch.Tensor | None = None, *, by_energy: bool = False, by_gradients: bool = False
) -> Moments:
    context = 0 if context_NC is None else context_NC.shape[1]
    moments = Moments.zeros(x_NH.shape[1], context, CPU, by_energy=by_energy, by_gradients=by_gradients)
    moments.add(x_NH, context_NC)
    return moments


def _fitted(x_NH: torch.Tensor, context_NC: torch.Tensor | None = None, *, share: float = 0.1) -> TransformFit:
    context = 0 if context_NC is None else context_NC.shape[1]
    return fit(_moments(x_NH, context_NC), waterfill_spec(x_NH.shape[1], context, share=share))


def _error(x_NH: torch.Tensor, decoded_NH: torch.Tensor) -> float:
    """Mean squared error of a row."""
    return (x_NH - decoded_NH).square().sum(dim=-1).mean().item()


def _quantised(x_NH: torch.Tensor, decoded_NH: torch.Tensor) -> float:
    """:func:`_error` without what rounding the norm to 32 steps an octave costs (uniform: step squared over 12)."""
    rounding = (math.log(2) / 32) ** 2 / 12
    return _error(x_NH, decoded_NH) - rounding * x_NH.square().sum(dim=-1).mean().item()


def _coloured(rows: int, hidden: int, *, seed: int, decay: float = 0.9) -> torch.Tensor:
    """Gaussian rows far from the origin: falling variances in a fixed random basis, sum 1, around a mean of norm 8."""
    basis_HH = torch.linalg.qr(_randn(hidden, hidden, seed=99)).Q
    spread_H = torch.sqrt(_spectrum(hidden, decay))
    mean_H = 8 * unit_rows(_randn(1, hidden, seed=98)) / math.sqrt(hidden)
    return mean_H + torch.mm(_randn(rows, hidden, seed=seed) * spread_H, basis_HH.T)


def _spectrum(hidden: int, decay: float) -> torch.Tensor:
    variance_H = decay ** torch.arange(hidden)
    return variance_H / variance_H.sum()


def _greedy_distortion(variances: list[float], budget: int) -> float:
    """Slow reference: one bit at a time to the channel that gains most."""
    bits = [0] * len(variances)
    for _ in range(budget):
        gains = [v * (MAX_1960[b] - MAX_1960[b + 1]) if b < 5 else 0.0 for v, b in zip(variances, bits, strict=True)]
        bits[gains.index(max(gains))] += 1
    return sum(v * MAX_1960[b] for v, b in zip(variances, bits, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [waterfill_spec(48, 0, share=0.1), fixed_spec(48, 0, rank=7, bits=3)])
def test_both_ends_decode_the_same_rows(spec: Spec, dtype: torch.dtype) -> None:
    x_NH = _coloured(200, 48, seed=1).to(dtype)
    transform = fit(_moments(x_NH), spec)
    payload, decoded_NH = encode_rows(transform, x_NH)
    received = unflatten(transform.flat_n.clone(), spec)
    assert payload.dtype == torch.uint8
    assert torch.equal(decode_rows(received, payload.clone(), 200), decoded_NH)


def test_sizes_are_those_worked_out_by_hand() -> None:
    # 5.2 % of a bf16 row of 576 numbers are 479 bits: 16 for norm and gain, 463 for codes of ceil(0.7 * 463) channels.
    spec = waterfill_spec(576, 1153, share=0.052)
    assert (spec.row_bits, spec.code_bits, spec.kept) == (479, 463, 325)
    assert spec.payload_bytes(3) == 6 + 174  # ceil(3 * 463 / 8)
    assert spec.payload_bytes(0) == 0
    assert spec.flat_size == 1 + 325 + (2 + 1153) * 576 + 325 * 576
    fixed = fixed_spec(96, 0, rank=16, bits=4)
    assert (fixed.row_bits, fixed.payload_bytes(2)) == (16 + 64, 4 + 16)


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_the_payload_has_the_size_that_the_spec_says(rows: int) -> None:
    transform = _fitted(_coloured(100, 24, seed=1))
    payload, decoded_NH = encode_rows(transform, _coloured(rows, 24, seed=2))
    assert payload.shape == (transform.spec.payload_bytes(rows),)
    assert decoded_NH.shape == (rows, 24)
    assert decode_rows(transform, payload, rows).shape == (rows, 24)


def test_every_channel_gets_its_fixed_bits() -> None:
    transform = fit(_moments(_coloured(100, 24, seed=1)), fixed_spec(24, 0, rank=5, bits=3))
    assert transform.channels == (5, 5, 5)
    assert transform.bits_A.tolist() == [3] * 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: waterfill_spec(8, 0, share=0.1), r"share=0\.1 leaves no bits for rows of hidden size 8.*0\.1328"),
        (lambda: waterfill_spec(8, 0, share=0.7), r"code_bits=73 must be from 1 to 64"),
        (lambda: fixed_spec(8, 0, rank=9, bits=4), r"kept=9 .* hidden size 8"),
        (lambda: Spec(8, 0, 4, 0), r"code_bits=0 must be from 1 to 32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]  # a lambda of the list above


def test_gaussian_rows_are_coded_with_the_distortion_of_their_allocation() -> None:
    # Channels fall slowly, so that the gain of a row, which here is noise, stays near 1.
    hidden, budget = 128, 200
    transform = fit(_moments(_coloured(20_000, hidden, seed=1, decay=0.98)), Spec(hidden, 0, hidden, budget))
    x_NH = _coloured(4000, hidden, seed=2, decay=0.98)
    _, decoded_NH = encode_rows(transform, x_NH)
    expected = _greedy_distortion(_spectrum(hidden, 0.98).tolist(), budget)
    assert _error(x_NH, decoded_NH) == pytest.approx(expected, rel=0.04)


def test_a_gain_of_its_own_fits_rows_of_another_spread() -> None:
    # The same rows with half the spread around their mean: the error falls with the square.
    x_NH = _coloured(5000, 64, seed=1)
    transform = _fitted(x_NH, share=0.05)
    narrow_NH = x_NH.mean(dim=0) + (x_NH - x_NH.mean(dim=0)) / 2
    wide, narrow = (_quantised(rows_NH, encode_rows(transform, rows_NH)[1]) for rows_NH in (x_NH, narrow_NH))
    assert narrow == pytest.approx(wide / 4, rel=0.04)


def test_prediction_removes_what_the_row_before_explains() -> None:
    # Every channel is a stationary series x_t = 0.8 x_{t-1} + e, so that 1 - 0.8**2 of the variance is left over.
    offset_TH, hidden = _coloured(6000, 32, seed=1), 32
    x_TH = torch.zeros_like(offset_TH)
    for t in range(1, len(x_TH)):
        x_TH[t] = 0.8 * x_TH[t - 1] + 0.6 * (offset_TH[t] - offset_TH.mean(dim=0))
    x_TH += offset_TH.mean(dim=0)
    before_TH = torch.cat([torch.zeros(1, hidden), unit_rows(x_TH)[:-1]])
    spec, spec_alone = fixed_spec(hidden, hidden, rank=32, bits=2), fixed_spec(hidden, 0, rank=32, bits=2)
    predicting, alone = fit(_moments(x_TH, before_TH), spec), fit(_moments(x_TH), spec_alone)
    error = _quantised(x_TH[1:], encode_rows(predicting, x_TH, before_TH)[1][1:])
    error_alone = _quantised(x_TH[1:], encode_rows(alone, x_TH)[1][1:])
    assert error == pytest.approx(0.36 * error_alone, rel=0.06)


def test_chained_rows_are_coded_after_the_row_before_as_decoded() -> None:
    """Against one row after the other, the row before a plain part of the context; some huge, one not finite."""
    hidden, x_TH = 24, _coloured(80, 24, seed=1)
    for t in range(2, 80, 2):
        x_TH[t] = 0.8 * x_TH[t - 2] + 0.6 * x_TH[t]  # two sequences side by side
    x_TH[20] = x_TH[33] = 4000 * torch.nn.functional.one_hot(torch.tensor(3), hidden).float()
    rows = carrying_rows(torch.ones(2, 40, dtype=torch.bool))
    before_N = rows.previous()
    before_TH = torch.where(before_N[:, None] < 0, 0.0, unit_rows(x_TH)[before_N])
    moments = _moments(x_TH, before_TH)
    plain = fit(moments, waterfill_spec(hidden, hidden, share=0.3))
    chained = fit(moments, waterfill_spec(hidden, hidden, share=0.3, chained=True))
    x_TH[50, 3] = math.inf
    expected_TH = torch.zeros(80, hidden)
    for n, before in enumerate(before_N.tolist()):
        known_1H = (
            unit_rows(expected_TH[before : before + 1]).nan_to_num(nan=0.0) if before >= 0 else torch.zeros(1, hidden)
        )
        expected_TH[n] = encode_rows(plain, x_TH[n : n + 1], known_1H)[1]
    payload, decoded_TH = encode_rows(chained, x_TH, None, Walk(rows, "x", hidden))
    torch.testing.assert_close(decoded_TH, expected_TH, equal_nan=True, rtol=1e-3, atol=1e-3)
    assert decoded_TH[50].isnan().all() and decoded_TH[52:].isfinite().all()
    received_TH = decode_rows(chained, payload, 80, None, Walk(rows, "x", hidden))
    torch.testing.assert_close(received_TH, decoded_TH, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="along a walk"):
        encode_rows(chained, x_TH)


def test_moments_of_parts_add_up_to_those_of_the_whole() -> None:
    x_NH, context_NC = _coloured(90, 12, seed=1), _randn(90, 5, seed=2)
    parts = [_moments(x_NH[:30], context_NC[:30]), _moments(x_NH[30:], context_NC[30:])]
    whole = _moments(x_NH, context_NC)
    for summed, left, right in zip(whole.tensors(), *(part.tensors() for part in parts), strict=True):
        torch.testing.assert_close(left + right, summed, rtol=1e-5, atol=1e-4)
    z_ND = torch.cat([torch.ones(90, 1), torch.zeros(90, 1), context_NC, unit_rows(x_NH)], dim=1)
    torch.testing.assert_close(whole.second_DD, torch.einsum("ni,nj->ij", z_ND, z_ND), rtol=1e-5, atol=1e-4)
    assert whole.tally_4.tolist() == [90, 90, pytest.approx(x_NH.norm(dim=1).double().log2().sum().item()), 0]


def test_tensors_of_moments_are_live() -> None:
    x_NH = _coloured(64, 8, seed=1)
    moments, spec = _moments(x_NH[:32]), fixed_spec(8, 0, rank=8, bits=4)
    for mine, other in zip(moments.tensors(), _moments(x_NH[32:]).tensors(), strict=True):
        mine.add_(other)  # what an all-reduce does
    torch.testing.assert_close(
        fit(moments, spec).basis_HK.abs(), fit(_moments(x_NH), spec).basis_HK.abs(), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("hidden", [24, 96])
def test_a_row_codes_alike_in_any_batch(hidden: int) -> None:
    x_NH, context_NC = _coloured(300, hidden, seed=1), _randn(300, 9, seed=2)
    transform = _fitted(x_NH, context_NC, share=0.15)
    _, together_NH = encode_rows(transform, x_NH[:40], context_NC[:40])
    alone_NH = torch.cat([encode_rows(transform, x_NH[n : n + 1], context_NC[n : n + 1])[1] for n in range(40)])
    differs_N = (together_NH - alone_NH).abs().amax(dim=1) > 1e-4
    assert differs_N.sum() <= 1  # round-off may carry a number over the edge between two codes


def test_huge_rows_have_a_mean_of_their_own() -> None:
    x_NH = _coloured(2000, 32, seed=1)
    huge_N = torch.arange(2000) % 100 == 0
    x_NH[huge_N] = 5000 * torch.nn.functional.one_hot(torch.tensor(3), 32).float() + _randn(20, 32, seed=2)
    context_NC = _randn(2000, 6, seed=3)
    transform = _fitted(x_NH, context_NC)
    _, decoded_NH = encode_rows(transform, x_NH, context_NC)
    relative_N = (decoded_NH - x_NH).norm(dim=1) / x_NH.norm(dim=1)
    assert relative_N[huge_N].max() < 2 ** (1 / 64) - 1  # half a step of the norm
    ordinary = _fitted(x_NH[~huge_N], context_NC[~huge_N])
    _, undisturbed_NH = encode_rows(ordinary, x_NH[~huge_N], context_NC[~huge_N])
    disturbed = _error(x_NH[~huge_N], decoded_NH[~huge_N])
    assert disturbed == pytest.approx(_error(x_NH[~huge_N], undisturbed_NH), rel=0.05)


def test_rows_that_are_not_finite_turn_nan_and_rows_of_zeros_stay() -> None:
    x_NH = _coloured(50, 16, seed=1)
    transform = _fitted(x_NH, share=0.2)
    clean_NH = encode_rows(transform, x_NH)[1]
    x_NH[3, 5], x_NH[4, 0], x_NH[5] = math.nan, math.inf, 0.0
    payload, decoded_NH = encode_rows(transform, x_NH)
    torch.testing.assert_close(decode_rows(transform, payload, 50), decoded_NH, equal_nan=True, rtol=0, atol=0)
    assert decoded_NH[3:5].isnan().all()
    assert torch.equal(decoded_NH[5], torch.zeros(16))
    others = torch.tensor([n for n in range(50) if n not in (3, 4, 5)])
    torch.testing.assert_close(decoded_NH[others], clean_NH[others])


def test_moments_leave_out_rows_that_say_nothing() -> None:
    x_NH, context_NC = _coloured(20, 8, seed=1), _randn(20, 3, seed=2)
    spoilt_NH, spoilt_NC = x_NH.clone(), context_NC.clone()
    spoilt_NH[0, 0], spoilt_NH[1], spoilt_NC[2, 1] = math.nan, 0.0, math.inf
    moments, expected = _moments(spoilt_NH, spoilt_NC), _moments(x_NH[3:], context_NC[3:])
    for left, right in zip(moments.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("rows", [0, 1, 600])
def test_few_rows_make_a_fit_that_is_safe_on_others(rows: int) -> None:
    # 70 tokens with an embedding of 96 numbers: the regression on embedding and row before is underdetermined.
    embedding_VH, hidden = _randn(70, 96, seed=5), 96
    tokens_N = torch.randint(70, (1200,), generator=_generator(6))
    x_NH = _coloured(1200, hidden, seed=1) + 0.1 * embedding_VH[tokens_N]
    context_NC = torch.cat([embedding_VH[tokens_N], unit_rows(x_NH).roll(1, 0)], dim=1)
    transform = _fitted(x_NH[:rows], context_NC[:rows])
    assert all(part.isfinite().all() for part in (transform.weights_FH, transform.basis_HK, transform.spread_K))
    _, decoded_NH = encode_rows(transform, x_NH[600:], context_NC[600:])
    assert decoded_NH.isfinite().all()
    if rows == 600:
        spread = _error(x_NH[600:], x_NH[600:].mean(dim=0))
        assert _error(x_NH[600:], decoded_NH) < 0.3 * spread


def test_a_random_fit_is_orthonormal_and_repeats_bit_for_bit() -> None:
    spec = fixed_spec(32, 4, rank=6, bits=4)
    transform = random_fit(spec, 7, CPU)
    gram_KK = transform.basis_HK.T @ transform.basis_HK
    torch.testing.assert_close(gram_KK, torch.eye(6), atol=0.01, rtol=0)
    assert torch.equal(transform.flat_n, random_fit(spec, 7, CPU).flat_n)
    assert not torch.equal(transform.flat_n, random_fit(spec, 8, CPU).flat_n)


def test_a_fit_crosses_in_bfloat16_without_loss() -> None:
    transform = _fitted(_coloured(200, 24, seed=1), _randn(200, 3, seed=2))
    assert transform.flat_n.dtype == torch.bfloat16
    assert transform.flat_n.shape == (transform.spec.flat_size,)
    received = unflatten(transform.flat_n.clone(), transform.spec)
    assert received.channels == transform.channels
    assert torch.equal(received.weights_FH, transform.weights_FH) and torch.equal(received.basis_HK, transform.basis_HK)


def _by_gradients(x_NH: torch.Tensor, grad_NH: torch.Tensor, spec: Spec) -> TransformFit:
    moments = _moments(x_NH, by_gradients=True)
    moments.add_gradients(grad_NH)
    return fit(moments, spec)


def test_a_metric_is_the_root_of_the_gradients_second_moment() -> None:
    """Ten lines of numpy-like steps: G, its root, the eigenvectors of root R root; analysis and synthesis from them."""
    x_NH, grad_NH = _coloured(4000, 6, seed=1), _randn(3000, 6, seed=2) * torch.tensor([4.0, 1, 1, 0.5, 0.1, 2])
    transform = _by_gradients(x_NH, grad_NH, fixed_spec(6, 0, rank=3, bits=4))
    unit_NH = unit_rows(x_NH).double()
    gram_HH = (grad_NH.T @ grad_NH).double()
    share = FLAT_SHARE + (1 - FLAT_SHARE) * 6 / 3006
    metric_HH = (1 - share) * 6 * gram_HH / gram_HH.trace() + share * torch.eye(6)
    value_H, vectors_HH = torch.linalg.eigh(metric_HH)
    root_HH = vectors_HH @ value_H.sqrt().diag() @ vectors_HH.T
    covariance_HH = unit_NH.T.cov(correction=0)
    flat_weight = 6 / (6 + 4000 / 0.5)
    covariance_HH = (1 - flat_weight) * covariance_HH + flat_weight * torch.eye(6) * unit_NH.square().mean()
    variance_H, u_HH = torch.linalg.eigh(root_HH @ covariance_HH @ root_HH)
    u_HK, variance_K = u_HH.flip(1)[:, :3], variance_H.flip(0)[:3]
    torch.testing.assert_close(transform.spread_K.double(), variance_K.sqrt(), rtol=2**-8, atol=0)
    torch.testing.assert_close(transform.analysis_HK.double().abs(), (root_HH @ u_HK).abs(), rtol=1e-3, atol=1e-3)
    expected_HK = torch.linalg.inv(root_HH) @ u_HK
    torch.testing.assert_close(transform.basis_HK.double().abs(), expected_HK.abs(), rtol=0, atol=0.02)


def test_bits_go_where_the_gradients_say() -> None:
    """Gradients along axis 0 alone, where the rows vary least: its error falls, that of all axes together rises."""
    x_NH = _randn(2000, 16, seed=1) * torch.linspace(0.2, 2.0, 16)
    grad_NH = torch.nn.functional.pad(_randn(500, 1, seed=2), (0, 15))
    spec = waterfill_spec(16, 0, share=0.15)
    plain, weighed = (
        encode_rows(transform, x_NH)[1] for transform in (fit(_moments(x_NH), spec), _by_gradients(x_NH, grad_NH, spec))
    )
    assert _error(x_NH[:, :1], weighed[:, :1]) < 0.3 * _error(x_NH[:, :1], plain[:, :1])
    assert _error(x_NH, weighed) > _error(x_NH, plain)


def test_gradients_that_say_nothing_change_nothing() -> None:
    x_NH, spec = _coloured(200, 12, seed=1), waterfill_spec(12, 0, share=0.2)
    grad_NH = torch.zeros(5, 12)
    grad_NH[0, 3] = math.nan
    assert torch.equal(_by_gradients(x_NH, grad_NH, spec).flat_n, fit(_moments(x_NH), spec).flat_n)


def test_weighting_by_energy_follows_the_rows_of_large_norm() -> None:
    # One row in ten is four times as large and varies along axis 1, the others along axis 0.
    x_NH = torch.zeros(1000, 4)
    large_N = torch.arange(1000) % 10 == 0
    x_NH[:, 3] = 10.0
    x_NH[:, 0], x_NH[:, 1] = _randn(1000, seed=1) * ~large_N, _randn(1000, seed=2) * large_N
    x_NH[large_N] *= 4
    spec = fixed_spec(4, 0, rank=1, bits=8)
    for by_energy, axis in ((False, 0), (True, 1)):
        basis_H1 = fit(_moments(x_NH, by_energy=by_energy), spec).basis_HK
        assert basis_H1[axis].abs() > 0.99
