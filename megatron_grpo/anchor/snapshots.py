"""What the anchor replays: weights of a tick, the minibatch it was trained on, and the fast gradient it gave."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_grpo.ops.host import Keep
from megatron_grpo.ops.signs import Signal

Shards = list[torch.Tensor]


@dataclass(slots=True)
class Snapshot:
    """One remembered tick.

    Attributes:
        weights: this rank's weights before the tick's update.
        batch: the minibatch of that tick (``rollout.batch.Batch``; never looked into here).
        fast: the compressed gradient of that tick, kept only where the merger wants it.
    """

    weights: Shards
    batch: Any
    fast: Signal | None = None


class Snapshots:
    """Remembered ticks, in order; a tick is forgotten once it has been replayed.

    Args:
        keep: how fast gradients out of a checkpoint are kept.
    """

    def __init__(self, keep: Keep = list) -> None:
        self._keep = keep
        self._held: dict[int, Snapshot] = {}

    def __len__(self) -> int:
        return len(self._held)

    def steps(self) -> list[int | None]:
        """The step of each minibatch that is held."""
        return [snapshot.batch.step for snapshot in self._held.values()]

    def put(self, tick: int, snapshot: Snapshot) -> None:
        self._held[tick] = snapshot

    def get(self, tick: int) -> Snapshot:
        """The snapshot of ``tick``.

        Raises:
            KeyError: it was never remembered, or already forgotten: our own bug.
        """
        return self._held[tick]

    def forget(self, tick: int) -> None:
        del self._held[tick]

    def state_dict(self) -> dict[str, Any]:
        return {"held": dict(self._held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = dict(state["held"])
        for snapshot in self._held.values():
            snapshot.fast = None if snapshot.fast is None else self._keep(snapshot.fast)
