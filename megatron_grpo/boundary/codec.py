"""The seam that every codec implements.

Legend: N rows (tokens that are not padding), H hidden, r rank.
"""

from typing import Any, Protocol

import torch

from megatron_grpo.boundary.basis import Basis


class Codec(Protocol):
    """Tensor -> payload -> tensor for one direction of one boundary. Both ends hold equal state.

    A codec never talks: it is given rows and returns numbers. ``positions_N`` is each row's column, known to both
    ends, for codecs that choose by place. Coding is per row, so that a row codes alike in any batch.
    """

    basis: Basis | None = None
    """What the codec learns from uncompressed passes, if it learns: refreshed by the link, for both ends alike."""

    def payload(self, rows: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """An empty payload for ``rows`` rows, to receive into (device of ``like``)."""
        ...

    def encode(self, x_NH: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """What crosses: contiguous, of the shape and dtype of :meth:`payload`."""
        ...

    def decode(self, payload: torch.Tensor, positions_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``[N, H]`` of ``dtype`` from what crossed."""
        ...

    def observe(self, x_NH: torch.Tensor) -> None:
        """See the rows of an uncompressed pass, as both ends hold them. Default: nothing to learn."""
        return None

    def begin_step(self, step: int) -> None:
        """A step starts: the one moment at which coding may change (``boundary.commit: step``)."""
        return None

    def commit(self) -> None:
        """Put staged state to use. Called at a step boundary, or wherever ``boundary.commit: tick`` says."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        return None
