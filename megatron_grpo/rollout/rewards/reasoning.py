"""The own rules of reasoning-gym's tasks.

Some of them read an answer with `eval` or sympy's parser. So only two kinds of text reach them, by an allow-list: words
and operators without a bracket or quote, in which nothing can be called; and what Python itself parses as numbers,
texts and names in lists and arithmetic, without a call, an attribute or an index. They run in a process of their own,
under limits.
"""

from __future__ import annotations

import ast
import re
import unicodedata

from megatron_grpo.rollout.rewards.extract import extract_answer
from megatron_grpo.rollout.rewards.limit import LimitedFunction, Patience
from megatron_grpo.rollout.rewards.math import MEMORY_GIB
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, UNSCORABLE, Question, Verdict, without_stop_text

PREFIX = "reasoning_gym:"
OWN_RULES = "megatron_grpo.rollout.rewards.own_rules:own_score"
"""Not imported here: the package takes seconds, and only the child needs it."""
_LONGEST = 2000
_WORDS = re.compile(r"(?:[\w\s,.;:!?%$/<>|&^~=+*-]|(?<=[A-Za-z])'(?=[A-Za-z]))*")
_TOWER = re.compile(r"\*\*.*\*\*|\^.*\^", re.DOTALL)
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Dict, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop),
)


class ReasoningReward:
    """The score, 0 to 1, that the task's own rule gives the final answer: see `extract_answer`; else the whole text."""

    def __init__(self, *, limit_s: float, patience: Patience | None = None) -> None:
        self._call = LimitedFunction(OWN_RULES, limit_s=limit_s, memory_gib=MEMORY_GIB, patience=patience)

    def __call__(self, response: str, question: Question, finished: bool) -> Verdict:
        text = without_stop_text(response)
        said = extract_answer(text, finished=finished)
        if said is None:
            said = text.strip() if finished else ""
        if not said:
            return UNREADABLE
        if said == question.answer:
            return Verdict(1.0, True)
        if not is_harmless(said):
            return Verdict(0.0, False)
        assert question.entry is not None
        outcome = self._call(question.task.removeprefix(PREFIX), said, dict(question.entry))
        if outcome.untried:
            return UNSCORABLE
        if outcome.value is None:
            return UNREADABLE
        return Verdict(min(1.0, max(0.0, float(outcome.value))), True)


def is_harmless(said: str) -> bool:
    """Whether a rule that evaluates it could only work out numbers, texts and lists."""
    if len(said) > _LONGEST or "__" in unicodedata.normalize("NFKC", said) or _TOWER.search(said):
        return False
    return _WORDS.fullmatch(said) is not None or _is_arithmetic(said)


def _is_arithmetic(said: str) -> bool:
    if not said.isascii() or "#" in said or "\\" in said:
        return False
    try:
        tree = ast.parse(said.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree))
