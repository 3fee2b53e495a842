"""Q, the orthonormal basis of one direction of one boundary, and how it learns.

PowerSGD (Vogels et al. 2019) takes one warm power step on weight gradients; here the same step runs on boundary rows.
Legend: N rows, H hidden, r rank.
"""

from typing import Any

import torch

from megatron_grpo.boundary.codec import Learner
from megatron_grpo.ops.lowrank import orthonormal_with_spread, power_sketch, random_basis
from megatron_grpo.ops.rows import Rows


class Basis(Learner):
    """Q ``[H, r]`` fp32, and the spread ``[r]`` of the rows' coordinates in it (up to a common factor).

    Args:
        dtype: the number format in which Q crosses, and to which both ends round it. fp32 keeps it orthonormal.
        normalised: fit on rows divided by their norm, so that a few huge ones do not decide it.
        learns: whether rows are observed at all; the random basis of a control is not.
    """

    def __init__(
        self,
        hidden: int,
        rank: int,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        normalised: bool = False,
        learns: bool = True,
    ) -> None:
        # Rounded from the start, so that a basis that is sent before it learned anything is equal at both ends.
        self.current = random_basis(hidden, rank, seed).to(dtype).float()
        self.spread = torch.ones(rank)
        self._dtype, self._normalised, self._learns = dtype, normalised, learns
        self._staged: torch.Tensor | None = None
        self._sketch: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        return self._sketch is not None

    def to(self, device: torch.device) -> "Basis":
        """This basis, living on ``device`` from now on."""
        if self.current.device != device:
            self.current, self.spread = self.current.to(device), self.spread.to(device)
        return self

    def observe(self, x_NH: torch.Tensor, rows: Rows) -> None:
        """V += X^T (X Q), fp32, with the Q in use."""
        if not self._learns:
            return
        x_NH = x_NH.float()
        if self._normalised:
            x_NH = torch.nn.functional.normalize(x_NH, dim=-1)
        part = power_sketch(x_NH, self.to(x_NH.device).current)
        self._sketch = part if self._sketch is None else self._sketch.add_(part)

    def observe_part(self, part_NH: torch.Tensor, p_Nr: torch.Tensor) -> None:
        """V += X_i^T P of rows that are a sum of parts, X = sum X_i, where P = X Q is known and X need not be.

        Over the ranks that hold the parts these add up to X^T (X Q): the sketch of :meth:`observe`.
        """
        if self._learns:
            part = part_NH.float().T @ p_Nr.float()
            self._sketch = part if self._sketch is None else self._sketch.add_(part)

    def sums(self) -> list[torch.Tensor]:
        return [] if self._sketch is None else [self._sketch]

    def stage(self) -> None:
        sketch_Hr, self._sketch = self._sketch, None
        if sketch_Hr is None or not bool(sketch_Hr.isfinite().all()) or not bool(sketch_Hr.any()):
            return  # no gradient crossed, or a bad one: Q stays, at both ends alike
        basis_Hr, spread_r = orthonormal_with_spread(sketch_Hr)
        self._staged = torch.cat([basis_Hr, spread_r[None]]).to(self._dtype)

    def flat(self) -> torch.Tensor:
        if self._staged is not None:
            return self._staged
        return torch.cat([self.current, self.spread[None]]).to(self._dtype)

    def stage_flat(self, flat: torch.Tensor) -> None:
        self._staged = flat

    def commit(self) -> None:
        if self._staged is not None:
            whole = self._staged.float()
            self.current, self.spread, self._staged = whole[:-1].contiguous(), whole[-1].contiguous(), None

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self.current.clone(),
            "spread": self.spread.clone(),
            "staged": None if self._staged is None else self._staged.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current, self.spread = state["current"].clone(), state["spread"].clone()
        self._staged, self._sketch = state["staged"], None
