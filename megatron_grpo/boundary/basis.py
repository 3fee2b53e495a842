"""Q, the orthonormal basis of one direction of one boundary, and how it learns.

PowerSGD (Vogels et al. 2019) takes one warm power step on weight gradients; here the same step runs on boundary rows,
and only on the rows of an uncompressed pass, which both ends hold. Legend: N rows, H hidden, r rank.
"""

from typing import Any

import torch

from megatron_grpo.ops.lowrank import orthonormal, power_sketch, random_basis


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
        """Close the sketch: stage orth(V), to be used from the next :meth:`commit` on; returns what will be in use.

        A sketch that is zero or not finite teaches nothing (no gradient crossed, or a bad one): Q stays. Both ends hold
        the same sketch, so they decide alike.
        """
        self.sketch = None
        if not bool(sketch_Hr.isfinite().all()) or not bool(sketch_Hr.any()):
            return self.current
        self.staged = orthonormal(sketch_Hr).contiguous()
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
