"""The rows of a boundary that cross a link: which they are, and what both ends know of them.

Legend: B sequences of a micro-batch, S columns, N rows that carry a token, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch


class SequenceMemory:
    """What is remembered of the sequences of a micro-batch while their tokens cross one by one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, purpose: str, sequences: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The last row of every sequence, fp32 ``[B, H]``, zeros at first, and whether there was one, bool ``[B]``.

        Whoever asks for ``purpose`` reads and writes them.
        """
        if purpose not in self._kept:
            last_BH = torch.zeros(sequences, hidden, device=device)
            self._kept[purpose] = last_BH, torch.zeros(sequences, dtype=torch.bool, device=device)
        return self._kept[purpose]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which sequences of a rollout a micro-batch is made of.

    Attributes:
        owners_B: int64, number of each in the rollout.
        padding_B: int64, columns before its first token.
    """

    owners_B: torch.Tensor
    padding_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in column order (all of column 0 first). Both ends hold the same, so nothing of it crosses.

    Attributes:
        index_N: places in the flattened ``[S * B]`` order.
        positions_N: column of each row in its sequence.
        sequences_N: number of each row's sequence in the micro-batch.
        tokens_N: id of each row's token, where it is known.
        batch: B.
        memory: what crossed before of the same sequences; ``None`` where they cross as a whole.
        origin: the rollout's sequences that these are, where that matters.
    """

    index_N: torch.Tensor
    positions_N: torch.Tensor
    sequences_N: torch.Tensor
    tokens_N: torch.Tensor | None
    batch: int
    memory: SequenceMemory | None = field(default=None, compare=False)
    origin: Origin | None = field(default=None, compare=False)

    @property
    def owners_N(self) -> torch.Tensor:
        """int64: number of each row's sequence in the rollout that it comes from."""
        assert self.origin is not None, "the rows of a rollout"
        return self.origin.owners_B[self.sequences_N]

    @property
    def places_N(self) -> torch.Tensor:
        """int64: place of each row's token in its sequence, whatever the padding before it."""
        assert self.origin is not None, "the rows of a rollout"
        return self.positions_N - self.origin.padding_B[self.sequences_N]

    def where(self, keep_N: torch.Tensor) -> "Rows":
        """Those where ``keep_N`` is True; whole sequences, or what is remembered of them goes wrong."""
        if bool(keep_N.all()):
            return self
        return replace(
            self,
            index_N=self.index_N[keep_N],
            positions_N=self.positions_N[keep_N],
            sequences_N=self.sequences_N[keep_N],
            tokens_N=None if self.tokens_N is None else self.tokens_N[keep_N],
        )

    def __len__(self) -> int:
        return len(self.index_N)

    def columns(self) -> Iterator[slice]:
        """The rows of one column after the other."""
        _, counts = torch.unique_consecutive(self.positions_N, return_counts=True)
        start = 0
        for count in counts.tolist():
            yield slice(start, start + count)
            start += count

    def previous(self) -> torch.Tensor:
        """int64 ``[N]``: the row before each in its sequence, -1 for the first of this micro-batch."""
        order_N = self.sequences_N.argsort(stable=True)  # sequence by sequence, each in column order
        sorted_N = self.sequences_N[order_N]
        earlier_N = order_N.roll(1)
        earlier_N[sorted_N != sorted_N.roll(1)] = -1
        earlier_N[:1] = -1
        return torch.empty_like(order_N).index_copy_(0, order_N, earlier_N)

    def select(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """The rows ``[N, H]`` of a boundary tensor; the tensor's own memory where every row crosses."""
        flat_H = x_SBH.reshape(-1, x_SBH.shape[-1])
        return flat_H if len(self) == len(flat_H) else flat_H[self.index_N]

    def scatter(self, x_NH: torch.Tensor, columns: int) -> torch.Tensor:
        """``[S, B, H]`` with the rows in their places and zeros elsewhere."""
        if len(self) < columns * self.batch:
            rows_NH, x_NH = x_NH, x_NH.new_zeros(columns * self.batch, x_NH.shape[-1])
            x_NH[self.index_N] = rows_NH
        return x_NH.view(columns, self.batch, -1)


class Walk:
    """Rows along their sequences, in this micro-batch and, where there is a memory, from an earlier one on.

    Either all rows are known at once (:meth:`before`, then :meth:`leave`), or each column when it is reached.

    Args:
        purpose: names what is kept in a sequence's memory.

    Attributes:
        first_N: whether a row is the first of its sequence.
    """

    def __init__(self, rows: Rows, purpose: str, hidden: int) -> None:
        device = rows.index_N.device
        memory = SequenceMemory() if rows.memory is None else rows.memory
        self._rows, self._before_N = rows, rows.previous()
        self._last_BH, self._begun_B = memory.of(purpose, rows.batch, hidden, device)
        self.first_N = (self._before_N < 0) & ~self._begun_B[rows.sequences_N]
        self._begun_B[rows.sequences_N] = True

    def before(self, x_NH: torch.Tensor) -> torch.Tensor:
        """The row before each, out of all of them: fp32 ``[N, H]``, zeros before the first of a sequence."""
        carried_NH = self._last_BH[self._rows.sequences_N]
        return torch.where(self._before_N[:, None] < 0, carried_NH, x_NH[self._before_N].float())

    def leave(self, x_NH: torch.Tensor) -> None:
        """Remember the last row of every sequence."""
        last_N = torch.ones_like(self.first_N)
        last_N[self._before_N[self._before_N >= 0]] = False
        self._last_BH[self._rows.sequences_N[last_N]] = x_NH[last_N].float()

    def columns(self) -> Iterator[slice]:
        """One column after the other; :meth:`pass_on` each before the next is reached."""
        return self._rows.columns()

    def before_column(self, column: slice) -> torch.Tensor:
        """The row before each of a column, as :meth:`before`."""
        return self._last_BH[self._rows.sequences_N[column]]

    def pass_on(self, column: slice, x_nH: torch.Tensor) -> None:
        """The rows of a column, for those that follow."""
        self._last_BH[self._rows.sequences_N[column]] = x_nH


def carrying_rows(
    carrying_BS: torch.Tensor,
    tokens_BS: torch.Tensor | None = None,
    *,
    start: int = 0,
    memory: SequenceMemory | None = None,
    origin: Origin | None = None,
) -> Rows:
    """The rows of columns ``start`` and on, where ``carrying_BS`` is True."""
    carrying_SB = carrying_BS.t()
    columns_N, sequences_N = carrying_SB.nonzero(as_tuple=True)
    return Rows(
        index_N=columns_N * carrying_SB.shape[1] + sequences_N,
        positions_N=columns_N + start,
        sequences_N=sequences_N,
        tokens_N=None if tokens_BS is None else tokens_BS.t()[carrying_SB],
        batch=carrying_SB.shape[1],
        memory=memory,
        origin=origin,
    )


def all_rows(columns: int, batch: int, device: torch.device) -> Rows:
    """Every row of ``[S, B]``."""
    return carrying_rows(torch.ones(batch, columns, dtype=torch.bool, device=device))
