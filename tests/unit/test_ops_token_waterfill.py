"""Token water-filling against slow references: rotation, allocation, decoded rows, sizes. Legend: N rows, H hidden."""

import math
from itertools import pairwise

import pytest
import torch

from megatron_grpo.ops.quantize import gaussian_distortion, lloyd_max
from megatron_grpo.ops.token_waterfill import Rotation, decode, encode, hadamard, payload_bytes


def _rows(rows: int, hidden: int, spread: float, seed: int = 0) -> torch.Tensor:
    """Rows whose norms are lognormal, with channels of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    norms_N1 = torch.exp(spread * torch.randn(rows, 1, generator=generator))
    channels_H = torch.exp(torch.randn(hidden, generator=generator))
    return torch.randn(rows, hidden, generator=generator) * norms_N1 * channels_H


def _round_trip(x_NH: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    rotation = Rotation(x_NH.shape[1], seed)
    payload = encode(x_NH, rotation, share)
    assert payload.dtype == torch.uint8
    assert payload.shape == (math.ceil(x_NH.numel() * 2 * share),)
    other_end = Rotation(x_NH.shape[1], seed)
    return decode(payload, x_NH.shape[0], x_NH.shape[1], other_end, share, torch.float32)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b).sum() / a.double().norm() / b.double().norm())


def _matrix(rotation: Rotation, hidden: int) -> torch.Tensor:
    return rotation.forward(torch.eye(hidden))


# 4096 has two Hadamard factors, 576 a Hadamard and a dense one, 8192 all sizes; 7 and 514 are dense throughout
@pytest.mark.parametrize("hidden", [1, 2, 7, 70, 96, 128, 514, 576, 4096, 8192])
def test_rotation_is_orthogonal_and_its_inverse_undoes_it(hidden: int) -> None:
    x_NH = _rows(300, hidden, 0.0)
    rotation = Rotation(hidden, 3)
    y_NH = rotation.forward(x_NH)
    assert y_NH.dtype == torch.float32
    torch.testing.assert_close(y_NH.norm(dim=1), x_NH.norm(dim=1), rtol=2e-6, atol=0)
    error_N = (rotation.inverse(y_NH) - x_NH).norm(dim=1) / x_NH.norm(dim=1)
    assert float(error_N.amax()) < 2e-6
    torch.testing.assert_close(y_NH @ y_NH.T, x_NH @ x_NH.T, rtol=1e-4, atol=1e-4 * float(x_NH.square().sum(1).amax()))


@pytest.mark.parametrize("hidden", [96, 514, 576, 2048])
def test_rotation_spreads_a_single_coordinate_over_all(hidden: int) -> None:
    matrix_HH = _matrix(Rotation(hidden, 0), hidden)
    assert float((matrix_HH == 0).double().mean()) == 0.0
    assert float(matrix_HH.abs().amax()) < 0.25


def test_rotations_are_equal_for_equal_seeds_only() -> None:
    assert torch.equal(_matrix(Rotation(96, 4), 96), _matrix(Rotation(96, 4), 96))
    assert not torch.equal(_matrix(Rotation(96, 4), 96), _matrix(Rotation(96, 5), 96))


def test_hadamard_of_four_by_hand() -> None:
    signs = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    assert torch.equal(hadamard(4), signs / 2)


def test_payload_bytes_by_hand() -> None:
    assert payload_bytes(100, 96, 0.03) == 576  # 100 * 96 * 2 bytes in bf16, 3 %
    assert payload_bytes(1, 10, 0.01) == 1
    assert payload_bytes(0, 96, 0.5) == 0
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"share={share} "):
            payload_bytes(4, 4, share)


def _slow_spend(steps: list[int], pool: float, cost: list[int], start: int) -> list[int]:
    """One row after the other: bits bought in the order of gain for a bit of payload, until the pool runs out."""
    wares = [
        (-(2 ** (-step / 4)) * (gaussian_distortion(b) - gaussian_distortion(b + 1)) / cost[b], step, b)
        for step in sorted(set(steps))
        for b in range(start, 8)
    ]
    bits = [start] * len(steps)
    for _, step, b in sorted(wares):
        for row, other in enumerate(steps):
            if other == step:
                pool -= cost[b]
                if pool < 0:
                    return bits
                bits[row] += 1
    return bits


def _slow_decoded(x_NH: torch.Tensor, share: float, rotation: Rotation) -> tuple[torch.Tensor, list[int]]:
    """What the receiver should hold, and the bits of each row; no row may be 256 times smaller than the largest."""
    rows, hidden = x_NH.shape
    y_NH = x_NH.double() @ _matrix(rotation, hidden).double()
    rms = y_NH.square().mean(1).sqrt().tolist()
    steps = [round(8 * math.log2(max(rms) / value)) for value in rms]
    whole = 8 * math.ceil(hidden / 8)
    pool = 8 * (math.ceil(rows * hidden * 2 * share) - 4 - math.ceil(rows / 8)) - 42
    sent = [row for row, b in enumerate(_slow_spend(steps, pool, [whole + 6] + [whole] * 7, 0)) if b]
    left = pool - len(sent) * (whole + 6)
    bits = dict(zip(sent, _slow_spend([steps[row] for row in sent], left, [whole] * 8, 1), strict=True))
    decoded_NH = torch.zeros(rows, hidden, dtype=torch.float64)
    for row, b in bits.items():
        scale = max(rms) * 2 ** (-steps[row] / 8)
        levels_L = lloyd_max(b).levels_L
        nearest_H = (y_NH[row, :, None] / scale - levels_L).abs().argmin(-1)
        decoded_NH[row] = scale * levels_L[nearest_H] @ _matrix(rotation, hidden).double().T
    return decoded_NH, [bits.get(row, 0) for row in range(rows)]


@pytest.mark.parametrize("hidden", [70, 96])
@pytest.mark.parametrize("share", [0.02, 0.06, 0.2, 0.35])
def test_decoded_rows_are_those_of_a_slow_reference(hidden: int, share: float) -> None:
    x_NH = _rows(90, hidden, 0.8)
    rotation = Rotation(hidden, 1)
    expected_NH, bits = _slow_decoded(x_NH, share, rotation)
    assert len(set(bits)) > 2
    decoded_NH = decode(encode(x_NH, rotation, share), 90, hidden, rotation, share, torch.float32).double()
    assert (decoded_NH.norm(dim=1) > 0).tolist() == [b > 0 for b in bits]
    # a few numbers lie so near an edge that they go the other way
    assert float((decoded_NH - expected_NH).norm() / expected_NH.norm()) < 0.01
    assert float((x_NH - decoded_NH).norm()) < 1.002 * float((x_NH - expected_NH).norm())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_equal_gaussian_rows_get_the_distortion_of_their_bits(bits: int) -> None:
    rows, hidden = 64, 576
    generator = torch.Generator().manual_seed(0)
    x_NH = torch.nn.functional.normalize(torch.randn(rows, hidden, generator=generator)) * 1e-6
    header_bits = 8 * (4 + rows // 8) + 42 + 6 * rows
    share = (bits + header_bits / (rows * hidden)) / 16
    error = x_NH - _round_trip(x_NH, share)
    expected = gaussian_distortion(bits)
    assert float(error.square().sum() / x_NH.square().sum()) == pytest.approx(expected, rel=0.04)


def _half_log_waterfill(x_NH: torch.Tensor, share: float) -> torch.Tensor:
    """Bits = half log2(energy / theta), rounded, 0 to 4; the best uniform steps; 16 bits for each row's scale."""
    rows, hidden = x_NH.shape
    y_NH = x_NH @ _matrix(Rotation(hidden, 9), hidden)
    rms_N = y_NH.square().mean(1).sqrt()

    def bits_at(log_theta: float) -> torch.Tensor:
        return (rms_N.log2() - log_theta).round().clamp(0, 4)

    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        bits_N = bits_at(middle)
        over = float((bits_N * hidden + 16 * (bits_N > 0)).sum()) > share * 16 * rows * hidden
        low, high = (middle, high) if over else (low, middle)
    bits_N = bits_at(high)
    step_N = torch.tensor([1.0, 1.596, 0.9957, 0.5860, 0.3352])[bits_N.long()] * rms_N
    reach_N1 = (2 ** (bits_N - 1) - 0.5)[:, None]
    level_NH = ((y_NH / step_N[:, None] - 0.5).round() + 0.5).clamp(-reach_N1, reach_N1)
    coded_NH = torch.where(bits_N[:, None] > 0, level_NH * step_N[:, None], 0.0)
    return coded_NH @ _matrix(Rotation(hidden, 9), hidden).T


