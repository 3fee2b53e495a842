"""Rewards by rule. A new one is a `Rule`, its line in `build_rule` and `_GOLDS`, its name in `RewardConfig`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.rollout.rewards import gold
from megatron_grpo.rollout.rewards.choice import choice_reward
from megatron_grpo.rollout.rewards.exact import chain_sum_reward, exact_reward
from megatron_grpo.rollout.rewards.foreign import PREFIX as PYTHON
from megatron_grpo.rollout.rewards.foreign import ForeignReward
from megatron_grpo.rollout.rewards.form import format_reward
from megatron_grpo.rollout.rewards.gsm8k import flexible_gsm8k_reward, gsm8k_reward
from megatron_grpo.rollout.rewards.limit import Patience
from megatron_grpo.rollout.rewards.math import MathReward
from megatron_grpo.rollout.rewards.reasoning import PREFIX as REASONING
from megatron_grpo.rollout.rewards.reasoning import ReasoningReward
from megatron_grpo.rollout.rewards.verdict import NamedReward, Question, Rule, Verdict

if TYPE_CHECKING:
    from megatron_grpo.config import RewardConfig

__all__ = [
    "NamedReward",
    "Patience",
    "Question",
    "Rule",
    "Verdict",
    "build_rewards",
    "build_rule",
    "gold_check",
    "score_batch",
]


def build_rewards(cfg: RewardConfig, patience: Patience | None = None) -> tuple[NamedReward, ...]:
    """The run's rewards by rule (models are no rules), by name and weight; ``patience`` is for all of them together.

    Raises ConfigError for a function that cannot be imported.
    """
    rules = {kind: weight for kind, weight in cfg.weighted.items() if kind not in cfg.models}
    return tuple(NamedReward(kind, weight, _score(kind, cfg, patience)) for kind, weight in rules.items())


def _score(kind: str, cfg: RewardConfig, patience: Patience | None) -> Callable[[str, Question, bool], Verdict]:
    if kind == "exact":
        return OwnRule(limit_s=cfg.time_limit, patience=patience)
    rule = build_rule(kind, cfg, patience)
    return lambda response, question, finished: rule(response, question.answer, finished)


def build_rule(kind: str, cfg: RewardConfig, patience: Patience | None = None) -> Rule:
    """The rule that `kind` names, but for a task's own (`exact`), which depends on the problem."""
    if kind.startswith(PYTHON):
        return ForeignReward(kind, limit_s=cfg.time_limit, patience=patience)
    if kind == "math":
        return MathReward(limit_s=cfg.time_limit, patience=patience)
    if kind == "gsm8k":
        return flexible_gsm8k_reward if cfg.flexible else gsm8k_reward
    return {"choice": choice_reward, "format": format_reward}[kind]


class OwnRule:
    """`exact`: what the problem's task says is right; for rows of a file, the same text."""

    def __init__(self, *, limit_s: float, patience: Patience | None = None) -> None:
        self._reasoning = ReasoningReward(limit_s=limit_s, patience=patience)

    def __call__(self, response: str, question: Question, finished: bool) -> Verdict:
        if question.task == "chain_sum":
            return chain_sum_reward(response, question.answer, finished)
        if question.task.startswith(REASONING):
            return self._reasoning(response, question, finished)
        return exact_reward(response, question.answer, finished)


_GOLDS: dict[str, Callable[[str], object]] = {
    "exact": gold.text_gold,
    "math": gold.final_gold,
    "gsm8k": gold.number_gold,
    "choice": gold.choice_gold,
}


def gold_check(cfg: RewardConfig) -> Callable[[str, str], None]:
    """(task, answer) -> nothing; ValueError, in words, for an answer that one of the run's rewards cannot read.

    Each reward reads the answer as it was written. A task's own rule wants nothing of it; `exact` on rows of a file
    wants a line of text.
    """

    def check(task: str, answer: str) -> None:
        for kind in cfg.weighted:
            if kind in _GOLDS and not (kind == "exact" and task.startswith(REASONING)):
                _GOLDS[kind](answer)

    return check


def score_batch(
    reward: NamedReward, responses: Sequence[str], questions: Sequence[Question], finished: Sequence[bool]
) -> list[Verdict]:
    """One verdict a response, in order. Raises ValueError when the three lists differ in length."""
    samples = zip(responses, questions, finished, strict=True)
    return [reward.score(response, question, done) for response, question, done in samples]
