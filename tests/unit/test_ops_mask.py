"""Random coordinates: exactness, independence of length, uniformity, unbiasedness. Legend: N, H, k."""

import pytest
import torch

from megatron_grpo.ops.mask import coordinate_table, gather_coordinates, scatter_coordinates


@pytest.mark.parametrize("k", [1, 5, 96])
def test_every_position_has_k_distinct_ascending_coordinates(k: int) -> None:
    table_Sk = coordinate_table(70, 96, k, 3)
    assert table_Sk.shape == (70, k)
    assert table_Sk.dtype == torch.int64
    for row in table_Sk.tolist():
        assert row == sorted(set(row))
        assert len(row) == k
        assert 0 <= row[0] <= row[-1] < 96


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 130])
def test_a_longer_table_extends_a_shorter_one(length: int) -> None:
    assert torch.equal(coordinate_table(200, 24, 3, 9)[:length], coordinate_table(length, 24, 3, 9))


def test_positions_and_seeds_differ_and_equal_seeds_agree() -> None:
    table_Sk = coordinate_table(200, 96, 5, 1)
    assert len({tuple(row) for row in table_Sk.tolist()}) == 200
    assert torch.equal(table_Sk, coordinate_table(200, 96, 5, 1))
    assert not torch.equal(table_Sk, coordinate_table(200, 96, 5, 2))


def test_table_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    coordinate_table(10, 8, 2, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_coordinates_are_uniform() -> None:
    length, hidden, k = 6400, 16, 4
    counts_H = coordinate_table(length, hidden, k, 0).flatten().bincount(minlength=hidden).double()
    expected = length * k / hidden
    # without replacement the variance of a count is smaller by (1 - k/H); 15 degrees: 37.7 is the 0.1 % point
    chi_square = (counts_H - expected).square().sum() / expected / (1 - k / hidden) * (hidden - 1) / hidden
    assert float(chi_square) < 37.7


@pytest.mark.parametrize("k", [0, 97])
def test_k_must_fit(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} "):
        coordinate_table(4, 96, k, 0)


def test_gather_and_scatter_by_hand() -> None:
    x_NH = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    index_Nk = torch.tensor([[0, 3], [1, 2]])
    values_Nk = gather_coordinates(x_NH, index_Nk)
    assert values_Nk.tolist() == [[1.0, 4.0], [6.0, 7.0]]
    expected = [[2.0, 0.0, 0.0, 8.0], [0.0, 12.0, 14.0, 0.0]]
    assert scatter_coordinates(values_Nk, index_Nk, 4).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_all_coordinates_is_exact(dtype: torch.dtype) -> None:
    x_NH = torch.randn(9, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    index_Nk = coordinate_table(9, 12, 12, 0)
    back_NH = scatter_coordinates(gather_coordinates(x_NH, index_Nk), index_Nk, 12)
    assert back_NH.dtype == dtype
    assert torch.equal(back_NH, x_NH)


def test_the_mean_over_draws_is_the_row() -> None:
    draws, hidden, k = 6400, 8, 2
    x_NH = torch.arange(1.0, 9.0).expand(draws, hidden)
    index_Nk = coordinate_table(draws, hidden, k, 4)
    mean_H = scatter_coordinates(gather_coordinates(x_NH, index_Nk), index_Nk, hidden).mean(dim=0)
    # each estimate is 4x with probability 1/4: standard deviation sqrt(3) x / sqrt(draws)
    standard_error_H = 3**0.5 * x_NH[0] / draws**0.5
    assert ((mean_H - x_NH[0]).abs() < 4 * standard_error_H).all()


def test_no_rows_pass_through() -> None:
    index_Nk = torch.empty(0, 3, dtype=torch.int64)
    assert scatter_coordinates(torch.empty(0, 3), index_Nk, 8).shape == (0, 8)
