"""Rewards of a sampled batch: scored once in a replica, known to all of its ranks.

Legend: B sequences, G sequences of one prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.data.problem import Problem
from megatron_grpo.parallel.collectives import broadcast_from
from megatron_grpo.parallel.groups import Coordinates, ParallelGroups
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.rewards import Verdict, score_batch

Reward = Callable[[str, str, bool], Verdict]


@dataclass(frozen=True, slots=True)
class Scores:
    """fp32 reward of each sequence, and whether an answer was found in it."""

    reward_B: torch.Tensor
    parsed_B: torch.Tensor


class Scorer:
    """Scores on the last stage's first tensor rank and tells the replica.

    Args:
        reward: the rule.
        tokenizer: turns ids back into text; end tokens are not part of it.
        groups: where this rank stands.
    """

    def __init__(self, reward: Reward, tokenizer: Tokenizer, groups: ParallelGroups) -> None:
        self._reward, self.tokenizer, self._groups = reward, tokenizer, groups
        stage = groups.layout.pipeline - 1
        self._source = groups.layout.rank_of(Coordinates(stage, groups.at.data, 0))

    def __call__(self, batch: Batch, problems: Sequence[Problem]) -> Scores:
        """Score ``batch``, whose row i answers ``problems[i]``. Collective over the replica."""
        table_2B = torch.zeros(2, len(batch), device=batch.tokens_BS.device)
        if self._groups.rank == self._source:
            verdicts = self._verdicts(batch, problems)
            table_2B[0] = torch.tensor([verdict.reward for verdict in verdicts])
            table_2B[1] = torch.tensor([float(verdict.parsed) for verdict in verdicts])
        broadcast_from(table_2B, self._source, self._groups.model)
        return Scores(table_2B[0], table_2B[1].bool())

    def _verdicts(self, batch: Batch, problems: Sequence[Problem]) -> list[Verdict]:
        texts, finished = [], []
        for ids, length in zip(batch.responses_BR.tolist(), batch.response_lengths_B.tolist(), strict=True):
            ended = ids[length - 1] in self.tokenizer.eos_ids
            texts.append(self.tokenizer.decode(ids[: length - 1 if ended else length]))
            finished.append(ended)
        return score_batch(self._reward, texts, [problem.answer for problem in problems], finished)
