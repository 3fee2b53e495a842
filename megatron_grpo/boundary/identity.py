"""The uncompressed crossing: rows as they are, in the payload's number format."""

import torch

from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.ops.rows import Rows


class IdentityCodec(Codec):
    """Every number of the boundary crosses. With a payload of the model's dtype the crossing is exact, bit for bit."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._hidden = hidden
        self.dtype = dtype

    def payload(self, rows: Rows) -> torch.Tensor:
        return torch.empty(len(rows), self._hidden, dtype=self.dtype, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        return Encoded(x_NH.to(self.dtype).contiguous())

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        return payload.to(dtype)
