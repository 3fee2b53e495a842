"""Low-rank coding against linear algebra done in another way. Legend: N rows, H hidden, r rank."""

import hashlib
import math

import pytest
import torch

from megatron_grpo.ops.lowrank import (
    digest,
    error_sums,
    expand,
    orthonormal,
    orthonormal_with_spread,
    power_sketch,
    project,
    random_basis,
    relative_error,
    seed_of,
    worth_compressing,
)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _assert_orthonormal(basis_Hr: torch.Tensor) -> None:
    gram_rr = basis_Hr.double().T @ basis_Hr.double()
    torch.testing.assert_close(gram_rr, torch.eye(basis_Hr.shape[1]).double(), atol=2e-6, rtol=0)


def _gram_schmidt(sketch_Hr: torch.Tensor) -> torch.Tensor:
    """Slow reference in fp64: positive diagonal of R by construction."""
    columns: list[torch.Tensor] = []
    for vector_H in sketch_Hr.double().T:
        for column_H in columns:
            vector_H = vector_H - (column_H @ vector_H) * column_H
        columns.append(vector_H / vector_H.norm())
    return torch.stack(columns, dim=1)


def test_random_basis_is_orthonormal_and_repeats_bit_for_bit() -> None:
    basis_Hr = random_basis(96, 5, 7)
    assert basis_Hr.shape == (96, 5)
    assert basis_Hr.dtype == torch.float32
    _assert_orthonormal(basis_Hr)
    assert torch.equal(basis_Hr, random_basis(96, 5, 7))
    assert not torch.equal(basis_Hr, random_basis(96, 5, 8))


def test_random_basis_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    random_basis(16, 4, 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("rank", [0, -1, 97])
def test_random_basis_refuses_a_rank_that_does_not_fit(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} "):
        random_basis(96, rank, 0)


def test_orthonormal_by_hand() -> None:
    sketch_Hr = torch.tensor([[3.0, 1.0], [4.0, 0.0]])
    torch.testing.assert_close(orthonormal(sketch_Hr), torch.tensor([[0.6, 0.8], [0.8, -0.6]]))


@pytest.mark.parametrize("seed", range(5))
def test_orthonormal_is_gram_schmidt(seed: int) -> None:
    sketch_Hr = _randn(40, 6, seed=seed)
    torch.testing.assert_close(orthonormal(sketch_Hr).double(), _gram_schmidt(sketch_Hr), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e15])
def test_orthonormal_does_not_depend_on_scale(scale: float) -> None:
    sketch_Hr = _randn(32, 4)
    torch.testing.assert_close(orthonormal(sketch_Hr * scale), orthonormal(sketch_Hr), atol=1e-5, rtol=0)


