"""The uncompressed crossing: rows as they are, in the payload's number format."""

import torch

from megatron_grpo.boundary.codec import Codec


class IdentityCodec(Codec):
    """Every number of the boundary crosses. With a payload of the model's dtype the crossing is exact, bit for bit."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._hidden = hidden
        self._dtype = dtype

    def payload(self, rows: int, like: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty(rows, self._hidden, dtype=self._dtype, device=like.device if like is not None else None)

    def encode(self, x_NH: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        return x_NH.to(self._dtype).contiguous()

    def decode(self, payload: torch.Tensor, positions_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return payload.to(dtype)
