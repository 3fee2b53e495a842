"""Gates: whether M's signal is let through, by the running mean of the fast gradient.

The mean is taken before merging, of finite gradients only, and is sharded as they are.
"""

from typing import Any, Protocol

import torch

from megatron_grpo.config import MergerConfig
from megatron_grpo.ops.host import Keep, stored
from megatron_grpo.ops.merge import ema
from megatron_grpo.ops.signs import Signal

Shards = list[torch.Tensor]

MEAN_BETA = 0.9
"""Memory of the running mean of the fast gradient: about ten ticks."""


class Gate(Protocol):
    """What decides over M's signal."""

    watches: bool
    """Whether it needs to see every fast gradient."""
    mean: Signal | None
    """The running mean of the fast gradient, fp32; ``None`` where none is kept."""
    elementwise: bool
    """Whether the merger must look at the mean's sign, element by element."""

    def watch(self, fast: Shards) -> None:
        """One tick's fast gradient, before merging; the caller leaves out what is not finite."""
        ...

    def share(self, sums: torch.Tensor) -> float:
        """The share of the model's elements on which M's signal acts, 0 to 1.

        Args:
            sums: ``ops.merge.agreement_sums`` of the mean with M over the whole model, and its elements: ``[6]``.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OpenGate:
    """M's signal always passes."""

    watches = elementwise = False
    mean: Signal | None = None

    def watch(self, fast: Shards) -> None:
        """Nothing to keep."""

    def share(self, sums: torch.Tensor) -> float:
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AgreementGate(OpenGate):
    """M's signal passes on the elements where its sign is the mean's; elsewhere the fast gradient stays as it is."""

    watches = elementwise = True

    def __init__(self, keep: Keep = list) -> None:
        self._keep = keep

    def watch(self, fast: Shards) -> None:
        """mean <- MEAN_BETA mean + (1 - MEAN_BETA) fast, the first one taken whole."""
        if self.mean is None:
            self.mean = self._keep(gradient.float().clone() for gradient in fast)
        else:
            self.mean = self._keep(ema(old, new, MEAN_BETA) for old, new in zip(self.mean, fast, strict=True))

    def share(self, sums: torch.Tensor) -> float:
        *_, equal, _compared, elements = sums.tolist()
        return float(equal / elements)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": stored(self.mean)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = None if state["mean"] is None else self._keep(state["mean"])


class CosineGate(AgreementGate):
    """M's signal passes while the cosine of M with the mean, over the whole model, is above ``threshold``."""

    elementwise = False

    def __init__(self, threshold: float, keep: Keep = list) -> None:
        super().__init__(keep)
        self._threshold = threshold

    def share(self, sums: torch.Tensor) -> float:
        return float(cosine(sums) > self._threshold)


def cosine(sums: torch.Tensor) -> float:
    """From ``ops.merge.agreement_sums``; 0 where a norm is 0."""
    product, one, other = sums[:3].tolist()
    norms = (one * other) ** 0.5
    return float(product / norms) if norms > 0 else 0.0


def build_gate(cfg: MergerConfig, keep: Keep = list) -> Gate:
    """The one place where a gate is chosen; ``keep``: how it keeps what lasts between ticks."""
    if cfg.gate == "cosine":
        return CosineGate(cfg.gate_threshold, keep)
    return AgreementGate(keep) if cfg.gate == "agreement" else OpenGate()
