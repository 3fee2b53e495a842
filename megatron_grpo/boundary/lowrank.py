"""PowerSGD at a boundary: rows cross as their coordinates in an orthonormal basis Q.

Legend: N rows, H hidden, r rank.
"""

from typing import Any

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.ops.lowrank import expand, project


class LowRankCodec(Codec):
    """P = X Q crosses, the receiver uses P Q^T. There is no straight-through: backward is a projector of its own.

    Args:
        basis: Q and its staging; the two directions may share one.
        dtype: number format of P on the wire.
        learns: whether :meth:`observe` feeds the basis (a shared basis learns from the forward rows alone).
    """

    def __init__(self, basis: Basis, dtype: torch.dtype, *, learns: bool = True) -> None:
        self.basis: Basis = basis
        self.learns = learns
        self._dtype = dtype

    def payload(self, rows: int, like: torch.Tensor | None = None) -> torch.Tensor:
        rank = self.basis.current.shape[1]
        return torch.empty(rows, rank, dtype=self._dtype, device=like.device if like is not None else None)

    def _basis(self, like: torch.Tensor) -> torch.Tensor:
        if self.basis.current.device != like.device:
            self.basis.current = self.basis.current.to(like.device)
        return self.basis.current

    def encode(self, x_NH: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        return project(x_NH, self._basis(x_NH)).to(self._dtype).contiguous()

    def decode(self, payload: torch.Tensor, positions_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return expand(payload, self._basis(payload), dtype)

    def observe(self, x_NH: torch.Tensor) -> None:
        if self.learns:
            self.basis.observe(x_NH)

    def commit(self) -> None:
        self.basis.commit()

    def state_dict(self) -> dict[str, Any]:
        return self.basis.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.basis.load_state_dict(state)
