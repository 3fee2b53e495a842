"""The `math` reward: reads the final answer out of a response and compares it with the gold by value.

Extraction is strict: the line after the last `####`, else the last `\\boxed{}`, else nothing. Numbers are
compared exactly, as fractions; small formulas by math-verify. Model text is never evaluated: what reaches the
formula parser has passed an allow-list, and what may not reach it is compared as text.
"""

from __future__ import annotations

import re
from threading import Lock

from megatron_grpo.rollout.rewards.number import parse_quantity, plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Verdict, without_stop_text

_MARKER = "####"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NO_ANSWER = {"", "none", "null", "nan"}
_LONGEST_ANSWER = 200
_LONGEST_FORMULA = 80

_CHEAP = r"frac|dfrac|tfrac|pi|cdot|times|div|left|right|infty|pm"
_COSTLY = re.compile(r"\\(?:sqrt|sin|cos|tan|ln|log)(?![A-Za-z])")
_COMMAND = re.compile(rf"\\(?:{_CHEAP}|sqrt|sin|cos|tan|ln|log)(?![A-Za-z])")
_FORMULA = re.compile(r"[0-9A-Za-z+\-*/(){}\[\],.\s]*")
_TOO_LONG = re.compile(r"[A-Za-z]{4,}|\d{16,}")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[0-9A-Za-z])\s*\^|\*\s*\*")
_ATOM_POWER = re.compile(r"(?<=[A-Za-z0-9])\^(?:\{\s*-?(?:\d{1,2}|[A-Za-z])\s*\}|[0-9A-Za-z])")
_GROUP_POWER = re.compile(r"(?<=[)}])\^(?:\{\s*[23]\s*\}|[23](?!\d))")


class MathReward:
    """1 iff the response's final answer has the value of the gold.

    A gold that is empty or no value pays nobody, so its group has no spread and no weight in the gradient. An
    unfinished response counts only when its answer is closed (a line end after `####`, the brace of a box).
    Safe in threads: no signals; formulas go through the parser one at a time.
    """

    def __init__(self) -> None:
        self._formulas = Lock()

    def __call__(self, response: str, answer: str, finished: bool) -> Verdict:
        """The verdict on one response; any text is answered, none raises."""
        said = extract_answer(without_stop_text(response), finished=finished)
        if said is None or not _is_readable(said):
            return UNREADABLE
        gold = extract_answer(answer, finished=True) or answer
        return Verdict(float(self._equal(plain(gold), plain(said))), True)

    def _equal(self, gold: str, said: str) -> bool:
        if gold.lower() in _NO_ANSWER:
            return False
        gold_quantity, said_quantity = parse_quantity(gold), parse_quantity(said)
        if gold_quantity is not None and said_quantity is not None:
            return gold_quantity.agrees_with(said_quantity)
        if _squeezed(gold) == _squeezed(said):
            return True
        if ("," in gold) != ("," in said) or not (is_small_formula(gold) and is_small_formula(said)):
            return False
        with self._formulas:
            return _formulas_equal(gold, said)


def extract_answer(text: str, *, finished: bool) -> str | None:
    """The line after the last `####`, else the inside of the last box; None when there is neither.

    `finished=False` refuses a last line that more tokens might have continued.
    """
    _, marker, tail = text.rpartition(_MARKER)
    if not marker:
        return _last_boxed(text)
    line, newline, _ = tail.partition("\n")
    if not finished and not newline:
        return None
    line = line.strip().strip("*").strip()
    return _last_boxed(line) or line


def _last_boxed(text: str) -> str | None:
    """What stands between the braces of the last closed `\\boxed{}` or `\\fbox{}`."""
    inside = None
    for match in _BOXED.finditer(text):
        depth = 1
        for place in range(match.end(), min(len(text), match.end() + _LONGEST_ANSWER + 1)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                inside = text[match.end() : place].strip()
                break
    return inside


def _is_readable(said: str) -> bool:
    """Whether there is an answer at all: a letter or digit beside LaTeX commands, and not an essay."""
    return len(said) <= _LONGEST_ANSWER and any(c.isalnum() for c in re.sub(r"\\[A-Za-z]+", "", said))


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


def is_small_formula(text: str) -> bool:
    """Whether a formula may reach the symbolic parser, whose time must be bounded without a timeout.

    Allowed are arithmetic, letters, a few commands, powers of a letter or digit by a letter or two digits,
    and two small powers of a group at most; no factorials, sums, integrals, towers, long numbers or words.
    """
    if len(text) > _LONGEST_FORMULA or _TOWER.search(text) or len(_COSTLY.findall(text)) > 3:
        return False
    rest = _ATOM_POWER.sub(" ", _COMMAND.sub(" ", text))
    rest, groups = _GROUP_POWER.subn(" ", rest)
    return groups <= 2 and _FORMULA.fullmatch(rest) is not None and _TOO_LONG.search(rest) is None


def _formulas_equal(gold: str, said: str) -> bool:
    """Whether two small formulas are the same to math-verify; one that does not parse equals nothing."""
    from math_verify import LatexExtractionConfig, parse, verify  # sympy: seconds to import, rarely needed

    reader = [LatexExtractionConfig(boxed_match_priority=0)]
    gold_parts, said_parts = (
        parse(rf"\boxed{{{text}}}", reader, fallback_mode="no_fallback", parsing_timeout=None) for text in (gold, said)
    )
    if not gold_parts or not said_parts:
        return False
    return bool(verify(gold_parts, said_parts, timeout_seconds=None))
