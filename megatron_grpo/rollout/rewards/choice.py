"""The `choice` reward: the letter of a multiple-choice answer."""

from __future__ import annotations

import re

from megatron_grpo.rollout.rewards.extract import extract_answer
from megatron_grpo.rollout.rewards.gold import choice_gold, read_gold
from megatron_grpo.rollout.rewards.number import plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Verdict, without_stop_text

_LETTER = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]](?:[\s.:].*)?|([A-Za-z])(?:\s*[).:](?:\s.*)?)?", re.DOTALL)
_ANSWER_IS = re.compile(r"\banswer[ \t]+is[ \t]+", re.IGNORECASE)
_SEVERAL = re.compile(
    r"[(\[]?\s*[A-Za-z]\s*[)\].:]*\s*(?:,|/|&|\+|\bor\b|\band\b)\s*(?:[(\[]\s*[A-Za-z]\s*[)\]]|[A-Z](?![A-Za-z']))"
)


def choice_reward(response: str, answer: str, finished: bool) -> Verdict:
    """1 iff the response's final answer, else what follows its last `answer is`, else all of it, begins with the gold
    letter standing alone.

    `B`, `b`, `(B)`, `B.`, `B) because`, `**B**`, `\\boxed{\\text{B}}` and `Answer: (B) Paris` all say B; `Both` says
    nothing, and nor does `(A) or (B)`.
    """
    gold = read_gold(choice_gold, answer)
    if isinstance(gold, Verdict):
        return gold
    text = without_stop_text(response)
    said = extract_answer(text, finished=finished)
    if said is not None:
        letter = _letter(said)
    elif finished:
        last = _ANSWER_IS.split(text)[-1].partition("\n")[0]
        letter = _letter(last) or _letter(text)
    else:
        letter = None
    return UNREADABLE if letter is None else Verdict(float(letter == gold), True)


def _letter(said: str) -> str | None:
    """The letter, in upper case, that stands alone at the head of a text."""
    said = plain(said[:500])
    match = _LETTER.fullmatch(said)
    return None if match is None or _SEVERAL.match(said) else (match[1] or match[2]).upper()
