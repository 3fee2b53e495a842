"""The `gsm8k` reward: the number after the last `####`, wherever it stands."""

from __future__ import annotations

import re

from megatron_grpo.rollout.rewards.extract import LONGEST_ANSWER, MARKER, after_marker
from megatron_grpo.rollout.rewards.gold import number_gold, read_gold
from megatron_grpo.rollout.rewards.number import parse_quantity, plain
from megatron_grpo.rollout.rewards.units import changes_a_number
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Verdict, without_stop_text

_NUMBER = re.compile(
    r"(-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|[eE][+-]?\d{1,2}(?!\w))?)"
    r"(\\?[^\W\d_]+|[!^]|\s+[^\W\d_]+)?"
)
"""A number wherever it stands, and the word that follows or touches it."""


def gsm8k_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the line after the last `####` is the gold number, exactly as fractions compare."""
    text = without_stop_text(response)
    return _compare(after_marker(text, finished=finished), answer)


def flexible_gsm8k_reward(response: str, answer: str, finished: bool) -> Verdict:
    """As :func:`gsm8k_reward`, but without a marker the last number of a finished text counts.

    What follows it is a sentence's: any word but those that make another number of it (`5 million`, `5k`, `2 x`).
    """
    text = without_stop_text(response)
    if MARKER in text or not finished:
        return _compare(after_marker(text, finished=finished), answer)
    numbers = _NUMBER.findall(text)
    if not numbers or changes_a_number(numbers[-1][1]):
        return _compare(None, answer)
    return _compare(numbers[-1][0], answer)


def _compare(said: str | None, answer: str) -> Verdict:
    gold = read_gold(number_gold, answer)
    if isinstance(gold, Verdict):
        return gold
    quantity = None if said is None or len(said) > LONGEST_ANSWER else parse_quantity(plain(said))
    if quantity is None or not gold.reads(quantity):
        return UNREADABLE
    return Verdict(float(gold.agrees_with(quantity)), True)
