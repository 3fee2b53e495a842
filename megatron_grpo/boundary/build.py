"""The one place where the codecs of a boundary are chosen."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Codec, Learner
from megatron_grpo.boundary.feedback import Dither, FeedbackCodec
from megatron_grpo.boundary.identity import IdentityCodec
from megatron_grpo.boundary.lowrank import LowRankCodec
from megatron_grpo.boundary.mask import MaskCodec
from megatron_grpo.boundary.token_waterfill import TokenWaterfillCodec
from megatron_grpo.boundary.transform import Context, Transform, TransformCodec
from megatron_grpo.boundary.whitened import WhitenedCodec
from megatron_grpo.config import BoundaryConfig, Direction
from megatron_grpo.ops.lowrank import seed_of
from megatron_grpo.ops.transform import fixed_spec, waterfill_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BITS = {"int8": 8, "int4": 4, "int3": 3}


@dataclass(frozen=True, slots=True)
class BoundaryCodecs:
    """The codecs of one boundary: ``forward``/``backward`` as configured, ``dense_*`` the uncompressed crossing,
    ``anchor_backward`` for gradients of an anchor, ``delta`` for what rows that both ends hold have moved."""

    index: int
    hidden: int
    forward: Codec
    backward: Codec
    dense_forward: IdentityCodec
    dense_backward: IdentityCodec
    anchor_backward: Codec
    delta: Codec

    def choose(self, direction: Direction, *, dense: bool, fast: bool = True) -> Codec:
        """The codec of a pass; one that is not ``fast`` leaves no remainders behind: its gradients are not stepped."""
        if direction == "forward":
            return self.dense_forward if dense else self.forward
        if dense:
            return self.dense_backward
        return self.backward.inner if isinstance(self.backward, FeedbackCodec) and not fast else self.backward

    def set_backward_budget(self, share: float) -> None:
        """Change what gradients may take, a share of a bfloat16 crossing (``boundary.backward_budget=auto``)."""
        codec = self.backward.inner if isinstance(self.backward, FeedbackCodec) else self.backward
        assert isinstance(codec, TokenWaterfillCodec), "config.checks refuses others"
        codec.share = share

    def coding(self) -> list[Codec]:
        return [self.forward, self.backward]

    def learners(self) -> list[tuple[Direction, Learner]]:
        """What is fitted here, each once, with the direction whose rows teach it."""
        forward, backward = self.forward.learner, self.backward.learner
        pairs: list[tuple[Direction, Learner]] = [] if forward is None else [("forward", forward)]
        if backward is not None and backward is not forward:
            pairs.append(("backward", backward))
        return pairs

    def state_dict(self) -> dict[str, Any]:
        return {
            "codecs": [codec.state_dict() for codec in self.coding()],
            "learners": [learner.state_dict() for _, learner in self.learners()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for codec, saved in zip(self.coding(), state["codecs"], strict=True):
            codec.load_state_dict(saved)
        for (_, learner), saved in zip(self.learners(), state["learners"], strict=True):
            learner.load_state_dict(saved)


def build_codecs(
    cfg: BoundaryConfig, *, hidden: int, index: int, seed: int, embedding_VH: torch.Tensor | None = None
) -> BoundaryCodecs:
    """Both directions of boundary ``index`` (it joins stage ``index`` to ``index + 1``).

    Args:
        embedding_VH: the frozen token embedding that both ends hold, where ``boundary.predict`` needs it.
    """
    builder = _Builder(cfg, hidden, index, seed, embedding_VH)
    dense_backward = IdentityCodec(hidden, DTYPES[cfg.dense_payload("backward")])
    return BoundaryCodecs(
        index=index,
        hidden=hidden,
        forward=builder.codec("forward"),
        backward=FeedbackCodec(builder.codec("backward")) if cfg.feeds_back else builder.codec("backward"),
        dense_forward=IdentityCodec(hidden, DTYPES[cfg.dense_payload("forward")]),
        dense_backward=dense_backward,
        anchor_backward=(
            dense_backward
            if cfg.anchor_budget is None
            else TokenWaterfillCodec(hidden, cfg.anchor_budget, seed_of(seed, index, "backward"), None)
        ),
        delta=TokenWaterfillCodec(hidden, cfg.delta_budget, seed_of(seed, index, "delta"), None),
    )


class _Builder:
    """The choice for one boundary."""

    def __init__(
        self, cfg: BoundaryConfig, hidden: int, index: int, seed: int, embedding_VH: torch.Tensor | None
    ) -> None:
        self._cfg, self._hidden, self._index, self._seed = cfg, hidden, index, seed
        self._embedding_VH = embedding_VH
        self._shared = self._basis("forward") if cfg.shared_basis else None

    def codec(self, direction: Direction) -> Codec:
        cfg, hidden = self._cfg, self._hidden
        kind, payload = cfg.codec_of(direction), cfg.payload_of(direction)
        seed = seed_of(self._seed, self._index, direction)
        if kind == "identity":
            return IdentityCodec(hidden, DTYPES[cfg.dense_payload(direction)])
        if kind == "mask":
            return MaskCodec(hidden, cfg.rank_of(hidden), DTYPES[cfg.dense_payload(direction)], seed)
        dither = Dither(seed) if cfg.rounding == "stochastic" else None
        if kind == "token_waterfill":
            return TokenWaterfillCodec(hidden, cfg.budget_of(direction), seed, dither)
        if payload in DTYPES:
            return LowRankCodec(self._shared or self._basis(direction), DTYPES[payload])
        if direction == "backward" and payload in BITS:
            return WhitenedCodec(self._basis(direction), BITS[payload], dither)
        return self._transform(direction)

    def _basis(self, direction: Direction) -> Basis:
        cfg = self._cfg
        return Basis(
            self._hidden,
            cfg.rank_of(self._hidden),
            seed_of(self._seed, self._index, direction),
            # Q crosses only where the sender alone fits it; elsewhere it stays fp32 at both ends.
            dtype=DTYPES[cfg.dense_payload(direction)] if cfg.basis == "self" else torch.float32,
            normalised=cfg.weighting == "rows",
            learns=cfg.basis != "random",
        )

    def _transform(self, direction: Direction) -> TransformCodec:
        cfg, hidden, payload = self._cfg, self._hidden, self._cfg.payload_of(direction)
        context = Context(cfg.prediction if direction == "forward" else "none", hidden, self._embedding_VH)
        if payload == "waterfill":
            spec = waterfill_spec(hidden, context.size, share=cfg.budget_of(direction), chained=context.chained)
        else:
            rank, bits = cfg.rank_of(hidden), BITS[payload]
            spec = fixed_spec(hidden, context.size, rank=rank, bits=bits, chained=context.chained)
        learner = Transform(
            spec,
            context,
            seed_of(self._seed, self._index, direction),
            purpose=f"{direction} {self._index} observed",
            by_energy=cfg.weighting == "energy",
            by_gradients=direction == "forward" and cfg.metric == "gradient",
            learns=cfg.basis != "random",
        )
        return TransformCodec(learner, context, f"{direction} {self._index}")
