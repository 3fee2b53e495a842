"""Rewards of a sampled batch, worked out on the last policy stage or behind it, and known to the whole replica.

Legend: B sequences, K rewards.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_grpo.config import ConfigError, RewardConfig, reward_name
from megatron_grpo.data.problem import Problem
from megatron_grpo.ops.advantages import overlong_penalty, weighted_reward
from megatron_grpo.parallel.collectives import broadcast_from
from megatron_grpo.parallel.groups import Coordinates, ParallelGroups
from megatron_grpo.rollout.sampler import Finished
from megatron_grpo.training.judge import Ids, Judge
from megatron_grpo.training.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Scores:
    """What was said of each sequence. Scores are fp32, NaN where there is none.

    Attributes:
        reward_B: the weighted sum.
        part_KB: of each reward alone, in the config's order.
        parsed_B: whether every rule found an answer to judge.
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


@dataclass(frozen=True, slots=True)
class RewardTimes:
    """Seconds that scoring added to the step, and seconds of it that passed while the policy sampled."""

    added: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: "RewardTimes") -> "RewardTimes":
        return RewardTimes(self.added + other.added, self.hidden + other.hidden)


class Job(Protocol):
    """Where one batch is judged, as the last policy stage sees it."""

    def add(self, done: Finished) -> None:
        """Take a finished micro-batch; its responses are read before this returns."""
        ...

    def result(self) -> tuple[torch.Tensor, float]:
        """``Judge``'s table of the whole batch on the first tensor rank (elsewhere of that shape), and the seconds of
        work on it that were over when this was called. After every row was added."""
        ...


class Place(Protocol):
    """Where batches are judged."""

    def open(self, prompts: Sequence[Ids], problems: Sequence[Problem]) -> Job:
        """A batch to come, whose row i answers ``problems[i]``."""
        ...


class Scoring:
    """The scoring of one batch. Every rank of the replica calls everything.

    Args:
        job: on the last policy stage; ``None`` elsewhere.
        cfg: names and weights.
        count: B.
    """

    def __init__(self, job: Job | None, cfg: RewardConfig, groups: ParallelGroups, count: int) -> None:
        self._job, self._cfg, self._groups, self._count = job, cfg, groups, count

    def add(self, done: Finished) -> None:
        """Hand on a finished micro-batch; ``PipelineSampler.sample`` calls it."""
        if self._job is not None:
            self._job.add(done)

    def close(self, device: torch.device) -> tuple[Scores, RewardTimes]:
        """The scores, on ``device``, when all have come in. Collective over the replica."""
        start = time.perf_counter()
        groups, kinds = self._groups, len(self._cfg.weighted)
        said = torch.zeros((kinds + 1) * self._count + 1, dtype=torch.float64)
        if self._job is not None:
            table, hidden = self._job.result()
            said = torch.cat([table.double().flatten(), torch.tensor([hidden], dtype=torch.float64)])
        source = groups.layout.rank_of(Coordinates(groups.layout.pipeline - 1, groups.at.data, 0))
        said = broadcast_from(said.to(device), source, groups.model)
        table = said[:-1].float().view(kinds + 1, self._count)
        weight_K = torch.tensor(list(self._cfg.weighted.values()), device=device)
        part_KB = table[:kinds]
        reward_B = weighted_reward(part_KB, weight_K)
        scores = Scores(reward_B, part_KB.masked_fill(part_KB.isinf(), torch.nan), table[kinds].bool())
        return scores, RewardTimes(time.perf_counter() - start, said[-1].item())


