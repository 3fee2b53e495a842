"""What every task hands out, and what a task must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt with its gold answer.

    `id` names the problem: within one task, equal ids mean equal prompts, in every run and on every rank.
    A stream may hand out one problem twice, so samples are grouped by their place in the batch, not by `id`.
    `task` is the name of the task it comes from, `entry` what that task's own rule needs beside the answer.
    """

    id: int
    prompt: str
    answer: str
    task: str = field(default="", compare=False)
    entry: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


class Task(Protocol):
    """An endless, seekable stream of training problems and a fixed list of held-out ones."""

    def train_problem(self, index: int) -> Problem:
        """The problem at stream position `index` >= 0: a pure function of (task, seed, index)."""
        ...

    def fingerprint(self) -> str:
        """What the training stream follows from: equal exactly where the streams are, wherever their files lie."""
        ...

    def validation(self) -> list[Problem]:
        """The held-out problems, always the same, in the same order; none of them is ever trained on."""
        ...
