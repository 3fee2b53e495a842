"""The `gsm8k` reward: the number after the last `####`, wherever it stands."""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_grpo.rollout.rewards.extract import MARKER, after_marker
from megatron_grpo.rollout.rewards.gold import is_no_answer, number_gold
from megatron_grpo.rollout.rewards.number import Quantity, parse_quantity, plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, UNSCORABLE, Verdict, without_stop_text

_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


def gsm8k_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the line after the last `####` is the gold number, exactly as fractions compare."""
    text = without_stop_text(response)
    return _compare(after_marker(text, finished=finished), answer)


def flexible_gsm8k_reward(response: str, answer: str, finished: bool) -> Verdict:
    """As :func:`gsm8k_reward`, but without a marker the last number of a finished text counts."""
    text = without_stop_text(response)
    if MARKER in text or not finished:
        return _compare(after_marker(text, finished=finished), answer)
    numbers = _LAST_NUMBER.findall(text)
    return _compare(numbers[-1] if numbers else None, answer)


def _compare(said: str | None, answer: str) -> Verdict:
    if is_no_answer(answer):
        return UNREADABLE
    gold = _gold(answer)
    if gold is None:
        return UNSCORABLE
    quantity = None if said is None else parse_quantity(plain(said))
    return UNREADABLE if quantity is None else Verdict(float(gold.agrees_with(quantity)), True)


@lru_cache(maxsize=1024)
def _gold(answer: str) -> Quantity | None:
    """The gold number, of which a group of responses asks again and again."""
    try:
        return parse_quantity(plain(number_gold(answer)))
    except ValueError:
        return None
