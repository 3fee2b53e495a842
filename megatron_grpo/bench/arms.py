"""What is measured: codecs built from the same configuration as a run's, at sizes that fill a share of the bytes.

Legend: N rows, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_grpo.bench.texts import Rowbook
from megatron_grpo.boundary.build import BITS, build_codecs
from megatron_grpo.boundary.codec import Codec, Learner
from megatron_grpo.boundary.transform import Transform
from megatron_grpo.config import BoundaryConfig, Direction
from megatron_grpo.ops.rows import Rows

BFLOAT16_BITS = 16
SCALE_BITS = 16
"""Of a row's scale, in the packed formats of fixed width."""
REFRESHES = 8
"""At most: a basis learns by one power step a refresh, and then hardly moves."""


PLAIN: dict[str, Any] = {
    "basis": "self",
    "predict": "none",
    "metric": "none",
    "weighting": None,
    "error_feedback": False,
    "rounding": "nearest",
    "shared_basis": False,
}
"""What an arm does not say, whatever the defaults of a run are."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A codec of one direction, and the keys of the boundary section that make it.

    Attributes:
        sized: whether a share of the bytes sets its size; the identity has but one.
    """

    name: str
    direction: Direction
    keys: dict[str, Any]
    sized: bool = True

    def config(self, share: float | None, hidden: int) -> BoundaryConfig:
        """The boundary section whose payload takes at most about ``share`` of a bfloat16 crossing."""
        keys = {f"{self.direction}_{key}": value for key, value in self.keys.items() if key in ("codec", "payload")}
        keys |= {key: value for key, value in self.keys.items() if key not in ("codec", "payload")}
        if share is not None:
            keys |= {f"{self.direction}_budget": share}
            if self.keys.get("payload") != "waterfill":
                keys |= {"rank": self._rank(share, hidden)}
        return BoundaryConfig(**PLAIN | keys)

    def _rank(self, share: float, hidden: int) -> int:
        row_bits = share * BFLOAT16_BITS * hidden
        bits = BITS.get(self.keys.get("payload", ""))
        rank = round(share * hidden) if bits is None else int((row_bits - SCALE_BITS) / bits)
        return max(1, min(hidden, rank))


def _forward(name: str, *, sized: bool = True, **keys: str) -> Arm:
    return Arm(name, "forward", keys, sized)


def _backward(name: str, **keys: str) -> Arm:
    return Arm(name, "backward", keys)


FORWARD_ARMS = (
    _forward("identity float32", codec="identity", payload="float32", sized=False),
    _forward("identity bfloat16", codec="identity", payload="bfloat16", sized=False),
    _forward("mask", codec="mask", payload="bfloat16"),
    _forward("lowrank", codec="lowrank", payload="bfloat16", weighting="energy"),
    _forward("lowrank, rows", codec="lowrank", payload="bfloat16", weighting="rows"),
    _forward("int8", codec="lowrank", payload="int8"),
    _forward("int4", codec="lowrank", payload="int4"),
    _forward("int3", codec="lowrank", payload="int3"),
    _forward("waterfill", codec="lowrank", payload="waterfill"),
    _forward("waterfill, embedding", codec="lowrank", payload="waterfill", predict="embedding"),
    _forward("waterfill, embedding+previous", codec="lowrank", payload="waterfill", predict="embedding+previous"),
    _forward(
        "waterfill, embedding, gradient",
        codec="lowrank",
        payload="waterfill",
        predict="embedding",
        metric="gradient",
    ),
    _forward(
        "waterfill, embedding+previous, gradient",
        codec="lowrank",
        payload="waterfill",
        predict="embedding+previous",
        metric="gradient",
    ),
)
BACKWARD_ARMS = (
    _backward("lowrank", codec="lowrank", payload="bfloat16"),
    _backward("int8", codec="lowrank", payload="int8"),
    _backward("int4", codec="lowrank", payload="int4"),
    _backward("int3", codec="lowrank", payload="int3"),
    _backward("token_waterfill", codec="token_waterfill"),
)


Parts = list[tuple[torch.Tensor, Rows]]


def fitted_codecs(
    arm: Arm,
    shares: Sequence[float | None],
    seen: Rowbook,
    *,
    seed: int,
    embedding_VH: torch.Tensor,
    gradients: Rowbook | None = None,
) -> Iterator[tuple[float | None, list[Codec]]]:
    """At each share the arm's codec of every boundary, fitted on the rows that were seen there.

    Args:
        gradients: of activations, the loss's gradients with respect to them, for a fit that weighs errors by those.
    """
    hidden = embedding_VH.shape[1]
    taught: list[list[torch.Tensor]] = [[] for _ in seen.parts]
    for share in shares:
        cfg, codecs = arm.config(share, hidden), []
        for index, parts in enumerate(seen.parts):
            built = build_codecs(cfg, hidden=hidden, index=index, seed=seed, embedding_VH=embedding_VH)
            codec = built.choose(arm.direction, dense=False)
            codec.begin_step(0)
            rows = parts, [] if gradients is None else gradients.parts[index]
            if isinstance(codec.learner, Transform):
                taught[index] = _fit_once(codec.learner, *rows, taught[index])
            elif codec.learner is not None:
                _refresh(codec.learner, *rows)
            codecs.append(codec)
        yield share, codecs


def _observe(learner: Learner, parts: Parts, gradients: Parts) -> None:
    for x_NH, rows in parts:
        learner.observe(x_NH, rows)
    for grad_NH, _ in gradients:
        learner.observe_gradient(grad_NH)


def _fit_once(learner: Transform, parts: Parts, gradients: Parts, sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fit on rows, or on the sums that another size of the same codec made of them; returns the sums."""
    if sums:
        learner.add(sums)
    else:
        _observe(learner, parts, gradients)
        sums = learner.sums()
    learner.stage()
    learner.commit()
    return sums


def _refresh(learner: Learner, parts: Parts, gradients: Parts) -> None:
    """A power step a refresh, as in a run."""
    for _ in range(REFRESHES):
        before = learner.flat()
        _observe(learner, parts, gradients)
        learner.stage()
        learner.commit()
        if torch.equal(learner.flat(), before):
            return


@dataclass(slots=True)
class Coded:
    """The crossing through codecs, and what it cost.

    Attributes:
        sent: bytes of the payloads.
        dense: bytes of the same rows in bfloat16.
    """

    codecs: list[Codec]
    sent: int = 0
    dense: int = 0
    _squares: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._squares = [[] for _ in self.codecs]

    def __call__(self, index: int, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        codec = self.codecs[index]
        encoded = codec.encode(x_NH, rows)
        decoded_NH = encoded.decoded_NH
        if decoded_NH is None:
            decoded_NH = codec.decode(encoded.payload, rows, x_NH.dtype)
        self.sent += encoded.payload.nbytes
        self.dense += x_NH.numel() * BFLOAT16_BITS // 8
        squares = [part.detach().float().square().sum(dim=-1) for part in (x_NH - decoded_NH, x_NH)]
        self._squares[index].append(torch.stack(squares))
        return decoded_NH

    @property
    def share(self) -> float:
        """Bytes as a share of a bfloat16 crossing."""
        return self.sent / self.dense

    def errors(self) -> tuple[list[float], list[float]]:
        """Of each boundary: relative error by energy, norm(residual) / norm(rows), and its median over tokens."""
        energy, median = [], []
        for parts in self._squares:
            lost_N, total_N = torch.cat(parts, dim=1).double()
            energy.append((lost_N.sum() / total_N.sum()).sqrt().item())
            median.append((lost_N / total_N)[total_N > 0].sqrt().median().item())
        return energy, median
