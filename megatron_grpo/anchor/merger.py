"""Mergers: G = f(G_comp, M, ...), elementwise on gradient shards, before clipping and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_grpo.config import MergerConfig
from megatron_grpo.ops.merge import delayed_ef, ema, signed_ema

Shards = list[torch.Tensor]


class Merger(Protocol):
    """A rule that folds the anchor's signal into the fast gradient, in place."""

    needs_fast: bool
    """Whether a fire must know the fast gradient of the tick it replays."""

    def arrive(self, m: Shards, fast_then: Shards | None) -> None:
        """The anchor fired: ``m`` is the new M, ``fast_then`` the replayed tick's compressed gradient, if finite."""
        ...

    def merge(self, fast: Shards, m: Shards) -> float:
        """Change ``fast`` in place; returns the weight that M's signal had."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoMerger:
    """G = G_comp: the anchor refreshes the bases and nothing else."""

    needs_fast = False

    def arrive(self, m: Shards, fast_then: Shards | None) -> None:
        """Nothing to keep."""

    def merge(self, fast: Shards, m: Shards) -> float:
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


@dataclass
class SignedEma(NoMerger):
    """G = alpha * G_comp + (1 - alpha) * |G_comp| * sign(M), the source's rule."""

    alpha: float

    def merge(self, fast: Shards, m: Shards) -> float:
        for gradient, anchor in zip(fast, m, strict=True):
            gradient.copy_(signed_ema(gradient, anchor, self.alpha))
        return 1.0 - self.alpha


class DelayedEf(NoMerger):
    """G = G_comp + lam * (M - G_comp[t - K]): M's excess over what compression gave on the same batch and weights.

    The excess is taken at the fire and held until the next.
    """

    needs_fast = True

    def __init__(self, lam: float) -> None:
        self.lam = lam
        self._excess: Shards | None = None

    def arrive(self, m: Shards, fast_then: Shards | None) -> None:
        if fast_then is None:  # it was not finite: the excess before it stays in force
            return
        self._excess = [anchor - fast for anchor, fast in zip(m, fast_then, strict=True)]

    def merge(self, fast: Shards, m: Shards) -> float:
        if self._excess is None:
            return 0.0
        for gradient, excess in zip(fast, self._excess, strict=True):
            gradient.copy_(delayed_ef(gradient, excess, self.lam))
        return self.lam

    def state_dict(self) -> dict[str, Any]:
        return {"excess": self._excess}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._excess = state["excess"]


def build_merger(cfg: MergerConfig) -> Merger:
    """The one place where a merger is chosen."""
    if cfg.kind == "signed_ema":
        return SignedEma(cfg.alpha)
    if cfg.kind == "delayed_ef":
        return DelayedEf(cfg.lam)
    return NoMerger()


class AnchorMemory:
    """M: the running mean of anchor gradients on this rank's shards, fp32, updated at fires only."""

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self.m: Shards | None = None

    def arrive(self, gradients: Sequence[torch.Tensor]) -> Shards:
        """M <- beta * M + (1 - beta) * g, the first g taken whole; returns M."""
        if self.m is None:
            self.m = [gradient.float().clone() for gradient in gradients]
        else:
            self.m = [ema(old, new, self._beta) for old, new in zip(self.m, gradients, strict=True)]
        return self.m

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.m}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.m = state["m"]
