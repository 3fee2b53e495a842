"""The smallest byte budget under which a coded gradient still points where the uncompressed one does."""

from bisect import bisect_left
from collections.abc import Callable

RUNGS = tuple(0.0075 * 2 ** (step / 4) for step in range(16))
"""Shares of a bfloat16 crossing, 0.0075 to 0.1."""
PROBES = 4
"""Rungs that a search asks for; of the last one only where all others fall short, as a fifth."""


def lowest_rung(cosine_at: Callable[[float], float], target: float) -> tuple[float, float]:
    """The smallest of ``RUNGS`` whose cosine is at least ``target``, and that cosine; the largest where none is.

    By bisection: ``cosine_at`` is taken to rise with the share. A higher target never gives a smaller share, whatever
    it is.
    """
    asked: dict[float, float] = {}

    def ask(share: float) -> float:
        asked[share] = cosine_at(share)
        return asked[share]

    share = RUNGS[bisect_left(RUNGS, target, hi=len(RUNGS) - 1, key=ask)]
    return share, asked[share] if share in asked else ask(share)
