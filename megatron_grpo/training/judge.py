"""What finished responses are worth: every reward of a run, wherever it is worked out.

Legend: B sequences, K rewards.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.backends.megatron.score_model import ScoreModel, load_score_model
from megatron_grpo.boundary.build import DTYPES
from megatron_grpo.config import Config
from megatron_grpo.data.problem import Problem
from megatron_grpo.parallel.groups import ParallelGroups
from megatron_grpo.rollout.rewards import NamedReward, Patience, Verdict, build_rewards, score_batch
from megatron_grpo.training.timeline import Timeline

Ids = Sequence[int]

PATIENCE_SHARE = 0.5
"""Of the time that links wait: what slow rules may take for a batch."""
UNSCORED = float("inf")
"""In a table: nobody can say what the sample is worth."""


class Judge:
    """Scores responses by rules and by models. The tensor ranks of the stage that scores call it together.

    Args:
        kinds: of all rewards, in order.
        rules: those by rule; on the first tensor rank, which alone has whole scores, and none elsewhere.
        models: those by model, by kind.
        tokenizer: the policy's, whose ids they are; end tokens are not part of the text.
        timeline: where the work is noted, if anywhere.
        patience: what the rules may take for one batch; they share it.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        rules: Sequence[NamedReward],
        models: Mapping[str, ScoreModel],
        tokenizer: Tokenizer,
        timeline: Timeline | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._kinds, self._models, self._tokenizer, self._timeline = tuple(kinds), models, tokenizer, timeline
        self._rules = {rule.name: rule for rule in rules}
        self._patience = patience

    def begin(self) -> None:
        """A batch is to come: those who will wait for its scores have all their patience."""
        if self._patience is not None:
            self._patience.renew()

    def __call__(
        self, prompts: Sequence[Ids], responses: Sequence[Sequence[int]], problems: Sequence[Problem]
    ) -> torch.Tensor:
        """fp32 ``[K + 1, B]`` on the CPU: a row for each reward, NaN where it has nothing to say and :data:`UNSCORED`
        where it should have; and one that is 1 where every rule found an answer to judge."""
        with nullcontext() if self._timeline is None else self._timeline.during("score", sequences=len(prompts)):
            return self._table(prompts, responses, problems)

    def _table(
        self, prompts: Sequence[Ids], responses: Sequence[Sequence[int]], problems: Sequence[Problem]
    ) -> torch.Tensor:
        table = torch.zeros(len(self._kinds) + 1, len(responses))
        table[-1] = 1.0
        texts, finished = self._texts(responses) if self._rules else ([], [])
        for row_B, kind in zip(table, self._kinds, strict=False):
            if kind in self._models:
                said_B = self._models[kind]([[*prompt, *ids] for prompt, ids in zip(prompts, responses, strict=True)])
                row_B.copy_(said_B.masked_fill(~said_B.isfinite(), UNSCORED))
            elif kind in self._rules:
                verdicts = score_batch(self._rules[kind], texts, problems, finished)
                row_B.copy_(torch.tensor([_number(verdict) for verdict in verdicts]))
                table[-1] *= torch.tensor([float(verdict.parsed or verdict.reward is None) for verdict in verdicts])
        return table

    def _texts(self, responses: Sequence[Sequence[int]]) -> tuple[list[str], list[bool]]:
        """Each response without its end token, and whether it had one."""
        finished = [ids[-1] in self._tokenizer.eos_ids for ids in responses]
        ends = [len(ids) - ended for ids, ended in zip(responses, finished, strict=True)]
        return [self._tokenizer.decode(list(ids[:end])) for ids, end in zip(responses, ends, strict=True)], finished


def _number(verdict: Verdict) -> float:
    if verdict.reward is None:
        return float("nan") if verdict.parsed else UNSCORED
    return verdict.reward


def build_judge(
    cfg: Config,
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    device: torch.device,
    timeline: Timeline | None = None,
) -> Judge:
    """The judge of this rank's stage. Call inside ``megatron_runtime``, on all its tensor ranks.

    Raises:
        ConfigError: a function cannot be imported, or a model is none that scores.
    """
    models = {
        kind: load_score_model(
            directory, groups, dtype=DTYPES[cfg.model.dtype], micro_batch=cfg.train.micro_batch, device=device
        )
        for kind, directory in cfg.reward.models.items()
    }
    patience = Patience(PATIENCE_SHARE * cfg.parallel.timeout_s)
    rules = build_rewards(cfg.reward, patience) if groups.at.tensor == 0 else ()
    return Judge(tuple(cfg.reward.weighted), rules, models, tokenizer, timeline, patience)
