"""Quantisers against Max's table, numerical integration and slow greedy references. Legend: N, C."""

import math

import pytest
import torch

from megatron_grpo.ops.quantize import (
    absmax_codes,
    absmax_values,
    allocate_bits,
    gaussian_codes,
    gaussian_distortion,
    gaussian_values,
    mixed_codes,
    mixed_values,
)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("bits", "expected"), [(0, 1.0), (1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_distortion_is_that_of_max_1960(bits: int, expected: float) -> None:
    assert gaussian_distortion(bits) == pytest.approx(expected, rel=5e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_coding_a_fine_grid_weighted_by_the_density_gives_the_distortion(bits: int) -> None:
    z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    codes = gaussian_codes(z, bits)
    values = gaussian_values(codes, bits, torch.float64)
    assert codes.dtype == torch.uint8
    assert sorted(set(codes.tolist())) == list(range(2**bits))
    assert float((weight * (z - values).square()).sum()) == pytest.approx(gaussian_distortion(bits), rel=4e-3)
    # the best levels are means of what they stand for
    assert float((weight * z * values).sum()) == pytest.approx(float((weight * values.square()).sum()), rel=1e-3)


def test_eight_bits_come_near_the_limit_of_many_levels() -> None:
    # Panter and Dite 1951: sqrt(3) pi / (2 L^2) for a Gaussian
    assert gaussian_distortion(8) == pytest.approx(math.sqrt(3) * math.pi / 2 / 256**2, rel=0.02)


def test_one_and_two_bits_by_hand() -> None:
    z = torch.tensor([-math.inf, -1.0, -0.5, 0.1, 0.97, 1.0, math.inf])
    mean = math.sqrt(2 / math.pi)
    assert gaussian_codes(z, 1).tolist() == [0, 0, 0, 1, 1, 1, 1]
    torch.testing.assert_close(
        gaussian_values(gaussian_codes(z, 1), 1, torch.float32), mean * torch.tensor([-1.0, -1, -1, 1, 1, 1, 1])
    )
    assert gaussian_codes(z, 2).tolist() == [0, 0, 1, 2, 2, 3, 3]  # Max: edge .9816, levels .4528 and 1.510
    levels = gaussian_values(torch.arange(4, dtype=torch.uint8), 2, torch.float32)
    torch.testing.assert_close(levels, torch.tensor([-1.510, -0.4528, 0.4528, 1.510]), atol=5e-4, rtol=0)


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_what_is_not_finite_gets_a_valid_code(bits: int) -> None:
    z_NC = torch.tensor([[math.nan, math.inf, -math.inf, 1e30]])
    for generator in (None, _generator(0)):
        codes_NC = gaussian_codes(z_NC, bits, generator)
        assert codes_NC.shape == (1, 4)
        assert codes_NC[0, 1:].tolist() == [2**bits - 1, 0, 2**bits - 1]
        assert int(codes_NC[0, 0]) < 2**bits


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased_between_the_outermost_levels(bits: int) -> None:
    outermost = float(gaussian_values(torch.tensor([2**bits - 1], dtype=torch.uint8), bits, torch.float32))
    z = torch.linspace(-outermost, outermost, 41)
    draws = gaussian_values(gaussian_codes(z.expand(20_000, 41), bits, _generator(1)), bits, torch.float32)
    error = (draws.mean(0) - z).abs()
    assert bool((error < 5 * draws.std(0) / math.sqrt(20_000) + 1e-3).all())
    assert float(draws.std(0).amax()) > 0.05


def test_stochastic_codes_repeat_with_the_generator() -> None:
    z_NC = _randn(50, 20)
    assert torch.equal(gaussian_codes(z_NC, 3, _generator(5)), gaussian_codes(z_NC, 3, _generator(5)))
    assert not torch.equal(gaussian_codes(z_NC, 3, _generator(5)), gaussian_codes(z_NC, 3, _generator(6)))


def _slow_allocation(variance: list[float], budget: int, max_bits: int) -> list[int]:
    bits = [0] * len(variance)
    for _ in range(min(budget, max_bits * len(variance))):
        gains = [
            v * (gaussian_distortion(b) - gaussian_distortion(b + 1)) if b < max_bits else -1.0
            for v, b in zip(variance, bits, strict=True)
        ]
        bits[gains.index(max(gains))] += 1
    return bits


@pytest.mark.parametrize("max_bits", [1, 4, 8])
@pytest.mark.parametrize("budget", [0, 1, 37, 80, 1000])
def test_allocation_equals_one_bit_at_a_time(budget: int, max_bits: int) -> None:
    variance_C = torch.exp(2 * _randn(24)).double()
    variance_C[5:8] = variance_C[20]
    variance_C[11] = 0.0
    bits_C = allocate_bits(variance_C, budget, max_bits)
    assert bits_C.dtype == torch.int64
    assert bits_C.tolist() == _slow_allocation(variance_C.tolist(), budget, max_bits)
    assert int(bits_C.sum()) == min(budget, max_bits * 24)


def test_allocation_by_hand() -> None:
    # gains of the first two bits: .6366 and .2459 of the variance; 1.0: .64 .25, 0.3: .19 .07, 0.01: .006
    assert allocate_bits(torch.tensor([0.01, 1.0, 0.3, 0.0]), 3).tolist() == [0, 2, 1, 0]
    assert allocate_bits(torch.tensor([1.0, 1.0, 1.0]), 4).tolist() == [2, 1, 1]
    assert allocate_bits(torch.tensor([0.0, math.nan, 1.0]), 3, max_bits=2).tolist() == [1, 0, 2]


def test_allocation_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_bits=9 "):
        allocate_bits(torch.ones(2), 3, 9)
    with pytest.raises(ValueError, match="budget=-1 "):
        allocate_bits(torch.ones(2), -1)


def test_absmax_by_hand() -> None:
    z_NC = torch.tensor([[7.0, -3.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0], [-0.7, 0.1, 0.36, 0.7]])
    codes_NC, scale_N = absmax_codes(z_NC, 4)
    assert codes_NC.dtype == torch.uint8
    assert codes_NC.tolist() == [[14, 4, 8, 7], [7, 7, 7, 7], [0, 8, 11, 14]]
    torch.testing.assert_close(scale_N, torch.tensor([1.0, 0.0, 0.1]))
    expected = torch.tensor([[7.0, -3.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-0.7, 0.1, 0.4, 0.7]])
    torch.testing.assert_close(absmax_values(codes_NC, scale_N, 4), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_absmax_errs_by_half_a_level_and_a_row_codes_alike_in_any_batch(bits: int) -> None:
    z_NC = _randn(40, 29).bfloat16() * torch.exp(3 * _randn(40, 1, seed=1))
    codes_NC, scale_N = absmax_codes(z_NC, bits)
    assert int(codes_NC.amax()) <= 2**bits - 2
    error_NC = (absmax_values(codes_NC, scale_N, bits) - z_NC.float()).abs()
    assert bool((error_NC <= scale_N[:, None] * 0.5001).all())
    alone, _ = absmax_codes(z_NC[7:8], bits)
    assert torch.equal(alone, codes_NC[7:8])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_absmax_stochastic_rounding_is_unbiased(bits: int) -> None:
    z_NC = _randn(3, 31)
    many = z_NC.repeat(20_000, 1)
    codes, scale = absmax_codes(many, bits, _generator(3))
    assert int(codes.amax()) <= 2**bits - 2
    draws = absmax_values(codes, scale, bits).view(20_000, 3, 31)
    error = (draws.mean(0) - z_NC).abs()
    assert bool((error < 5 * draws.std(0) / math.sqrt(20_000) + 1e-5).all())
    assert float(draws.std(0).amax()) > 0.4 * float(scale.amin())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_absmax_rows_that_are_not_finite_decode_to_nan_and_the_others_do_not(bad: float) -> None:
    z_NC = _randn(3, 8)
    z_NC[1, 4] = bad
    for generator in (None, _generator(0)):
        codes_NC, scale_N = absmax_codes(z_NC, 3, generator)
        assert int(codes_NC.amax()) <= 6
        values_NC = absmax_values(codes_NC, scale_N, 3)
        assert bool(values_NC[1].isnan().all())
        assert bool(values_NC[[0, 2]].isfinite().all())


def test_absmax_of_no_rows_and_of_tiny_numbers() -> None:
    codes_NC, scale_N = absmax_codes(torch.empty(0, 5), 4)
    assert absmax_values(codes_NC, scale_N, 4).shape == (0, 5)
    tiny = torch.full((1, 3), 1e-45)  # its scale underflows to zero
    assert absmax_values(*absmax_codes(tiny, 8), 8).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("bits", [1, 9])
def test_absmax_needs_two_to_eight_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits={bits} "):
        absmax_codes(torch.ones(1, 2), bits)


def test_mixed_codes_are_those_of_each_channel() -> None:
    bits_C = torch.tensor([1, 3, 8, 2, 5, 4, 7, 6], dtype=torch.int32)
    z_NC = torch.randn(500, 8, generator=torch.Generator().manual_seed(4))
    z_NC[3, 2], z_NC[4, 0], z_NC[5, 7] = math.nan, math.inf, -1e30
    codes_NC = mixed_codes(z_NC, bits_C)
    assert codes_NC.dtype == torch.uint8
    values_NC = mixed_values(codes_NC, bits_C)
    for channel, bits in enumerate(bits_C.tolist()):
        codes_N = gaussian_codes(z_NC[:, channel], bits)
        assert torch.equal(codes_NC[:, channel], codes_N)
        assert torch.equal(values_NC[:, channel], gaussian_values(codes_N, bits, torch.float32))
