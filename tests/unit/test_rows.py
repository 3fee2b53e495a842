"""Which rows of a boundary cross, worked out by hand. Legend: B sequences, S columns, N rows, H hidden."""

import pytest
import torch

from megatron_grpo.ops.rows import Rows, SequenceMemory, Walk, all_rows, carrying_rows

# Three sequences of four columns: the first lacks its last column, the second its first two, the third has a gap.
CARRYING_BS = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 1, 1]], dtype=torch.bool)
TOKENS_BS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
# (column, sequence) of every row, all of column 0 first
PLACES = [(0, 0), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2)]


def rows(start: int = 0) -> Rows:
    return carrying_rows(CARRYING_BS, TOKENS_BS, start=start)


def nothing() -> Rows:
    return carrying_rows(torch.zeros(3, 4, dtype=torch.bool))


def test_rows_are_in_column_order_and_know_their_tokens() -> None:
    found = rows()
    assert len(found) == 8 and found.batch == 3
    assert list(zip(found.positions_N.tolist(), found.sequences_N.tolist(), strict=True)) == PLACES
    assert found.index_N.tolist() == [column * 3 + sequence for column, sequence in PLACES]
    assert found.tokens_N is not None
    assert found.tokens_N.tolist() == [10, 30, 11, 12, 22, 32, 23, 33]
    assert carrying_rows(CARRYING_BS).tokens_N is None


def test_a_later_start_moves_positions_and_nothing_else() -> None:
    """A column that is decoded alone is column 0 of its block and column ``start`` of its sequence."""
    first, later = rows(), rows(start=7)
    assert later.positions_N.tolist() == [column + 7 for column, _ in PLACES]
    assert torch.equal(later.index_N, first.index_N) and torch.equal(later.sequences_N, first.sequences_N)


def test_select_takes_what_crosses_and_scatter_puts_it_back() -> None:
    x_SBH = torch.arange(4 * 3 * 2, dtype=torch.float32).view(4, 3, 2) + 1
    chosen_NH = rows().select(x_SBH)
    assert chosen_NH.tolist() == [x_SBH[column, sequence].tolist() for column, sequence in PLACES]
    back_SBH = rows().scatter(chosen_NH, 4)
    for column in range(4):
        for sequence in range(3):
            wanted = x_SBH[column, sequence] if (column, sequence) in PLACES else torch.zeros(2)
            assert torch.equal(back_SBH[column, sequence], wanted)
    assert torch.equal(rows().select(back_SBH), chosen_NH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_all_rows_cross_nothing_is_copied(dtype: torch.dtype) -> None:
    x_SBH = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    every = all_rows(4, 3, x_SBH.device)
    assert every.index_N.tolist() == list(range(12))
    chosen_NH = every.select(x_SBH)
    assert chosen_NH.data_ptr() == x_SBH.data_ptr()
    back_SBH = every.scatter(chosen_NH, 4)
    assert back_SBH.dtype == dtype and torch.equal(back_SBH, x_SBH)


def test_previous_is_the_row_before_in_the_same_sequence() -> None:
    """By hand, rows numbered as in PLACES: sequence 0 is rows 0 2 3, sequence 1 rows 4 6, sequence 2 rows 1 5 7."""
    assert rows().previous().tolist() == [-1, -1, 0, 2, -1, 1, 4, 5]
    assert rows(start=9).previous().tolist() == rows().previous().tolist()
    assert all_rows(3, 2, torch.device("cpu")).previous().tolist() == [-1, -1, 0, 1, 2, 3]


def test_columns_cut_the_rows_where_the_column_changes() -> None:
    assert list(rows().columns()) == [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 8)]
    gap = carrying_rows(torch.tensor([[True, False, True]]))
    assert list(gap.columns()) == [slice(0, 1), slice(1, 2)]


def test_memory_is_one_table_a_purpose_and_starts_empty() -> None:
    memory, device = SequenceMemory(), torch.device("cpu")
    last_BH, has_B = memory.of("forward 0", 3, 2, device)
    assert torch.equal(last_BH, torch.zeros(3, 2)) and has_B.tolist() == [False] * 3
    last_BH[1], has_B[1] = 4.0, True
    again_BH, still_B = memory.of("forward 0", 3, 2, device)
    assert again_BH.tolist() == [[0, 0], [4, 4], [0, 0]] and still_B.tolist() == [False, True, False]
    assert not any(part.any() for part in memory.of("forward 1", 3, 2, device))
    assert carrying_rows(CARRYING_BS, memory=memory).memory is memory
    assert rows().memory is None


def test_no_rows_are_fine() -> None:
    none = nothing()
    assert len(none) == 0 and none.previous().tolist() == [] and list(none.columns()) == []
    assert none.select(torch.ones(4, 3, 2)).shape == (0, 2)
    assert torch.equal(none.scatter(torch.ones(0, 2), 4), torch.zeros(4, 3, 2))


def _numbered(found: Rows) -> torch.Tensor:
    """Rows ``[N, 1]`` that hold their tokens."""
    assert found.tokens_N is not None
    return found.tokens_N[:, None].float()


def test_a_walk_knows_the_row_before_each_at_once_and_by_column() -> None:
    """Of the third sequence the second column is missing: 32 follows 30."""
    wanted = [[0.0], [0.0], [10.0], [11.0], [0.0], [30.0], [22.0], [32.0]]
    found = rows()
    at_once = Walk(found, "x", 1)
    assert at_once.first_N.tolist() == [True, True, False, False, True, False, False, False]
    assert at_once.before(_numbered(found)).tolist() == wanted
    by_column, before = Walk(found, "x", 1), []
    for column in by_column.columns():
        before += by_column.before_column(column).tolist()
        by_column.pass_on(column, _numbered(found)[column])
    assert before == wanted


@pytest.mark.parametrize("by_column", [False, True])
def test_a_walk_goes_on_where_the_one_before_it_left(by_column: bool) -> None:
    memory, before, first = SequenceMemory(), [], []
    for part in (slice(0, 2), slice(2, 3), slice(3, 4)):
        found = carrying_rows(CARRYING_BS[:, part], TOKENS_BS[:, part], memory=memory)
        walk = Walk(found, "x", 1)
        first += walk.first_N.tolist()
        if by_column:
            for column in walk.columns():
                before += walk.before_column(column).tolist()
                walk.pass_on(column, _numbered(found)[column])
        else:
            before += walk.before(_numbered(found)).tolist()
            walk.leave(_numbered(found))
    assert first == [True, True, False, False, True, False, False, False]
    assert before == [[0.0], [0.0], [10.0], [11.0], [0.0], [30.0], [22.0], [32.0]]
