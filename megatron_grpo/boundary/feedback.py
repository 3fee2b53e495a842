"""What backward coding may remember between micro-batches: lost remainders, and the draws of stochastic rounding.

Legend: N rows, H hidden, S columns, B sequences.
"""

from typing import Any

import torch

from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.ops.rows import Rows


class Dither:
    """Generators for stochastic rounding: the n-th draw is the same after a resume. Of the sender alone."""

    def __init__(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def next(self, device: torch.device) -> torch.Generator:
        self._drawn += 1
        return torch.Generator(device).manual_seed((self._seed + self._drawn) % 2**62)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]


class FeedbackCodec(Codec):
    """Error feedback: what coding lost at a place is added to the rows at the same place of the next micro-batch.

    As Optimus-CC (Song et al. 2023) does for low-rank gradients between stages. Only the sender remembers.

    Attributes:
        inner: codes without remembering, for passes whose gradients are thrown away.
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.learner = inner.learner
        self._lost_SBH: torch.Tensor | None = None

    def payload(self, rows: Rows) -> torch.Tensor:
        return self.inner.payload(rows)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        lost_SBH = self._room(x_NH, rows)
        places = (rows.positions_N, rows.sequences_N)
        wanted_NH = x_NH.float() + lost_SBH[places]
        encoded = self.inner.encode(wanted_NH, rows)
        decoded_NH = encoded.decoded_NH
        if decoded_NH is None:
            decoded_NH = self.inner.decode(encoded.payload, rows, torch.float32)
        lost_NH = wanted_NH - decoded_NH
        lost_SBH[places] = torch.where(lost_NH.isfinite(), lost_NH, 0.0)  # a bad tick is skipped, and not remembered
        return Encoded(encoded.payload, decoded_NH.to(x_NH.dtype))

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        return self.inner.decode(payload, rows, dtype)

    def _room(self, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The remembered remainders, grown with zeros to every place of ``rows``."""
        columns = int(rows.positions_N.max()) + 1 if len(rows) else 0
        old = self._lost_SBH
        if old is None:
            old = torch.zeros(0, rows.batch, x_NH.shape[1], device=x_NH.device)
        if old.shape[0] < columns or old.shape[1] < rows.batch:
            grown = old.new_zeros(max(columns, old.shape[0]), max(rows.batch, old.shape[1]), x_NH.shape[1])
            grown[: old.shape[0], : old.shape[1]] = old
            old = grown
        self._lost_SBH = old
        return old

    def begin_step(self, step: int) -> None:
        self.inner.begin_step(step)

    def state_dict(self) -> dict[str, Any]:
        lost = None if self._lost_SBH is None else self._lost_SBH.clone()
        return {"inner": self.inner.state_dict(), "lost": lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self._lost_SBH = state["lost"]
