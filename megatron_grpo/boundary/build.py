"""The one place where the codecs of a boundary are chosen."""

from dataclasses import dataclass

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.boundary.identity import IdentityCodec
from megatron_grpo.boundary.lowrank import LowRankCodec
from megatron_grpo.boundary.mask import MaskCodec
from megatron_grpo.config import BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import seed_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BoundaryCodecs:
    """The codecs of one boundary: ``forward``/``backward`` as configured, ``dense_*`` the uncompressed crossing."""

    index: int
    forward: Codec
    backward: Codec
    dense_forward: Codec
    dense_backward: Codec

    def choose(self, direction: Direction, *, dense: bool) -> Codec:
        if direction == "forward":
            return self.dense_forward if dense else self.forward
        return self.dense_backward if dense else self.backward

    def learners(self) -> list[Codec]:
        return [self.forward, self.backward]


def build_codecs(cfg: BoundaryConfig, *, hidden: int, index: int, seed: int) -> BoundaryCodecs:
    """Both directions of boundary ``index`` (it joins stage ``index`` to ``index + 1``)."""

    def basis(direction: Direction) -> Basis:
        return Basis(hidden, cfg.rank_of(direction, hidden), seed_of(seed, index, direction))

    shared = basis("forward") if cfg.shared_basis else None

    def build(direction: Direction) -> Codec:
        dtype = DTYPES[cfg.dense_payload(direction)]
        kind = cfg.codec_of(direction)
        if kind == "identity":
            return IdentityCodec(hidden, dtype)
        if kind == "mask":
            return MaskCodec(hidden, cfg.rank_of(direction, hidden), dtype, seed_of(seed, index, direction))
        if shared is not None:
            return LowRankCodec(shared, dtype, learns=direction == "forward" and cfg.basis == "anchor")
        return LowRankCodec(basis(direction), dtype, learns=cfg.basis == "anchor")

    return BoundaryCodecs(
        index=index,
        forward=build("forward"),
        backward=build("backward"),
        dense_forward=IdentityCodec(hidden, DTYPES[cfg.dense_payload("forward")]),
        dense_backward=IdentityCodec(hidden, DTYPES[cfg.dense_payload("backward")]),
    )