@pytest.mark.parametrize("share", [0.01, 0.02, 0.03, 0.05, 0.10])
@pytest.mark.parametrize(("rows", "hidden"), [(512, 96), (400, 576)])
def test_direction_is_kept_better_than_by_the_rounded_rule_at_equal_bytes(rows: int, hidden: int, share: float) -> None:
    for spread in (1.0, 1.5):
        x_NH = _rows(rows, hidden, spread)
        cosine = _cosine(x_NH, _round_trip(x_NH, share))
        assert cosine > _cosine(x_NH, _half_log_waterfill(x_NH, share))


def test_more_bytes_always_help_up_to_the_last() -> None:
    x_NH = _rows(128, 96, 1.0)
    shares = [0.005, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5]
    errors = [float((x_NH - _round_trip(x_NH, share)).norm() / x_NH.norm()) for share in shares]
    assert all(less < more for more, less in pairwise(errors))
    # 8 bits, and rows below 2**-8 of the largest dropped: that is where it ends
    assert errors[-1] < 0.01
    assert float((x_NH - _round_trip(x_NH, 1.0)).norm() / x_NH.norm()) < 0.01


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20, 1e36])
def test_magnitude_does_not_matter(scale: float) -> None:
    x_NH = _rows(64, 96, 1.0)
    x_NH = x_NH / x_NH.abs().amax()
    plain_NH = _round_trip(x_NH, 0.05)
    torch.testing.assert_close(_round_trip(x_NH * scale, 0.05) / scale, plain_NH, rtol=1e-3, atol=1e-5)


