"""The own rules of reasoning-gym's tasks.

Some of them read an answer with `eval` or sympy's parser. So no text reaches them that could call, reach into or define
anything: what is left are numbers, words, lists and arithmetic. They run in a process of their own, under limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_grpo.rollout.rewards.extract import extract_answer
from megatron_grpo.rollout.rewards.limit import LimitedFunction
from megatron_grpo.rollout.rewards.math import MEMORY_GIB
from megatron_grpo.rollout.rewards.verdict import UNREADABLE, Question, Verdict, without_stop_text

PREFIX = "reasoning_gym:"
_LONGEST = 2000
_CALL = re.compile(r"[\w)\]}'\"]\s*\(|__|\w\s*\.\s*[A-Za-z_]|\blambda\b|\bfor\b|\*\*.*\*\*|[@`\\]|:=", re.DOTALL)


class ReasoningReward:
    """The score, 0 to 1, that the task's own rule gives the final answer: see `extract_answer`; else the whole text."""

    def __init__(self, *, limit_s: float) -> None:
        target = f"{__name__}:{own_score.__name__}"
        self._call = LimitedFunction(target, limit_s=limit_s, memory_gib=MEMORY_GIB)

    def __call__(self, response: str, question: Question, finished: bool) -> Verdict:
        text = without_stop_text(response)
        said = extract_answer(text, finished=finished)
        if said is None:
            said = text.strip() if finished else ""
        if not said:
            return UNREADABLE
        if said == question.answer:
            return Verdict(1.0, True)
        if len(said) > _LONGEST or _CALL.search(said):
            return Verdict(0.0, False)
        assert question.entry is not None
        outcome = self._call(question.task.removeprefix(PREFIX), said, dict(question.entry))
        if outcome.value is None:
            return UNREADABLE
        return Verdict(min(1.0, max(0.0, float(outcome.value))), True)


def own_score(name: str, said: str, entry: Mapping[str, Any]) -> float:
    """What reasoning-gym's task `name` gives `said`. For a child."""
    return float(_rule(name)(said, entry))


@lru_cache(maxsize=64)
def _rule(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
