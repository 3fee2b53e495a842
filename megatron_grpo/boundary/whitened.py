"""Packed low-rank gradients: whitened coordinates under one scale a token.

Gradients are heavy-tailed over tokens, so ranges fitted once would clip some and lose the rest; a scale of each
token's own keeps both. Legend: N rows, H hidden, r rank.
"""

from typing import Any

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.boundary.feedback import Dither
from megatron_grpo.ops.bits import pack_bits, packed_bytes, unpack_bits
from megatron_grpo.ops.lowrank import expand, project
from megatron_grpo.ops.quantize import absmax_codes, absmax_values
from megatron_grpo.ops.rows import Rows

LEAST_SPREAD = 1e-4
"""Of the largest: a coordinate that never moves is not blown up."""


class WhitenedCodec(Codec):
    """Coordinates in Q over their spread, ``bits`` each, and a bfloat16 scale a row: one uint8 vector.

    Args:
        basis: Q and the spread of its coordinates.
        bits: of a coordinate.
        dither: stochastic rounding, or ``None`` for the nearest code.
    """

    def __init__(self, basis: Basis, bits: int, dither: Dither | None) -> None:
        self.learner: Basis = basis
        self._bits, self._dither = bits, dither

    def payload(self, rows: Rows) -> torch.Tensor:
        size = packed_bytes(len(rows) * self._rank, self._bits) + 2 * len(rows)
        return torch.empty(size, dtype=torch.uint8, device=rows.index_N.device)

    @property
    def _rank(self) -> int:
        return self.learner.current.shape[1]

    def _spread(self) -> torch.Tensor:
        return self.learner.spread.clamp(min=LEAST_SPREAD)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        basis = self.learner.to(x_NH.device)
        generator = None if self._dither is None else self._dither.next(x_NH.device)
        codes_Nr, scale_N = absmax_codes(project(x_NH, basis.current) / self._spread(), self._bits, generator)
        packed = pack_bits(codes_Nr.flatten(), self._bits)
        return Encoded(torch.cat([scale_N.bfloat16().view(torch.uint8), packed]))

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        basis = self.learner.to(payload.device)
        scale_N = payload[: 2 * len(rows)].clone().view(torch.bfloat16).float()
        codes = unpack_bits(payload[2 * len(rows) :], len(rows) * self._rank, self._bits)
        values_Nr = absmax_values(codes.view(len(rows), self._rank), scale_N, self._bits)
        return expand(values_Nr * self._spread(), basis.current, dtype)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._dither is None else self._dither.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._dither is not None:
            self._dither.load_state_dict(state)
