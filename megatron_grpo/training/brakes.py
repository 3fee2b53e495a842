"""Limits that end a run, and a word about rewards that read nothing: from numbers that every metrics row holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config import TrainConfig

UNREAD = 0.9
"""Share of a step's responses without a readable answer from which the reward is called blind."""


@dataclass(frozen=True, slots=True)
class BrakeState:
    """After one row: why the run must stop, and what is worth a line in the log; each ``None`` mostly."""

    stop: str | None
    notice: str | None


class Brakes:
    """Watches rows, one a tick in order. Equal rows make equal states, so every rank stops at the same step.

    Args:
        cfg: the ``train`` section; a limit that is ``None`` is not watched.
    """

    def __init__(self, cfg: TrainConfig) -> None:
        self._cfg = cfg
        self._first_length: float | None = None
        self._skipped_before = 0.0
        self._skipped_in_row = 0
        self._blind = self._gaps = False

    def update(self, row: Mapping[str, float]) -> BrakeState:
        """The state after ``row``."""
        skipped = row.get("train/skipped", self._skipped_before)
        self._skipped_in_row = self._skipped_in_row + 1 if skipped > self._skipped_before else 0
        self._skipped_before = skipped
        length = row.get("rollout/response_length")
        if self._first_length is None:
            self._first_length = length
        tick = int(row["tick"])
        return BrakeState(self._stop(tick, row, length), self._notice(tick, row))

    def _stop(self, tick: int, row: Mapping[str, float], length: float | None) -> str | None:
        cfg, first = self._cfg, self._first_length
        gap, norm = row.get("rollout/logprob_gap", 0.0), row.get("policy/grad_norm", 0.0)
        if cfg.stop_gap is not None and not gap <= cfg.stop_gap:  # NaN is above every limit
            return f"the log-prob gap {gap:.3g} nats at tick {tick} is above train.stop_gap={cfg.stop_gap}"
        if cfg.stop_grad_norm is not None and not norm <= cfg.stop_grad_norm:
            return f"the gradient norm {norm:.3g} at tick {tick} is above train.stop_grad_norm={cfg.stop_grad_norm}"
        if cfg.stop_skipped is not None and self._skipped_in_row >= cfg.stop_skipped:
            return (
                f"the loss or its gradient was not finite in {self._skipped_in_row} ticks up to {tick} in a row: "
                f"train.stop_skipped={cfg.stop_skipped}"
            )
        if cfg.stop_length_growth is not None and length and first and length > cfg.stop_length_growth * first:
            return (
                f"responses of {length:.1f} tokens at tick {tick} are {length / first:.1f} times as long as the first "
                f"step's: above train.stop_length_growth={cfg.stop_length_growth}"
            )
        return None

    def _notice(self, tick: int, row: Mapping[str, float]) -> str | None:
        """On the first of several steps in which next to nothing could be read, or not everything be scored."""
        unread, unscored = row.get("reward/parse_fail_frac"), row.get("reward/unscored_frac", 0.0)
        if unread is None:
            return None
        notices = []
        if unread >= UNREAD and not self._blind:
            notices.append(
                f"no answer could be read in {unread:.0%} of the responses at tick {tick}: "
                "see that reward.kind looks where the model writes it, and that responses end in rollout.max_response"
            )
        if unscored > 0 and not self._gaps:
            notices.append(
                f"{unscored:.1%} of the responses at tick {tick} have no score and are left out: their reward failed, "
                "or was not done in half of parallel.timeout_s"
            )
        self._blind, self._gaps = unread >= UNREAD, unscored > 0
        return "\n".join(notices) or None

    def state_dict(self) -> dict[str, Any]:
        return {
            "first_length": self._first_length,
            "skipped_before": self._skipped_before,
            "skipped_in_row": self._skipped_in_row,
            "blind": self._blind,
            "gaps": self._gaps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_length, self._blind = state["first_length"], state["blind"]
        self._gaps = state.get("gaps", False)
        self._skipped_before, self._skipped_in_row = state["skipped_before"], state["skipped_in_row"]
