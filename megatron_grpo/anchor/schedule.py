"""At which ticks the anchor fires, and which ticks must be remembered for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnchorSchedule:
    """Cadence C and delay K, in ticks (counted from 0).

    The first fire is at the first multiple of C that is >= max(K, 1); at a fire of tick t the weights and samples of
    tick t - K are replayed.
    """

    cadence: int
    delay: int

    @property
    def first(self) -> int:
        return -(-max(self.delay, 1) // self.cadence) * self.cadence

    def fires(self, tick: int) -> bool:
        return tick >= self.first and tick % self.cadence == 0

    def remembers(self, tick: int) -> bool:
        """Whether a later fire (or this one, with delay 0) replays ``tick``."""
        return self.fires(tick + self.delay)

    def age(self, tick: int, arrived: int | None) -> int | None:
        """Ticks since the weights of M were current, at ``tick``; M last learned at the fire of tick ``arrived``.

        K at the fire, up to K + C - 1 just before the next; ``None`` before any.
        """
        return None if arrived is None else self.delay + tick - arrived
