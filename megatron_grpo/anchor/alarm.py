"""The collapse alarm: warns before validation falls, from numbers that every metrics row holds already.

What destroys a policy is one pattern of signs used for many ticks: M's part of a step points the same way every time
and adds up, though M agrees with the fast gradient no better than chance. The *exposure* to a pattern is the sum over
the ticks since M arrived,

    E = sum of w^2 * min(1, 2 (1 - agreement)),

w = ``merger/weight``, agreement = ``anchor/sign_agreement`` (one half: chance). It starts anew when M does. The square
is fitted to recorded runs: what M's part gains the fast gradient's own, which could undo it, loses.

The calendar and the merger's settings tell how E will grow, so it is looked at ``HORIZON`` ticks ahead: a policy can be
lost within ten ticks of an arrival, when a rule on what has already happened comes too late. The score is the largest
E of the horizon over ``LIMIT``, up to half as much again while responses grow longer or are cut off.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_grpo.anchor.merger import Fading, build_merger
from megatron_grpo.anchor.schedule import AnchorSchedule
from megatron_grpo.config import AnchorConfig, MergerConfig

HORIZON = 25
"""Ticks that the score looks ahead: twenty of warning, five in which a new pattern may already do its harm."""
LIMIT = 4.5
"""Exposure at which the alarm goes off: eight ticks at weight 3/4 and chance agreement."""
MEAN_BETA = 0.9
"""Memory of the mean agreement that the look ahead goes by."""
CALM = 0.1
"""Score below which an alarm that stands ends."""
CHANCE = 0.5
"""Sign agreement of gradients that know nothing of each other; assumed before any was measured."""
WINDOW = 5
"""Steps in each of the two means whose difference is a slope."""
LONGER, CUT = 0.25, 0.05
"""Growth of the mean length (relative) and of the share of truncated responses that counts as a full symptom."""
LOWER, RAISE = 0.8, 1.02
"""Factors a tick on M's weight, while the alarm stands and after, when it may adapt."""


@dataclass(frozen=True, slots=True)
class AlarmState:
    """The alarm after one row.

    Attributes:
        score: 1 and above is an alarm; continuous, not negative.
        fired: whether the alarm stands.
        notice: what was seen and what to do, on the first tick of an episode alone.
    """

    score: float
    fired: bool
    notice: str | None = None


class Alarm:
    """Watches rows, one a tick in order. Equal rows make equal alarms, so every rank's acts alike.

    Args:
        anchor: cadence and delay tell when M arrives; ``alarm: adapt`` lets :attr:`factor` move.
        merger: tells what weight M is going to have.
    """

    def __init__(self, anchor: AnchorConfig, merger: MergerConfig) -> None:
        self._anchor, self._merger = anchor, merger
        self._rule, self._fading = build_merger(merger), Fading(merger.decay, merger.hold)
        self._schedule = AnchorSchedule(anchor.cadence, anchor.delay)
        self._exposure = 0.0
        self._agreement = CHANCE
        self._stands = False
        self._lengths: deque[float] = deque(maxlen=2 * WINDOW)
        self._cuts: deque[float] = deque(maxlen=2 * WINDOW)
        self.factor = 1.0
        """On M's weight; stays 1 unless ``anchor.alarm`` is ``adapt``."""

    def update(self, row: Mapping[str, float | None]) -> AlarmState:
        """The alarm after ``row``. Of the keys that it reads only ``tick`` must be there."""
        tick, age = int(row["tick"] or 0), row.get("anchor/age")
        held = None if age is None else int(age) - self._anchor.delay
        if held is not None:
            self._expose(held, row.get("merger/weight") or 0.0, row.get("anchor/sign_agreement"))
        for seen, key in ((self._lengths, "rollout/response_length"), (self._cuts, "rollout/truncated_frac")):
            value = row.get(key)
            if value is not None:
                seen.append(value)
        score = self._ahead(tick, held) / LIMIT * (1.0 + symptom(self._lengths, self._cuts) / 2.0)
        if not self._anchor.enabled:  # no M, nothing to warn of
            score = 0.0
        begins = score >= 1.0 and not self._stands
        self._stands = begins or (self._stands and score >= CALM)
        if self._anchor.alarm == "adapt":
            self.factor = self.factor * LOWER if self._stands else min(1.0, self.factor * RAISE)
        return AlarmState(score, self._stands, self._notice(tick, held, score) if begins else None)

    def _expose(self, held: int, weight: float, agreement: float | None) -> None:
        if agreement is None:
            agreement = CHANCE
        if self._merger.gate == "agreement":  # what it lets through agrees, with the mean of the fast gradient
            agreement = 1.0
        self._exposure = (0.0 if held == 0 else self._exposure) + pressure(weight, agreement)
        self._agreement = MEAN_BETA * self._agreement + (1.0 - MEAN_BETA) * agreement

    def _ahead(self, tick: int, held: int | None) -> float:
        """The largest exposure from ``tick`` to ``HORIZON`` ticks after it, if nothing but the calendar changes it."""
        exposure = worst = self._exposure
        for later in range(tick + 1, tick + 1 + HORIZON):
            if self._schedule.fires(later):
                held, exposure = 0, 0.0
            elif held is not None:
                held += 1
            if held is not None:
                exposure += pressure(self._weight(held), self._agreement)
            worst = max(worst, exposure)
        return worst

    def _weight(self, held: int) -> float:
        """M's weight to come, ``held`` ticks after an arrival; 0 with a gate: what it will let through is not known."""
        if self._merger.gate != "none":
            return 0.0
        return self._rule.weight(self._fading.left(held) * self.factor)

    def _notice(self, tick: int, held: int | None, score: float) -> str:
        weight = self._weight(held or 0)
        now = "M is about to arrive" if held is None else f"M has been held for {held} ticks"
        return (
            f"collapse alarm at tick {tick}, score {score:.1f}: {now}; within {HORIZON} ticks it will have been used "
            f"too long at weight {weight:.2f}, while {self._agreement:.0%} of its signs agree with the fast gradient "
            "(50% is chance). Lower its weight (merger.decay=0.8), or use it for fewer ticks (merger.hold=5 or "
            "anchor.cadence=5)"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "exposure": self._exposure,
            "agreement": self._agreement,
            "stands": self._stands,
            "lengths": list(self._lengths),
            "cuts": list(self._cuts),
            "factor": self.factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exposure, self._agreement = state["exposure"], state["agreement"]
        self._stands, self.factor = state["stands"], state["factor"]
        self._lengths.extend(state["lengths"])
        self._cuts.extend(state["cuts"])


def pressure(weight: float, agreement: float) -> float:
    """What one tick adds to the exposure: weight^2, less as M agrees with the fast gradient better than chance."""
    return weight**2 * min(1.0, 2.0 * (1.0 - agreement))


def symptom(lengths: deque[float], cuts: deque[float]) -> float:
    """0 to 1: how much longer, or more often truncated, the last ``WINDOW`` steps' responses are than those before."""
    if len(lengths) < 2 * WINDOW or len(cuts) < 2 * WINDOW:
        return 0.0
    (length, longer), (cut, more) = (
        (fmean(list(seen)[:WINDOW]), fmean(list(seen)[WINDOW:])) for seen in (lengths, cuts)
    )
    return min(1.0, max(0.0, (longer / length - 1.0) / LONGER, (more - cut) / CUT))
