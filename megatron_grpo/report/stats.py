"""Statistics over seeds: mean and standard error, differences paired by seed, Student's quantile."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``n`` values; ``stderr`` is their sample deviation / sqrt(n), None for n = 1."""

    mean: float
    stderr: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean."""
        return None if self.stderr is None else self.stderr * student_quantile(self.n - 1)


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and standard error; None of no values."""
    known = list(values)
    if not known:
        return None
    stderr = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), stderr, len(known))


def paired_difference(value_of: Mapping[str, float], first: Mapping[str, float]) -> Estimate | None:
    """Mean of ``value_of[seed] - first[seed]`` over the seeds that both have; None when they share none."""
    return estimate(value_of[seed] - first[seed] for seed in value_of if seed in first)


@cache
def student_quantile(df: int) -> float:
    """t with P(|T| <= t) = 0.95 for ``df`` >= 1 degrees of freedom, by bisection of its angle atan(t / sqrt(df))."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, df) < 0.95 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _central_probability(angle: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(angle)): the finite series 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, df - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
