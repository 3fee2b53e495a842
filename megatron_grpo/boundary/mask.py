"""Seeded random coordinates: k of H numbers of every row cross, scaled by H/k so that the mean is right.

Both ends draw the same coordinates from (seed, step), so no index crosses. Legend: N rows, H hidden, k kept.
"""

from typing import Any

import torch

from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.ops.mask import coordinate_table, gather_coordinates, scatter_coordinates
from megatron_grpo.ops.rows import Rows

_TABLE_GROWTH = 256


class MaskCodec(Codec):
    """Exactly k coordinates a row, drawn anew for every step and every place in the sequence."""

    def __init__(self, hidden: int, kept: int, dtype: torch.dtype, seed: int) -> None:
        self._hidden, self._kept, self._dtype, self._seed = hidden, kept, dtype, seed
        self._step = 0
        self._table = torch.empty(0, kept, dtype=torch.int64)

    def payload(self, rows: Rows) -> torch.Tensor:
        return torch.empty(len(rows), self._kept, dtype=self._dtype, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        return Encoded(gather_coordinates(x_NH, self._indices(rows.positions_N)).to(self._dtype).contiguous())

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        return scatter_coordinates(payload.to(dtype), self._indices(rows.positions_N), self._hidden)

    def begin_step(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._table = self._table[:0]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_step(state["step"])

    def _indices(self, positions_N: torch.Tensor) -> torch.Tensor:
        needed = int(positions_N.max()) + 1 if positions_N.numel() else 0
        if needed > len(self._table):
            length = -(-needed // _TABLE_GROWTH) * _TABLE_GROWTH
            self._table = coordinate_table(length, self._hidden, self._kept, self._seed + self._step * 1_000_003)
        return self._table.to(positions_N.device)[positions_N]
