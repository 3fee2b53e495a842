"""Gold answers as the rewards read them. ValueError says in words what is wrong with one."""

from __future__ import annotations

import re

from megatron_grpo.rollout.rewards.extract import MARKER, extract_answer, last_boxed
from megatron_grpo.rollout.rewards.number import DASHES, parse_quantity, plain

_NO_ANSWER = {"", "none", "null", "nan"}

_SIGN_SPACE = re.compile(r"^([+-])\s+")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_LATEX_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_EMPTY_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*(?:\{\s*\})?(?!\s*\{)|\\(?:left|right|frac)(?![A-Za-z])")
_PROSE = re.compile(r"[^\W\d_]{2,}[\s:,;]+[^\W\d_]{2,}")
_CHOICE = re.compile(r"[(\[]?([A-Za-z])[)\].]?")


def is_no_answer(text: str) -> bool:
    """Whether a gold, or the box in it, holds nothing or a word for it (`None`, `\\text{null}`): it pays nobody."""
    inside = last_boxed(text)
    return plain(text if inside is None else inside).lower() in _NO_ANSWER


def final_gold(answer: str) -> str:
    """What `math` compares: the final answer that :func:`extract_answer` finds, else all of it. Raises as
    :func:`value_gold` does, of what is found."""
    found = extract_answer(answer, finished=True)
    return value_gold(answer if found is None else found)


def value_gold(answer: str) -> str:
    """What follows the last `####`, or all; a number loses `$`, commas and a final dot.

    Anything else is kept as it is (an expression, a LaTeX term, one word). Raises ValueError when nothing is
    left, or when what is left is several lines or prose, which no reward could compare.
    """
    gold = _not_empty(answer.rsplit(MARKER, 1)[-1].strip()).translate(DASHES)
    number = _SIGN_SPACE.sub(r"\1", gold.replace("$", "").strip())
    if _NUMBER.fullmatch(number) and any(character.isdigit() for character in number):
        return number.replace(",", "").removesuffix(".").removeprefix("+")
    is_prose = _PROSE.search(_LATEX_COMMAND.sub(" ", gold)) and parse_quantity(plain(gold)) is None
    if "\n" in gold or is_prose:
        raise ValueError(
            f"its answer {_shown(gold)} is prose, not a value (write a value, or end a solution in '#### value')"
        )
    if not any(character.isalnum() for character in _EMPTY_TEXT.sub("", gold)) or not _balanced(gold):
        raise ValueError(f"its answer {_shown(gold)} cannot be read as a value")
    return gold


def _balanced(text: str) -> bool:
    """Whether every brace that opens is closed."""
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def number_gold(answer: str) -> str:
    """A value that is a number, with a unit or not; raises ValueError for any other."""
    gold = value_gold(answer)
    if parse_quantity(plain(gold)) is None:
        raise ValueError(f"its answer {_shown(gold)} is not a number (reward.kind=gsm8k compares numbers)")
    return gold


def choice_gold(answer: str) -> str:
    """One letter, with or without brackets, in upper case; raises ValueError for anything else."""
    gold = _not_empty(answer.rsplit(MARKER, 1)[-1].strip())
    match = _CHOICE.fullmatch(gold)
    if match is None:
        raise ValueError(f"its answer {_shown(gold)} is not one letter (reward.kind=choice compares letters)")
    return match[1].upper()


def _not_empty(gold: str) -> str:
    if is_no_answer(gold):
        raise ValueError(f"its answer is empty ({gold!r})")
    return gold


def _shown(gold: str) -> str:
    return repr(gold if len(gold) <= 60 else gold[:57] + "...")
