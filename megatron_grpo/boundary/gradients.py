"""PowerSGD on the gradient of one weight matrix (Vogels et al. 2019, algorithms 1 and 2), between its means over ranks.

P <- orth(mean (g + e) Q); Q <- mean (g + e)^T P; what every replica uses is P Q^T, and each remembers what that
lacks of its own: e <- g + e - P Q^T, provided that the gradient was used. Replicas hold equal Q.
Legend: m rows, n columns, r rank.
"""

from typing import Any

import torch

from megatron_grpo.ops.lowrank import expand, orthonormal, project, random_basis


class GradientCodec:
    """The warm basis Q ``[n, r]`` and the remainder e ``[m, n]`` of this replica, both fp32.

    A tick is :meth:`left`, a mean over replicas, :meth:`right`, a mean over replicas, :meth:`decode`, :meth:`settle`. A
    gradient that is not finite on any replica decodes to one that is not finite.
    """

    def __init__(self, shape: torch.Size, rank: int, seed: int) -> None:
        self._q_nr = random_basis(shape[1], rank, seed)
        self._lost_mn = torch.zeros(shape)
        self._wanted_mn = self._p_mr = torch.empty(0)
        self._next: tuple[torch.Tensor, torch.Tensor] | None = None

    def left(self, grad_mn: torch.Tensor) -> torch.Tensor:
        """This replica's part of P, fp32 ``[m, r]``."""
        self._q_nr, self._lost_mn = self._q_nr.to(grad_mn.device), self._lost_mn.to(grad_mn.device)
        self._wanted_mn = grad_mn.float() + self._lost_mn
        return project(self._wanted_mn, self._q_nr)

    def right(self, mean_mr: torch.Tensor) -> torch.Tensor:
        """This replica's part of Q, fp32 ``[n, r]``, given the mean over replicas of :meth:`left`."""
        self._p_mr = orthonormal(mean_mr)
        return project(self._wanted_mn.T, self._p_mr)

    def decode(self, mean_nr: torch.Tensor) -> torch.Tensor:
        """The gradient of every replica, fp32 ``[m, n]``, given the mean over replicas of :meth:`right`."""
        decoded_mn = expand(self._p_mr, mean_nr, torch.float32)
        # A gradient of zeros leaves no direction to go on from.
        q_nr = torch.where(mean_nr.any(), mean_nr.float(), self._q_nr)
        self._next = q_nr, self._wanted_mn.sub_(decoded_mn)
        self._wanted_mn = self._p_mr = torch.empty(0)
        return decoded_mn

    def settle(self, *, used: bool) -> None:
        """End the tick: go on from it, or where its gradient was not ``used`` from what was before it.

        Whether it is used concerns the whole model, so no matrix may answer for itself. Without a tick under way this
        does nothing.
        """
        if used and self._next is not None:
            self._q_nr, self._lost_mn = self._next
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"q": self._q_nr.clone(), "lost": self._lost_mn.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._q_nr, self._lost_mn, self._next = state["q"].clone(), state["lost"].clone(), None
