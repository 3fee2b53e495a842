"""Mergers: G = f(G_comp, M, ...), elementwise on gradient shards, before clipping and the optimizer; and M itself.

M ages: :class:`Fading` says what is left of its weight, ``anchor.gate`` whether it is let through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_grpo.config import AnchorConfig, MergerConfig
from megatron_grpo.ops.host import Keep, stored
from megatron_grpo.ops.merge import agreeing, delayed_ef, ema, signed_ema
from megatron_grpo.ops.signs import PackedSigns, Signal

Shards = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Fading:
    """What is left of M's weight as it ages; the default holds it in full.

    Attributes:
        decay: factor of every tick since M arrived.
        hold: ticks for which M is used, 0 without a limit.
    """

    decay: float = 1.0
    hold: int = 0

    def left(self, held: int) -> float:
        """Factor on M's weight, ``held`` ticks after it arrived (0 at the fire itself)."""
        return 0.0 if 0 < self.hold <= held else self.decay**held


class Merger(Protocol):
    """A rule that folds the anchor's signal into the fast gradient, in place."""

    needs_fast: bool
    """Whether a fire must know the fast gradient of the tick it replays."""

    def arrive(self, m: Signal, fast_then: Signal | None) -> None:
        """The anchor fired: ``m`` is the new M, ``fast_then`` the replayed tick's compressed gradient, if finite."""
        ...

    def weight(self, fade: float) -> float:
        """The weight of M's signal when ``fade`` of it, in 0..1, is left."""
        ...

    def merge(self, fast: Shards, m: Signal, *, fade: float = 1.0, mean: Signal | None = None) -> float:
        """Change ``fast`` in place; returns the weight that M's signal had. Weight 0 leaves every bit as it is.

        Args:
            mean: the running mean of the fast gradient; only elements where its sign is M's are changed. ``None``: all.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoMerger:
    """G = G_comp: the anchor refreshes the bases and nothing else."""

    needs_fast = False

    def arrive(self, m: Signal, fast_then: Signal | None) -> None:
        """Nothing to keep."""

    def weight(self, fade: float) -> float:
        return 0.0

    def merge(self, fast: Shards, m: Signal, *, fade: float = 1.0, mean: Signal | None = None) -> float:
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


@dataclass
class SignedEma(NoMerger):
    """G = (1 - w) G_comp + w |G_comp| sign(M), w = (1 - alpha) fade; the source's rule at fade 1.

    Up to w = 1/2 it never flips a sign: it only damps the elements on which M disagrees, by 1 - 2w. That alone does
    not make an old M harmless: one pattern of signs held for many ticks adds up at smaller weights too, only slower.
    """

    alpha: float

    def weight(self, fade: float) -> float:
        return (1.0 - self.alpha) * fade

    def merge(self, fast: Shards, m: Signal, *, fade: float = 1.0, mean: Signal | None = None) -> float:
        weight = self.weight(fade)
        if weight > 0.0:
            for gradient, anchor, guide in zip(fast, m, _guides(fast, mean), strict=True):
                _put(gradient, signed_ema(gradient, anchor, self.alpha, fade), anchor, guide)
        return weight


class DelayedEf(NoMerger):
    """G = G_comp + lam * fade * (M - G_comp[t - K]): M's excess over the compressed gradient of its own tick.

    The excess is taken at the fire and held until the next.
    """

    needs_fast = True

    def __init__(self, lam: float, keep: Keep = list) -> None:
        self.lam = lam
        self._keep = keep
        self._excess: Signal | None = None

    def arrive(self, m: Signal, fast_then: Signal | None) -> None:
        if fast_then is None:  # it was not finite: the excess before it stays in force
            return
        self._excess = self._keep(anchor - fast for anchor, fast in zip(m, fast_then, strict=True))

    def weight(self, fade: float) -> float:
        return self.lam * fade

    def merge(self, fast: Shards, m: Signal, *, fade: float = 1.0, mean: Signal | None = None) -> float:
        weight = self.weight(fade)
        if self._excess is None or weight == 0.0:
            return 0.0
        for gradient, excess, anchor, guide in zip(fast, self._excess, m, _guides(fast, mean), strict=True):
            _put(gradient, delayed_ef(gradient, excess, weight), anchor, guide)
        return weight

    def state_dict(self) -> dict[str, Any]:
        return {"excess": stored(self._excess)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._excess = None if state["excess"] is None else self._keep(state["excess"])


def _guides(fast: Shards, mean: Signal | None) -> Sequence[torch.Tensor | None]:
    return [None] * len(fast) if mean is None else mean


def _put(gradient: torch.Tensor, merged: torch.Tensor, anchor: torch.Tensor, guide: torch.Tensor | None) -> None:
    """``gradient`` becomes ``merged``, with a guide only where its sign is the anchor's."""
    gradient.copy_(merged if guide is None else torch.where(agreeing(anchor, guide), merged, gradient))


def build_merger(cfg: MergerConfig, keep: Keep = list) -> Merger:
    """The one place where a merger is chosen; ``keep``: how it keeps what lasts between ticks."""
    if cfg.kind == "signed_ema":
        return SignedEma(cfg.alpha)
    if cfg.kind == "delayed_ef":
        return DelayedEf(cfg.lam, keep)
    return NoMerger()


class AnchorMemory:
    """M: the running mean of anchor gradients on this rank's shards, fp32, updated at fires only."""

    has_size = True

    def __init__(self, beta: float, keep: Keep = list) -> None:
        self._beta, self._keep = beta, keep
        self.m: Signal | None = None

    def arrive(self, gradients: Signal) -> Signal:
        """M <- beta * M + (1 - beta) * g, the first g taken whole; returns M."""
        if self.m is None:
            self.m = self._keep(gradient.float().clone() for gradient in gradients)
        else:
            self.m = self._keep(ema(old, new, self._beta) for old, new in zip(self.m, gradients, strict=True))
        return self.m

    def state_dict(self) -> dict[str, Any]:
        return {"m": stored(self.m)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.m = None if state["m"] is None else self._keep(state["m"])


class SignMemory:
    """M as the signs of the last anchor gradient (beta 0): a running mean would need their size."""

    has_size = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.m: PackedSigns | None = None

    def arrive(self, gradients: Signal) -> PackedSigns:
        """M <- sign(g); returns M."""
        self.m = PackedSigns(gradients)
        return self.m

    def state_dict(self) -> dict[str, Any]:
        return {"m": None if self.m is None else self.m.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.m = None if state["m"] is None else PackedSigns.from_state(state["m"], self._device)


class Memory(Protocol):
    """Where M is kept between fires."""

    has_size: bool
    """Whether M's elements have their size and not their sign alone, so that norms and cosines mean something."""

    @property
    def m(self) -> Signal | None: ...

    def arrive(self, gradients: Signal) -> Signal: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_memory(
    anchor: AnchorConfig, merger: MergerConfig, keep: Keep = list, device: torch.device | None = None
) -> Memory:
    """The one place where it is chosen how M is kept.

    Args:
        keep: where, unless it is packed.
        device: of the gradients.
    """
    return SignMemory(device) if merger.packed_signs else AnchorMemory(anchor.beta, keep)