def test_the_order_of_rows_does_not_matter_where_each_gains_differently() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NH = torch.nn.functional.normalize(torch.randn(40, 96, generator=generator))
    x_NH = x_NH * 2.0 ** (-torch.arange(40) / 8)[:, None]  # one row a step
    order_N = torch.randperm(40, generator=generator)
    torch.testing.assert_close(_round_trip(x_NH[order_N], 0.05), _round_trip(x_NH, 0.05)[order_N])


def test_encoding_repeats_and_leaves_its_input_alone() -> None:
    x_NH = _rows(64, 96, 1.0)
    kept_NH = x_NH.clone()
    first = encode(x_NH, Rotation(96, 0), 0.05)
    assert torch.equal(first, encode(x_NH, Rotation(96, 0), 0.05))
    assert torch.equal(x_NH, kept_NH)


def test_stochastic_rounding_errs_less_in_the_mean_and_more_at_once() -> None:
    x_NH = _rows(64, 96, 0.5)
    rotation, generator = Rotation(96, 0), torch.Generator().manual_seed(2)
    draws = torch.stack(
        [decode(encode(x_NH, rotation, 0.2, generator), 64, 96, rotation, 0.2, torch.float32) for _ in range(100)]
    )
    nearest = float((_round_trip(x_NH, 0.2) - x_NH).norm())
    assert float((draws[0] - x_NH).norm()) > 1.1 * nearest
    assert float((draws.mean(0) - x_NH).norm()) < 0.7 * nearest
    again = torch.Generator().manual_seed(2)
    assert torch.equal(draws[0], decode(encode(x_NH, rotation, 0.2, again), 64, 96, rotation, 0.2, torch.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.0005, 0.005, 0.05, 1.0])
def test_one_number_that_is_not_finite_makes_all_nan(bad: float, share: float) -> None:
    x_NH = _rows(16, 96, 1.0)
    x_NH[11, 40] = bad
    assert bool(_round_trip(x_NH, share).isnan().all())
    assert bool(_round_trip(torch.full_like(x_NH, bad), share).isnan().all())


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 50])
@pytest.mark.parametrize("hidden", [1, 5, 96])
def test_any_size_is_coded_and_zeros_stay_zeros(rows: int, hidden: int, share: float) -> None:
    x_NH = _rows(rows, hidden, 1.0)
    decoded_NH = _round_trip(x_NH, share)
    assert decoded_NH.shape == (rows, hidden)
    assert float((x_NH - decoded_NH).norm()) <= float(x_NH.norm())
    zeros_NH = torch.zeros(rows, hidden)
    assert torch.equal(_round_trip(zeros_NH, share), zeros_NH)


def test_rows_of_zeros_among_others_and_bfloat16_at_both_ends() -> None:
    x_NH = _rows(32, 96, 0.1).bfloat16()
    x_NH[5] = 0
    rotation = Rotation(96, 0)
    decoded_NH = decode(encode(x_NH, rotation, 0.5), 32, 96, rotation, 0.5, torch.bfloat16)
    assert decoded_NH.dtype == torch.bfloat16
    assert bool((decoded_NH[5] == 0).all())
    assert _cosine(x_NH, decoded_NH) > 0.999
