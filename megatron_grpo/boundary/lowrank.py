"""PowerSGD at a boundary: rows cross as their coordinates in an orthonormal basis Q.

Vogels et al. 2019 (PowerSGD) compress weight gradients with one warm power step; here the same step runs on boundary
rows, and only on the rows of an uncompressed pass, which both ends hold. Legend: N rows, H hidden, r rank.
"""

from typing import Any

import torch

from megatron_grpo.boundary.codec import Codec
from megatron_grpo.ops.lowrank import expand, orthonormal, power_sketch, project, random_basis


class Basis:
    """Q ``[H, r]`` fp32 of one direction: the one in use, the one staged for the next step, and the open sketch."""

    def __init__(self, hidden: int, rank: int, seed: int) -> None:
        self.current = random_basis(hidden, rank, seed)
        self.staged: torch.Tensor | None = None
        self.sketch: torch.Tensor | None = None

    def observe(self, x_NH: torch.Tensor) -> None:
        """V += X^T (X Q), fp32, with the Q in use."""
        self.current = self.current.to(x_NH.device)
        part = power_sketch(x_NH, self.current)
        self.sketch = part if self.sketch is None else self.sketch.add_(part)

    def stage(self, sketch_Hr: torch.Tensor) -> torch.Tensor:
        """Close the sketch: stage orth(V), to be used from the next :meth:`commit` on; returns it."""
        self.staged = orthonormal(sketch_Hr)
        self.sketch = None
        return self.staged

    def commit(self) -> None:
        if self.staged is not None:
            self.current, self.staged = self.staged, None

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self.current.clone(),
            "staged": None if self.staged is None else self.staged.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current, self.staged, self.sketch = state["current"].clone(), state["staged"], None


class LowRankCodec(Codec):
    """P = X Q crosses, the receiver uses P Q^T. There is no straight-through: backward is a projector of its own.

    Args:
        basis: Q and its staging; the two directions may share one.
        dtype: number format of P on the wire.
        learns: whether :meth:`observe` feeds the basis (a shared basis learns from the forward rows alone).
    """

    def __init__(self, basis: Basis, dtype: torch.dtype, *, learns: bool = True) -> None:
        self.basis = basis
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
