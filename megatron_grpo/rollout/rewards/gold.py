"""Gold answers as the rewards read them. ValueError says in words what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from megatron_grpo.rollout.rewards.extract import LONGEST_ANSWER, MARKER, extract_answer
from megatron_grpo.rollout.rewards.number import DASHES, Quantity, parse_gold, plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, UNSCORABLE, Verdict

T = TypeVar("T")

_NO_ANSWER = {"", "none", "null", "nan"}

_SIGN_SPACE = re.compile(r"^([+-])\s+")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_LATEX_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_EMPTY_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*(?:\{\s*\})?(?!\s*\{)|\\(?:left|right|frac)(?![A-Za-z])")
_PROSE = re.compile(r"(?<![^\W\d_])[^\W\d_]{2,}[\s:,;]+[^\W\d_]{2,}")
_CHOICE = re.compile(r"[(\[]?([A-Za-z])[)\].]?")


class EmptyGold(ValueError):
    """There is no answer at all, however it is dressed."""


def read_gold(read: Callable[[str], T], answer: str) -> T | Verdict:
    """The gold as ``read`` gives it; else the verdict on any response: 0 for an empty one, no score for a bad one."""
    try:
        return read(answer)
    except EmptyGold:
        return UNREADABLE
    except ValueError:
        return UNSCORABLE


@lru_cache(maxsize=1024)
def final_gold(answer: str) -> str:
    """What `math` compares: the final answer that :func:`extract_answer` finds, else all of it. Raises as
    :func:`value_gold` does, of what is found."""
    return value_gold(_final(answer))


@lru_cache(maxsize=1024)  # a group of responses asks for one again and again
def value_gold(answer: str) -> str:
    """What follows the last `####`, or all, as :func:`normal` writes it: a number, an expression, a LaTeX term, a word.

    Raises ValueError when nothing is left, or when what is left is several lines or prose, which has no value.
    """
    gold = normal(_not_empty(answer.rsplit(MARKER, 1)[-1].strip()))
    is_prose = _PROSE.search(_LATEX_COMMAND.sub(" ", gold)) and parse_gold(gold) is None
    if "\n" in gold or is_prose:
        raise ValueError(
            f"its answer {_shown(gold)} is prose, not a value (write a value, or end a solution in '#### value')"
        )
    if not any(character.isalnum() for character in _EMPTY_TEXT.sub("", gold)) or not _balanced(gold):
        raise ValueError(f"its answer {_shown(gold)} cannot be read as a value")
    return gold


@lru_cache(maxsize=1024)
def text_gold(answer: str) -> str:
    """What `exact` compares: as :func:`value_gold`, but one line of `LONGEST_ANSWER` characters may be any text."""
    gold = normal(_not_empty(answer.rsplit(MARKER, 1)[-1].strip()))
    return gold if "\n" not in gold and len(gold) <= LONGEST_ANSWER else value_gold(answer)


def normal(text: str) -> str:
    """A number without `$`, commas, a plus and a final dot; any other text as it is, but for dashes. In linear time."""
    text = text.translate(DASHES)
    number = _SIGN_SPACE.sub(r"\1", text.replace("$", "").strip())
    if _NUMBER.fullmatch(number) and any(character.isdigit() for character in number):
        return number.replace(",", "").removesuffix(".").removeprefix("+")
    return text


def _balanced(text: str) -> bool:
    """Whether every brace that opens is closed."""
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


@lru_cache(maxsize=1024)
def number_gold(answer: str) -> Quantity:
    """A value that is a number, with a unit or not; raises ValueError for any other."""
    gold = value_gold(answer)
    quantity = parse_gold(gold)
    if quantity is None:
        raise ValueError(f"its answer {_shown(gold)} is not a number (reward.kind=gsm8k compares numbers)")
    return quantity


def choice_gold(answer: str) -> str:
    """One letter, with or without brackets, in upper case; raises ValueError for anything else."""
    gold = _not_empty(answer.rsplit(MARKER, 1)[-1].strip())
    match = _CHOICE.fullmatch(gold)
    if match is None:
        raise ValueError(f"its answer {_shown(gold)} is not one letter (reward.kind=choice compares letters)")
    return match[1].upper()


def _final(answer: str) -> str:
    found = extract_answer(answer, finished=True)
    return answer.strip() if found is None else found


def _not_empty(gold: str) -> str:
    if plain(_final(gold)).lower() in _NO_ANSWER:
        raise EmptyGold(f"its answer is empty ({gold!r})")
    return gold


def _shown(gold: str) -> str:
    return repr(gold if len(gold) <= 60 else gold[:57] + "...")
