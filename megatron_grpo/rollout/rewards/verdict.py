"""What a reward says about one response."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_STOP_TEXT = re.compile(r"(?:\s*(?:<\|[^<>|\s]{1,40}\|>|</s>))+\s*\Z")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is what the advantage is made of; `parsed` says whether an answer could be read at all."""

    reward: float
    parsed: bool


Reward = Callable[[str, str, bool], Verdict]
"""(response text, gold answer, whether the response ended by itself) -> verdict. Never raises on any text."""

UNREADABLE = Verdict(0.0, False)


def without_stop_text(response: str) -> str:
    """The response without stop tokens that were decoded as text at its end (`<|im_end|>`, `</s>`)."""
    return _STOP_TEXT.sub("", response)
