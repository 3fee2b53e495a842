"""Several tasks as one stream."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_grpo.config import ConfigError
from megatron_grpo.data.problem import Problem, Task

BLOCK = 1000
"""Problems in which each task has its exact share."""


class Mixture:
    """Tasks mixed by weight: of every `BLOCK` problems each has its share, in an order shuffled by (seed, block).

    A task is drawn from in its own order, so that its epochs stay whole, and any place is found without going through
    those before it.
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        """Raise ConfigError for a weight too small to have a place in a block."""
        self._tasks, self._seed = tuple(tasks), seed
        self._shares = shares(BLOCK, weights)
        if 0 in self._shares:
            least = sum(weights) / BLOCK
            raise ConfigError(
                f"data.mix: weight {weights[self._shares.index(0)]} of {sum(weights)} is less than one problem in "
                f"{BLOCK}; use at least {least}"
            )
        self._block = lru_cache(maxsize=4)(self._places)

    def train_problem(self, index: int) -> Problem:
        block, place = divmod(index, BLOCK)
        which, within = self._block(block)[place]
        return self._marked(self._tasks[which].train_problem(block * self._shares[which] + within), which)

    def fingerprint(self) -> str:
        parts = (task.fingerprint() for task in self._tasks)
        return f"mixture {self._shares} {self._seed} {list(parts)}"

    def validation(self) -> list[Problem]:
        """All of them, task by task."""
        return [self._marked(problem, which) for which, task in enumerate(self._tasks) for problem in task.validation()]

    def _places(self, block: int) -> list[tuple[int, int]]:
        """Task and number within the block's share of it, at each place of a block."""
        order = [which for which, share in enumerate(self._shares) for _ in range(share)]
        random.Random(f"mixture/{self._seed}/{block}").shuffle(order)
        seen = [0] * len(self._shares)
        places = []
        for which in order:
            places.append((which, seen[which]))
            seen[which] += 1
        return places

    def _marked(self, problem: Problem, which: int) -> Problem:
        """The problem under an id that no other task's has."""
        return replace(problem, id=problem.id * len(self._tasks) + which)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` dealt out by weight, each share within 1 of its exact value (largest remainders first)."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda which: parts[which] - exact[which])
    for which in by_remainder[: total - sum(parts)]:
        parts[which] += 1
    return parts
