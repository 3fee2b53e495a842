"""The seams that every codec implements.

Legend: N rows (tokens that are not padding), H hidden, r rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_grpo.ops.rows import Rows


@dataclass(frozen=True, slots=True)
class Encoded:
    """What crosses, and what the receiver will make of it where the sender had to work that out anyway."""

    payload: torch.Tensor
    decoded_NH: torch.Tensor | None = None


class Learner(Protocol):
    """What is fitted on rows: one state in use, one staged for the next step, and the open sums of a fit.

    Both ends of a boundary hold equal states. Where both see the rows they stage alike; where only the sender does,
    what it staged crosses as :meth:`flat`.
    """

    @property
    def wants_gradients(self) -> bool:
        """Whether gradients teach it anything."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether rows were observed since the last :meth:`stage`."""
        ...

    def observe(self, x_NH: torch.Tensor, rows: Rows) -> None:
        """Add rows to the open sums."""
        ...

    def observe_gradient(self, grad_NH: torch.Tensor) -> None:
        """Add gradients with respect to rows, which say where an error of the rows would matter."""
        return None

    def sums(self) -> list[torch.Tensor]:
        """The open sums themselves, to be summed over data-parallel ranks in place."""
        ...

    def stage(self) -> None:
        """Close the sums and stage what they teach; sums that are zero or not finite teach nothing."""
        ...

    def flat(self) -> torch.Tensor:
        """One vector that holds what is staged (else what is in use): its bits are all that a receiver needs."""
        ...

    def stage_flat(self, flat: torch.Tensor) -> None:
        """Stage what the other end sent: a vector of the shape and dtype of this end's :meth:`flat`."""
        ...

    def commit(self) -> None:
        """Put what is staged to use."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Codec(Protocol):
    """Tensor -> payload -> tensor for one direction of one boundary. Both ends hold equal state.

    A codec never talks: it is given rows and returns numbers. Forward coding is per token, so that a row codes alike in
    any batch, in prefill, decoding and training; backward coding may use statistics of its micro-batch.
    """

    learner: Learner | None = None
    """What the codec learns from rows, if it learns; two codecs may share one."""

    def payload(self, rows: Rows) -> torch.Tensor:
        """An empty payload for ``rows``, to receive into."""
        ...

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        """What crosses: contiguous, of the shape and dtype of :meth:`payload`."""
        ...

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``[N, H]`` of ``dtype`` from what crossed."""
        ...

    def begin_step(self, step: int) -> None:
        """A step starts: the one moment at which coding may change (``boundary.commit: step``)."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the learner's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        return None