class Scorer:
    """Has batches scored. Every rank of a replica calls it alike.

    Args:
        cfg: names and weights of the rewards.
        place: on the last policy stage; ``None`` elsewhere.
        groups: where this rank stands.
        timeline: where each batch's beginning is noted, if anywhere.
    """

    def __init__(
        self, cfg: RewardConfig, place: Place | None, groups: ParallelGroups, timeline: Timeline | None = None
    ) -> None:
        self._cfg, self._place, self._groups, self._timeline = cfg, place, groups, timeline

    def open(self, prompts: Sequence[Ids], problems: Sequence[Problem]) -> Scoring:
        """A batch to come, whose row i answers ``problems[i]``."""
        if self._timeline is not None:
            self._timeline.mark("round", sequences=len(prompts))
        job = None if self._place is None else self._place.open(prompts, problems)
        return Scoring(job, self._cfg, self._groups, len(prompts))


class LocalPlace:
    """Judges on the last policy stage, when the whole batch is there. All its tensor ranks take part."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def open(self, prompts: Sequence[Ids], problems: Sequence[Problem]) -> "LocalJob":
        return LocalJob(Pieces(self._judge, prompts, problems))


class LocalJob:
    """See :class:`LocalPlace`."""

    def __init__(self, pieces: "Pieces") -> None:
        self._pieces = pieces
        self._done: list[Finished] = []

    def add(self, done: Finished) -> None:
        self._done.append(done)

    def result(self) -> tuple[torch.Tensor, float]:
        for done in self._done:
            self._pieces.add(done.rows, response_ids(done))
        return self._pieces.table, 0.0


class Pieces:
    """A batch that is judged micro-batch by micro-batch, as they come: in the same pieces wherever that happens, so
    that the scores are the same to the last bit.

    Attributes:
        table: ``Judge``'s, of the whole batch.
    """

    def __init__(self, judge: Judge, prompts: Sequence[Ids], problems: Sequence[Problem]) -> None:
        self._judge, self._prompts, self._problems = judge, prompts, problems
        self._parts: list[tuple[slice, torch.Tensor]] = []
        judge.begin()

    def add(self, rows: slice, responses: Sequence[Sequence[int]]) -> None:
        """Judge the responses to the prompts ``rows``."""
        self._parts.append((rows, self._judge(self._prompts[rows], responses, self._problems[rows])))

    @property
    def is_complete(self) -> bool:
        return sum(part.shape[1] for _, part in self._parts) == len(self._prompts)

    @property
    def table(self) -> torch.Tensor:
        assert self.is_complete, "every row was judged"
        return torch.cat([part for _, part in sorted(self._parts, key=lambda item: item[0].start)], dim=1)


def response_ids(done: Finished) -> list[list[int]]:
    """The responses without padding."""
    lengths = done.lengths_B.tolist()
    return [ids[:length] for ids, length in zip(done.responses_BR.tolist(), lengths, strict=True)]


def check_scored(cfg: RewardConfig, validation: dict[str, float]) -> dict[str, float]:
    """The scores of a validation. Raises ConfigError where no response of one of its passes has a score."""
    if validation.get("val/unscored_frac") == 1.0:
        raise ConfigError(
            f"reward.kind={' + '.join(cfg.weighted)}: no validation problem has a score, so that there is nothing to "
            "learn from; see what the reward says above"
        )
    return validation


def shapes_length(cfg: RewardConfig) -> bool:
    """Whether rewards depend on a response's length."""
    return cfg.overlong_buffer > 0 or cfg.length_penalty > 0.0


def length_term(cfg: RewardConfig, length_B: torch.Tensor, max_response: int) -> torch.Tensor | None:
    """What a response's length adds to its reward, fp32 ``[B]``; ``None`` where the config sets no such term."""
    if not shapes_length(cfg):
        return None
    overlong_B = overlong_penalty(length_B, limit=max_response, buffer=cfg.overlong_buffer)
    return cfg.overlong_weight * overlong_B - cfg.length_penalty * length_B.float() / max_response


def reward_names(cfg: RewardConfig) -> tuple[str, ...]:
    """Of all that a reward is the sum of, the terms of length together as ``length``."""
    names = tuple(map(reward_name, cfg.weighted))
    return (*names, "length") if shapes_length(cfg) else names
