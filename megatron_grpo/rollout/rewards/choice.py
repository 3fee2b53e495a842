"""The `choice` reward: the letter of a multiple-choice answer."""

from __future__ import annotations

import re

from megatron_grpo.rollout.rewards.extract import extract_answer
from megatron_grpo.rollout.rewards.gold import choice_gold, read_gold
from megatron_grpo.rollout.rewards.number import plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Verdict, without_stop_text

_LETTER = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]](?:[\s.:].*)?|([A-Za-z])(?:\s*[).:](?:\s.*)?)?", re.DOTALL)
_SEVERAL = re.compile(
    r"[(\[]?\s*[A-Za-z]\s*[)\].:]*\s*(?:,|/|&|\+|\bor\b|\band\b)\s*(?:[(\[]\s*[A-Za-z]\s*[)\]]|[A-Z](?![A-Za-z']))"
)


def choice_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the response's final answer, or all of it, begins with the gold letter standing alone.

    `B`, `b`, `(B)`, `B.`, `B) because`, `**B**`, `\\boxed{\\text{B}}` and `Answer: (B) Paris` all say B; `Both` says
    nothing, and nor does `(A) or (B)`.
    """
    gold = read_gold(choice_gold, answer)
    if isinstance(gold, Verdict):
        return gold
    text = without_stop_text(response)
    said = extract_answer(text, finished=finished)
    if said is None:
        if not finished:
            return UNREADABLE
        said = text
    said = plain(said[:500])
    match = _LETTER.fullmatch(said)
    if match is None or _SEVERAL.match(said):
        return UNREADABLE
    return Verdict(float((match[1] or match[2]).upper() == gold), True)
