"""Rewards by rule. A new one is a callable with the `Reward` signature and its line in `build_reward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_grpo.config import ConfigError
from megatron_grpo.rollout.rewards.exact import chain_sum_reward, exact_reward
from megatron_grpo.rollout.rewards.math import MathReward
from megatron_grpo.rollout.rewards.verdict import Reward, Verdict

if TYPE_CHECKING:
    from megatron_grpo.config import RewardConfig

__all__ = ["Reward", "Verdict", "build_reward", "score_batch"]


def build_reward(reward: RewardConfig, task_name: str) -> Reward:
    """The reward that `reward.kind` names for the task; raises ConfigError when they do not fit."""
    if reward.kind == "exact":
        return chain_sum_reward if task_name == "chain_sum" else exact_reward
    if task_name == "chain_sum":
        raise ConfigError("reward.kind=math: answers of data.task=chain_sum have no #### or box; use exact")
    return MathReward()


def score_batch(
    reward: Reward, responses: Sequence[str], answers: Sequence[str], finished: Sequence[bool]
) -> list[Verdict]:
    """One verdict a response, in order. Raises ValueError when the three lists differ in length."""
    return [reward(response, answer, done) for response, answer, done in zip(responses, answers, finished, strict=True)]
