"""What every task hands out, and what a task must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt with its gold answer.

    `id` names the problem: within one task, equal ids mean equal prompts, in every run and on every rank.
    A stream may hand out one problem twice, so samples are grouped by their place in the batch, not by `id`.
    """

    id: int
    prompt: str
    answer: str


class Task(Protocol):
    """An endless, seekable stream of training problems and a fixed list of held-out ones."""

    def train_problem(self, index: int) -> Problem:
        """The problem at stream position `index` >= 0: a pure function of (task, seed, index)."""
        ...

    def validation(self) -> list[Problem]:
        """The held-out problems, always the same, in the same order; none of them is ever trained on."""
        ...
