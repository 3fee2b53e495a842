"""PowerSGD at a boundary: rows cross as their coordinates in an orthonormal basis Q.

Legend: N rows, H hidden, r rank.
"""

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Codec, Encoded
from megatron_grpo.ops.lowrank import expand, project
from megatron_grpo.ops.rows import Rows


class LowRankCodec(Codec):
    """P = X Q crosses, the receiver uses P Q^T. There is no straight-through: backward is a projector of its own.

    Args:
        basis: Q and its staging; the two directions may share one.
        dtype: number format of P on the wire.
    """

    def __init__(self, basis: Basis, dtype: torch.dtype) -> None:
        self.learner: Basis = basis
        self._dtype = dtype

    def payload(self, rows: Rows) -> torch.Tensor:
        rank = self.learner.current.shape[1]
        return torch.empty(len(rows), rank, dtype=self._dtype, device=rows.index_N.device)

    def encode(self, x_NH: torch.Tensor, rows: Rows) -> Encoded:
        basis = self.learner.to(x_NH.device)
        return Encoded(project(x_NH, basis.current).to(self._dtype).contiguous())

    def decode(self, payload: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        return expand(payload, self.learner.to(payload.device).current, dtype)
