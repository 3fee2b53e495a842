"""Random coordinates: exactly k of H numbers of every row, drawn from a seed that both ends share.

Legend: S sequence, N rows, H hidden, k kept.
"""

import torch

_CHUNK = 64


def coordinate_table(length: int, hidden: int, k: int, seed: int) -> torch.Tensor:
    """k distinct coordinates for each position, ascending, int64 ``[S, k]`` on the CPU.

    Every set of k is equally likely. A position's row depends on (hidden, k, seed, position) alone: a longer
    table extends a shorter one. Whole chunks are drawn for that reason.

    Raises:
        ValueError: ``k`` outside 1..``hidden``.
    """
    if not 1 <= k <= hidden:
        raise ValueError(f"k={k} must be from 1 to the hidden size {hidden}")
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.empty(0, k, dtype=torch.int64)]
    for _ in range(0, length, _CHUNK):
        # fp64 keys: no ties, whose order could differ from machine to machine
        keys_cH = torch.rand(_CHUNK, hidden, generator=generator, dtype=torch.float64)
        chunks.append(keys_cH.topk(k, dim=-1).indices.sort(dim=-1).values)
    return torch.cat(chunks)[:length]


def gather_coordinates(x_NH: torch.Tensor, index_Nk: torch.Tensor) -> torch.Tensor:
    """The kept numbers of each row, ``[N, k]``, in x's dtype."""
    return x_NH.gather(-1, index_Nk)


def scatter_coordinates(values_Nk: torch.Tensor, index_Nk: torch.Tensor, hidden: int) -> torch.Tensor:
    """Rows ``[N, H]`` with the kept numbers times H/k in their places, zero elsewhere; of the values' dtype.

    Over random coordinates the mean of a row is the row that was gathered from.
    """
    rows, k = values_Nk.shape
    out_NH = values_Nk.new_zeros(rows, hidden)
    return out_NH.scatter(-1, index_Nk, values_Nk * (hidden / k))
