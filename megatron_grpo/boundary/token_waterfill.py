"""Gradients without a basis: bits go to the tokens that carry the energy.

Legend: N rows, H hidden.
"""

from typing import Any

import torch

from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.boundary.feedback import Dither
from megatron_grpo.ops.rows import Rows
from megatron_grpo.ops.token_waterfill import Rotation, decode, encode, payload_bytes


class TokenWaterfillCodec(Codec):
    """See ``ops.token_waterfill``: one uint8 vector a micro-batch, whose size follows from the budget alone.

    Args:
        share: of a bfloat16 crossing. Both ends may change it between passes, alike.
        seed: of the rotation; equal at both ends.
        dither: stochastic rounding, or ``None`` for the nearest code.
    """

    def __init__(self, hidden: int, share: float, seed: int, dither: Dither | None) -> None:
        self._hidden, self.share, self._dither = hidden, share, dither
        self._rotation = Rotation(hidden, seed)

    def payload(self, rows: Rows) -> torch.Tensor:
        size = payload_bytes(len(rows), self._hidden, self.share)
        return torch.empty(size, dtype=torch.uint8, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        generator = None if self._dither is None else self._dither.next(x_NH.device)
        return Encoded(encode(x_NH, self._rotation, self.share, generator))

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        return decode(payload, len(rows), self._hidden, self._rotation, self.share, dtype)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._dither is None else self._dither.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._dither is not None:
            self._dither.load_state_dict(state)