def test_spread_is_the_deviation_of_coordinates_up_to_a_factor() -> None:
    """Rows along three orthogonal directions with energies 64, 16 and 4: spreads 8, 4 and 2 over 8."""
    axes_Hr = random_basis(12, 3, 2)
    x_NH = torch.diag(torch.tensor([8.0, 4.0, 2.0])) @ axes_Hr.T
    basis_Hr, spread_r = orthonormal_with_spread(power_sketch(x_NH, axes_Hr))
    torch.testing.assert_close(basis_Hr, axes_Hr, atol=1e-5, rtol=0)
    torch.testing.assert_close(spread_r, torch.tensor([1.0, 0.5, 0.25]), atol=1e-5, rtol=0)
    _, small_r = orthonormal_with_spread(-1e-6 * axes_Hr * torch.tensor([4.0, 1.0, 0.0]))
    torch.testing.assert_close(small_r, torch.tensor([1.0, 0.5, 0.0]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_orthonormal_works_in_fp32_whatever_comes_in(dtype: torch.dtype) -> None:
    basis_Hr = orthonormal(_randn(64, 8).to(dtype))
    assert basis_Hr.dtype == torch.float32
    _assert_orthonormal(basis_Hr)


def test_h1_zero_sketch_gives_a_finite_orthonormal_basis() -> None:
    _assert_orthonormal(orthonormal(torch.zeros(96, 5)))


def test_h1_sketch_without_full_rank_gives_a_finite_orthonormal_basis() -> None:
    column_H1 = _randn(96, 1)
    for sketch_Hr in (
        column_H1.expand(96, 5),
        torch.cat([column_H1, torch.zeros(96, 4)], dim=1),
        torch.cat([torch.zeros(96, 2), _randn(96, 3)], dim=1),
        _randn(96, 2) @ _randn(2, 5, seed=1),
    ):
        basis_Hr = orthonormal(sketch_Hr)
        _assert_orthonormal(basis_Hr)
        left_Hr = sketch_Hr - expand(project(sketch_Hr.T, basis_Hr), basis_Hr, torch.float32).T
        assert left_Hr.abs().max() < 1e-5  # the columns that are there are spanned


def test_h1_zero_rows_come_back_as_zero() -> None:
    basis_Hr = orthonormal(power_sketch(torch.zeros(10, 16), random_basis(16, 4, 0)))
    decoded_NH = expand(project(torch.zeros(10, 16), basis_Hr), basis_Hr, torch.float32)
    assert torch.equal(decoded_NH, torch.zeros(10, 16))


def test_h1_rank_above_the_true_rank_is_exact() -> None:
    x_NH = _randn(50, 2) @ _randn(2, 24, seed=1)
    basis_Hr = orthonormal(power_sketch(x_NH, random_basis(24, 6, 0)))
    decoded_NH = expand(project(x_NH, basis_Hr), basis_Hr, torch.float32)
    torch.testing.assert_close(decoded_NH, x_NH, atol=1e-4, rtol=0)


def test_project_and_expand_by_hand() -> None:
    basis_Hr = torch.tensor([[1.0, 0.0], [0.0, 0.6], [0.0, 0.8]])
    p_Nr = project(torch.tensor([[2.0, 5.0, 10.0]]), basis_Hr)
    torch.testing.assert_close(p_Nr, torch.tensor([[2.0, 11.0]]))
    torch.testing.assert_close(expand(p_Nr, basis_Hr, torch.float32), torch.tensor([[2.0, 6.6, 8.8]]))


@pytest.mark.parametrize(
    ("given", "maths"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_project_and_expand_dtypes(given: torch.dtype, maths: torch.dtype) -> None:
    basis_Hr = random_basis(16, 16, 0)
    x_NH = _randn(7, 16).to(given)
    p_Nr = project(x_NH, basis_Hr)
    assert p_Nr.dtype == maths
    back_NH = expand(p_Nr, basis_Hr, given)
    assert back_NH.dtype == given
    torch.testing.assert_close(back_NH.double(), x_NH.double(), atol=1e-5, rtol=0)  # full rank loses nothing


def test_project_multiplies_bf16_rows_in_fp32() -> None:
    x_NH = _randn(8, 512).bfloat16()
    basis_Hr = random_basis(512, 8, 0)
    exact_Nr = x_NH.double() @ basis_Hr.double()
    torch.testing.assert_close(project(x_NH, basis_Hr).double(), exact_Nr, atol=1e-5, rtol=0)


def test_power_sketch_equals_the_gram_product_and_adds_up_over_rows() -> None:
    x_NH, basis_Hr = _randn(30, 12), random_basis(12, 3, 1)
    exact_Hr = (x_NH.double().T @ x_NH.double()) @ basis_Hr.double()
    torch.testing.assert_close(power_sketch(x_NH, basis_Hr).double(), exact_Hr, atol=1e-4, rtol=1e-5)
    parts_Hr = power_sketch(x_NH[:11], basis_Hr) + power_sketch(x_NH[11:], basis_Hr)
    torch.testing.assert_close(parts_Hr.double(), exact_Hr, atol=1e-4, rtol=1e-5)
    assert power_sketch(x_NH.bfloat16(), basis_Hr).dtype == torch.float32


def test_power_steps_find_the_leading_directions() -> None:
    spectrum_H = torch.tensor([10.0, 8.0, 6.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    right_HH = random_basis(8, 8, 5)
    x_NH = random_basis(40, 8, 4) @ torch.diag(spectrum_H) @ right_HH.T
    basis_Hr = random_basis(8, 3, 0)
    for _ in range(3):
        basis_Hr = orthonormal(power_sketch(x_NH, basis_Hr))
    error = relative_error(x_NH, expand(project(x_NH, basis_Hr), basis_Hr, torch.float32))
    best = math.sqrt(5 * 0.1**2 / (100 + 64 + 36 + 5 * 0.1**2))
    assert float(error) == pytest.approx(best, rel=1e-3)


def test_error_sums_and_relative_error_by_hand() -> None:
    x_NH = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    decoded_NH = torch.tensor([[3.0, 1.0], [4.0, 12.0]])
    sums = error_sums(x_NH, decoded_NH)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [25.0, 169.0]
    assert float(relative_error(x_NH, decoded_NH)) == pytest.approx(5 / 13)


def test_relative_error_of_zero_rows() -> None:
    zero_NH = torch.zeros(2, 3)
    assert float(relative_error(zero_NH, zero_NH)) == 0.0
    assert float(relative_error(zero_NH, zero_NH + 1)) == math.inf


def test_error_sums_of_many_rows_do_not_drift() -> None:
    x_NH = torch.full((1 << 15, 64), 0.1)
    exact = (1 << 21) * float(torch.tensor(0.1).double()) ** 2
    assert float(error_sums(x_NH, torch.zeros_like(x_NH))[1]) == pytest.approx(exact, rel=1e-7)


def test_seed_of_separates_boundaries_and_directions_and_is_a_generator_seed() -> None:
    seeds = {
        seed_of(seed, boundary, way)
        for seed in (0, 1, 12)
        for boundary in (0, 1, 21)
        for way in ("forward", "backward")
    }
    assert len(seeds) == 18
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_seed_of_is_the_same_number_everywhere() -> None:
    # printf 3/1/backward | sha256sum, first 8 bytes, little-endian, top 62 bits
    assert seed_of(3, 1, "backward") == int.from_bytes(bytes.fromhex("d0c6d66d49f92129"), "little") >> 2


def test_digest_is_the_first_bytes_of_sha256_over_the_bits() -> None:
    basis_Hr = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    bits = bytes.fromhex("0000803f 00000000 00000000 0000803f".replace(" ", ""))  # little-endian floats
    expected = int.from_bytes(hashlib.sha256(bits).digest()[:8], "little", signed=True)
    assert digest(basis_Hr).dtype == torch.int64
    assert digest(basis_Hr).tolist() == [expected]


def test_digest_sees_one_bit_and_not_the_memory_layout() -> None:
    basis_Hr = random_basis(10, 3, 0)
    bits = digest(basis_Hr)
    assert torch.equal(bits, digest(basis_Hr.T.contiguous().T))
    other_Hr = basis_Hr.clone()
    other_Hr[4, 1] = torch.nextafter(other_Hr[4, 1], torch.tensor(2.0))
    assert not torch.equal(bits, digest(other_Hr))


def test_h4_worth_compressing() -> None:
    assert worth_compressing(2048, 896, 4, 2)
    assert not worth_compressing(8, 896, 4, 2)
    assert worth_compressing(2048, 896, 4, 155.8)
    assert not worth_compressing(2048, 896, 4, 155.9)
    assert not worth_compressing(4, 4, 1, 2)  # equal is not smaller
