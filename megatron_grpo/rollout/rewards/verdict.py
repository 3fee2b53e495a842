"""What a reward says about one response, and what it may know of the problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_BACKWARDS = re.compile(r"\s*(?:(?:>\|[^<>|\s]{1,40}\|<|>s/<)\s*)+")
"""Stop texts and space, read from the end: a search for them from the front is quadratic in long runs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is what the advantage is made of; `parsed` says whether an answer could be read at all.

    `reward=None` with `parsed`: this reward has nothing to say of the sample and adds nothing to what others say.
    `reward=None` without: nobody can say, since the gold cannot be read or the rule failed: whatever other rewards
    say, the sample enters no statistic.
    """

    reward: float | None
    parsed: bool


class Question(Protocol):
    """What a reward may know of a problem."""

    @property
    def task(self) -> str:
        """Name of the task that it comes from."""
        ...

    @property
    def answer(self) -> str:
        """The gold answer."""
        ...

    @property
    def entry(self) -> Mapping[str, Any] | None:
        """What the task's own rule needs beside it."""
        ...


Rule = Callable[[str, str, bool], Verdict]
"""(response text, gold answer, whether the response ended by itself) -> verdict. Never raises on any text."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """One of a run's rewards: logged as `rewards/NAME`, added to the others by weight.

    `score` takes the response's text, its problem and whether it ended by itself.
    """

    name: str
    weight: float
    score: Callable[[str, Question, bool], Verdict]


UNREADABLE = Verdict(0.0, False)
UNSCORABLE = Verdict(None, False)
ABSTAINS = Verdict(None, True)


def without_stop_text(response: str) -> str:
    """The response without stop tokens that were decoded as text at its end (`<|im_end|>`, `</s>`)."""
    ending = _BACKWARDS.match(response[::-1])
    return response if ending is None else response[: len(response) - ending.end()]
