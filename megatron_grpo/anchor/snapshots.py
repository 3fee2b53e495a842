"""What the anchor replays: weights of a tick, the minibatch it was trained on, and the fast gradient it gave."""

from dataclasses import dataclass
from typing import Any

import torch

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
    fast: Shards | None = None


class Snapshots:
    """Remembered ticks, in order; a tick is forgotten once it has been replayed."""

    def __init__(self) -> None:
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
