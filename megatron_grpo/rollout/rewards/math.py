"""The `math` reward: reads the final answer out of a response and compares it with the gold by value.

Extraction is strict: see `extract.extract_answer`. Numbers are compared exactly, as fractions; small formulas by
math-verify, in a process of its own under a time limit. Model text is never evaluated: what reaches the formula parser
has passed an allow-list, and what may not reach it is compared as text.
"""

from __future__ import annotations

import re

from megatron_grpo.rollout.rewards.extract import LONGEST_ANSWER, extract_answer
from megatron_grpo.rollout.rewards.gold import final_gold, read_gold
from megatron_grpo.rollout.rewards.limit import LimitedFunction, Patience
from megatron_grpo.rollout.rewards.number import parse_gold, parse_quantity, plain
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, UNSCORABLE, Verdict, without_stop_text

FORMULAS = "megatron_grpo.rollout.rewards.formulas:formulas_equal"
"""Not imported here: its libraries take seconds, and only the child needs them."""
MEMORY_GIB = 4.0
_LONGEST_FORMULA = 80

_CHEAP = r"frac|dfrac|tfrac|pi|cdot|times|div|left|right|infty|pm"
_COSTLY = re.compile(r"\\(?:sqrt|sin|cos|tan|ln|log)(?![A-Za-z])")
_COMMAND = re.compile(rf"\\(?:{_CHEAP}|sqrt|sin|cos|tan|ln|log)(?![A-Za-z])")
_FORMULA = re.compile(r"[0-9A-Za-z+\-*/(){}\[\],.\s]*")
_TOO_LONG = re.compile(r"[A-Za-z]{4,}|\d{16,}")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|[0-9A-Za-z])\s*\^|\*\s*\*")
_ATOM_POWER = re.compile(r"(?<=[A-Za-z0-9])\^(?:\{\s*-?(?:\d{1,2}|[A-Za-z])\s*\}|[0-9A-Za-z])")
_WORD = re.compile(r"(?<!\\)(?<![^\W\d_])(?:[^\W\d_]{4,}|yes|no)(?![^\W\d_])", re.IGNORECASE)
_GROUP_POWER = re.compile(r"(?<=[)}])\^(?:\{\s*[23]\s*\}|[23](?!\d))")


class MathReward:
    """1 iff the response's final answer has the value of the gold.

    A gold that is empty pays nobody; one that is prose scores nobody. An unfinished response counts only when its
    answer is closed (a line end after `####`, the brace of a box). Safe in threads: formulas go to their process one
    at a time.
    """

    def __init__(self, *, limit_s: float = 5.0, patience: Patience | None = None) -> None:
        self._formulas = LimitedFunction(FORMULAS, limit_s=limit_s, memory_gib=MEMORY_GIB, patience=patience)

    def __call__(self, response: str, answer: str, finished: bool) -> Verdict:
        """The verdict on one response; any text is answered, none raises."""
        gold = read_gold(final_gold, answer)
        if isinstance(gold, Verdict):
            return gold
        said = extract_answer(without_stop_text(response), finished=finished)
        if said is None or not _is_readable(said):
            return UNREADABLE
        return self._compare(gold, plain(said))

    def _compare(self, gold: str, said: str) -> Verdict:
        gold_quantity, said_quantity = parse_gold(gold), parse_quantity(said)
        gold = plain(gold)
        if gold_quantity is not None and said_quantity is not None:
            return Verdict(float(gold_quantity.agrees_with(said_quantity)), True)
        if _squeezed(gold) == _squeezed(said):
            return Verdict(1.0, True)
        if ("," in gold) != ("," in said) or not (is_small_formula(gold) and is_small_formula(said)):
            return Verdict(0.0, True)
        outcome = self._formulas(*_apart(gold, said))
        if outcome.untried:
            return UNSCORABLE
        return UNREADABLE if outcome.value is None else Verdict(float(outcome.value), True)


def _is_readable(said: str) -> bool:
    """Whether there is an answer at all: a letter or digit beside LaTeX commands, and not an essay."""
    return len(said) <= LONGEST_ANSWER and any(c.isalnum() for c in re.sub(r"\\[A-Za-z]+", "", said))


def _squeezed(text: str) -> str:
    """Without space, and words in lower case: shorter runs of letters are variables, units and elements."""
    return re.sub(r"\s+", "", _WORD.sub(lambda word: word[0].casefold(), text))


def _apart(*texts: str) -> tuple[str, ...]:
    """Capitals whose small letter occurs as well, written as letters that do not occur: math-verify knows no case."""
    letters = set(re.sub(r"\\[A-Za-z]+", "", "".join(texts)))
    unused = (letter for letter in "qwzyvutsrkjhgfb" if letter not in letters and letter.upper() not in letters)
    capitals = (letter for letter in sorted(letters) if letter.isupper() and letter.lower() in letters)
    names = dict(zip(capitals, unused, strict=False))
    return tuple(re.sub(r"\\[A-Za-z]+|[A-Z]", lambda found: names.get(found[0], found[0]), text) for text in texts)


def is_small_formula(text: str) -> bool:
    """Whether a formula may reach the symbolic parser, whose time and reach must be bounded.

    Allowed are arithmetic, letters, a few commands, powers of a letter or digit by a letter or two digits,
    and two small powers of a group at most; no factorials, sums, integrals, towers, long numbers or words.
    """
    if len(text) > _LONGEST_FORMULA or _TOWER.search(text) or len(_COSTLY.findall(text)) > 3:
        return False
    rest = _ATOM_POWER.sub(" ", _COMMAND.sub(" ", text))
    rest, groups = _GROUP_POWER.subn(" ", rest)
    return groups <= 2 and _FORMULA.fullmatch(rest) is not None and _TOO_LONG.search(rest) is None
