"""Rewards of a sampled batch: scored once in a replica, known to all of its ranks.

Legend: B sequences, K rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.config import RewardConfig
from megatron_grpo.data.problem import Problem
from megatron_grpo.ops.advantages import overlong_penalty, weighted_reward
from megatron_grpo.parallel.collectives import broadcast_from
from megatron_grpo.parallel.groups import Coordinates, ParallelGroups
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.rewards import NamedReward, Verdict, score_batch


@dataclass(frozen=True, slots=True)
class Scores:
    """What was said of each sequence. Scores are fp32, NaN where there is none.

    Attributes:
        reward_B: the weighted sum.
        part_KB: of each reward alone, in the scorer's order.
        parsed_B: whether every reward found an answer to judge.
    """

    reward_B: torch.Tensor
    part_KB: torch.Tensor
    parsed_B: torch.Tensor

    def with_rows(self, rows_K: torch.Tensor, other: "Scores") -> "Scores":
        """The same with those of ``other`` at ``rows_K``."""
        return Scores(
            self.reward_B.index_copy(0, rows_K, other.reward_B),
            self.part_KB.index_copy(1, rows_K, other.part_KB),
            self.parsed_B.index_copy(0, rows_K, other.parsed_B),
        )


class Scorer:
    """Scores on the last stage's first tensor rank and tells the replica.

    Args:
        rewards: the rules and their weights.
        tokenizer: turns ids back into text; end tokens are not part of it.
        groups: where this rank stands.
    """

    def __init__(self, rewards: Sequence[NamedReward], tokenizer: Tokenizer, groups: ParallelGroups) -> None:
        self._rewards, self.tokenizer, self._groups = tuple(rewards), tokenizer, groups
        stage = groups.layout.pipeline - 1
        self._source = groups.layout.rank_of(Coordinates(stage, groups.at.data, 0))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the rewards, in the order of ``Scores.part_KB``."""
        return tuple(reward.name for reward in self._rewards)

    def __call__(self, batch: Batch, problems: Sequence[Problem]) -> Scores:
        """Score ``batch``, whose row i answers ``problems[i]``. Collective over the replica."""
        count, device = len(self._rewards), batch.tokens_BS.device
        table = torch.zeros(count + 1, len(batch), device=device)
        if self._groups.rank == self._source:
            texts, finished = self._texts(batch)
            verdicts = [score_batch(reward, texts, problems, finished) for reward in self._rewards]
            table[:count] = torch.tensor([[_number(verdict) for verdict in row] for row in verdicts])
            table[count] = torch.tensor(
                [float(all(v.parsed for v in column)) for column in zip(*verdicts, strict=True)]
            )
        broadcast_from(table, self._source, self._groups.model)
        weight_K = torch.tensor([reward.weight for reward in self._rewards], device=device)
        return Scores(weighted_reward(table[:count], weight_K), table[:count], table[count].bool())

    def _texts(self, batch: Batch) -> tuple[list[str], list[bool]]:
        """Each response without its end token, and whether it had one."""
        texts, finished = [], []
        for ids, length in zip(batch.responses_BR.tolist(), batch.response_lengths_B.tolist(), strict=True):
            ended = ids[length - 1] in self.tokenizer.eos_ids
            texts.append(self.tokenizer.decode(ids[: length - 1 if ended else length]))
            finished.append(ended)
        return texts, finished


def _number(verdict: Verdict) -> float:
    return float("nan") if verdict.reward is None else verdict.reward


def shapes_length(cfg: RewardConfig) -> bool:
    """Whether rewards depend on a response's length."""
    return cfg.overlong_buffer > 0 or cfg.length_penalty > 0.0


def length_term(cfg: RewardConfig, length_B: torch.Tensor, max_response: int) -> torch.Tensor | None:
    """What a response's length adds to its reward, fp32 ``[B]``; ``None`` where the config sets no such term."""
    if not shapes_length(cfg):
        return None
    overlong_B = overlong_penalty(length_B, limit=max_response, buffer=cfg.overlong_buffer)
    return cfg.overlong_weight * overlong_B - cfg.length_penalty * length_B.float() / max_response


def reward_names(cfg: RewardConfig, scorer: Scorer) -> tuple[str, ...]:
    """Of all that a reward is the sum of, the terms of length together as ``length``."""
    return (*scorer.names, "length") if shapes_length(cfg) else scorer.names
