"""Rewards that compare text with text."""

from __future__ import annotations

from megatron_grpo.rollout.rewards.extract import MARKER
from megatron_grpo.rollout.rewards.gold import normal, read_gold, text_gold
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Verdict, without_stop_text


def chain_sum_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the response ended by itself, has exactly one `=`, and what follows it is the answer exactly."""
    text = without_stop_text(response)
    if not finished or text.count("=") != 1:
        return UNREADABLE
    said = text.partition("=")[2]
    return Verdict(float(bool(answer) and said == answer), bool(said))


def exact_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the response ended by itself and what follows its last `####`, or all of it, is the answer.

    Space around either is ignored, and a number is written without `$`, commas and a final dot (`gold.normal`).
    Numbers are not compared by value otherwise (that is `math`). An empty gold pays nobody, an essay scores nobody.
    """
    gold = read_gold(text_gold, answer)
    if isinstance(gold, Verdict):
        return gold
    said = without_stop_text(response).rsplit(MARKER, 1)[-1].strip()
    if not finished or not said:
        return UNREADABLE
    return Verdict(float(gold in (said, normal(said))), True)
