"""What a step trains on: problems dealt to the replicas, responses sampled and scored, groups made into advantages.

Legend: B sequences, G of one prompt.
"""

import time

import torch

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import Config
from megatron_grpo.data.problem import Problem, Task
from megatron_grpo.data.tasks import encode_prompts
from megatron_grpo.ops.advantages import dead_groups, group_advantages
from megatron_grpo.ops.lowrank import seed_of
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import SamplingRule
from megatron_grpo.training.gathering import weights_for_sampling
from megatron_grpo.training.measure import RolloutFigures, RolloutTimes
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.problems import prompt_encoder
from megatron_grpo.training.scoring import RewardTimes, Scorer, Scores, length_term

FRESH_PROBLEMS = 2**40
"""Where in the endless stream the problems lie that take a dead group's place: no run comes so far, so that a step's
own problems follow from its number alone."""


class Rollouts:
    """Samples and scores. Every rank calls everything, in the same order.

    Args:
        cfg: the whole config.
        policy: this rank's part of the policy.
        task: where problems come from.
        scorer: has what was sampled scored.
        tokenizer: the policy's.
    """

    def __init__(self, cfg: Config, policy: Policy, task: Task, scorer: Scorer, tokenizer: Tokenizer) -> None:
        self._cfg, self._policy, self._task, self._scorer = cfg, policy, task, scorer
        self._tokenizer = tokenizer
        self._encode = prompt_encoder(tokenizer, cfg.data)
        self._keeps = cfg.boundary.send_once != "off"

    def deal(self, first: int, prompts: int) -> tuple[list[Problem], torch.Tensor]:
        """This replica's share of training problems ``first`` and on, one a sample, and the rows' global numbers."""
        size, at, layout = self._cfg.grpo.group_size, self._policy.groups.at, self._policy.groups.layout
        mine = range(at.data * prompts // layout.data, (at.data + 1) * prompts // layout.data)
        problems = [self._task.train_problem(first + index) for index in mine for _ in range(size)]
        return problems, torch.arange(mine.start * size, mine.stop * size)

    def draw(
        self, problems: list[Problem], row_ids: torch.Tensor, rule: SamplingRule, plan: Pass, first: int = 0
    ) -> tuple[Batch, Scores, RewardTimes]:
        """A batch, its scores, and what scoring took; ``first`` sequences of the rollout were drawn before. Collective:
        every rank."""
        policy = self._policy
        prompts = encode_prompts(self._encode, problems, self._cfg.data.max_prompt)
        scoring = self._scorer.open(prompts, problems)
        rows, rollout = -(-len(prompts) // self._cfg.sampling_micro_batches), self._cfg.rollout
        whole = weights_for_sampling(
            policy,
            rollout.gather,
            sequences=rows * self._cfg.in_flight,
            columns=self._cfg.data.max_prompt + rollout.max_response,
        )
        with whole, policy.boundaries.running(plan):
            batch = policy.sampler.sample(prompts, row_ids, rule, scoring.add, first)
        policy.lean.close()
        scores, times = scoring.close(policy.device)
        return batch, scores, times

    def rule(self, temperature: float | None, seed: int) -> SamplingRule:
        rollout = self._cfg.rollout
        return SamplingRule(
            temperature=temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            max_response=rollout.max_response,
            valid=self._policy.shape.vocab,
            end_ids=self._tokenizer.eos_ids,
            pad_id=self._tokenizer.pad_id,
            seed=seed,
        )

    def step(self, step: int, *, by_codec: bool) -> tuple[Batch, RolloutFigures] | None:
        """What step ``step`` trains on, with advantages; ``None`` where no response of any replica has a score.
        Collective: every rank."""
        cfg = self._cfg
        prompts = cfg.grpo.prompts_per_step
        problems, row_ids = self.deal(step * prompts, prompts)
        rule = self.rule(cfg.rollout.temperature, seed=seed_of(cfg.train.seed, step, "rollout"))
        plan = Pass("rollout", dense=not by_codec, keeps=step if self._keeps else None)
        start = time.perf_counter()
        batch, scores, scoring = self.draw(problems, row_ids, rule, plan)
        if not int(sum_over((~scores.reward_B.isnan()).sum()[None], self._policy.groups.data)):
            return None
        fresh, tokens, drawn = 0, batch.response_tokens, len(batch)
        for number in range(cfg.grpo.resample_rounds if cfg.grpo.dead_groups == "resample" else 0):
            rows_K = self._dead_rows(scores).nonzero().flatten()
            if not int(sum_over(torch.tensor([len(rows_K)], device=rows_K.device), self._policy.groups.data)):
                break
            self._forget(step, batch, rows_K)  # first, so that there is room for what takes their place
            other, other_scores, times = self._draw_anew(step, number, row_ids[rows_K.cpu()], plan, drawn)
            if len(rows_K):
                batch = batch.with_rows(rows_K, other, self._tokenizer.pad_id)
                scores = scores.with_rows(rows_K, other_scores)
            else:
                self._forget(step, other, rows_K.new_zeros(1))
            fresh, scoring, tokens = fresh + len(rows_K), scoring + times, tokens + other.response_tokens
            drawn += len(other)
        seconds = time.perf_counter() - start
        return self._valued(batch, scores, RolloutTimes(seconds, scoring, tokens, fresh))

    def _forget(self, step: int, batch: Batch, rows_K: torch.Tensor) -> None:
        """Both ends let go of what crossed of sequences ``rows_K`` of ``batch``, which nobody trains on."""
        if self._keeps and batch.drawn_B is not None:
            self._policy.boundaries.forget(step, batch.drawn_B[rows_K].tolist())

    def _dead_rows(self, scores: Scores) -> torch.Tensor:
        """Bool ``[B]``: sequences of groups whose rewards do not differ, before any term of length."""
        size = self._cfg.grpo.group_size
        return dead_groups(scores.reward_B.view(-1, size)).repeat_interleave(size)

    def _draw_anew(
        self, step: int, number: int, row_ids: torch.Tensor, plan: Pass, drawn: int
    ) -> tuple[Batch, Scores, RewardTimes]:
        """Responses to other problems for the sequences ``row_ids``, in round ``number``. Collective: every rank.

        A replica that needs none draws one, which the caller leaves: under ZeRO 3 sampling is collective.
        """
        cfg = self._cfg
        row_ids = row_ids if len(row_ids) else torch.zeros(1, dtype=torch.int64)
        first = FRESH_PROBLEMS + (step * cfg.grpo.resample_rounds + number) * cfg.grpo.prompts_per_step
        problems = [self._task.train_problem(first + row // cfg.grpo.group_size) for row in row_ids.tolist()]
        rule = self.rule(cfg.rollout.temperature, seed=seed_of(cfg.train.seed, step, f"resample/{number}"))
        return self.draw(problems, row_ids, rule, plan, drawn)

    def _valued(self, batch: Batch, scores: Scores, times: RolloutTimes) -> tuple[Batch, RolloutFigures]:
        """The batch with its advantages and with what counts, and what the metrics say of it."""
        cfg = self._cfg
        size = cfg.grpo.group_size
        term_B = length_term(cfg.reward, batch.response_lengths_B, cfg.rollout.max_response)
        reward_B = scores.reward_B if term_B is None else scores.reward_B + term_B
        counted_B = ~scores.reward_B.isnan()
        if cfg.grpo.dead_groups != "keep":
            counted_B &= ~self._dead_rows(scores)
        figures = RolloutFigures(
            reward_BG=reward_B.view(-1, size),
            raw_BG=scores.reward_B.view(-1, size),
            part_KB=scores.part_KB if term_B is None else torch.cat([scores.part_KB, term_B[None]]),
            parsed_B=scores.parsed_B,
            lengths_B=batch.response_lengths_B,
            truncated_B=self._truncated(batch),
            times=times,
        )
        return batch.with_advantages(self.advantages(reward_B), counted_B), figures

    def advantages(self, reward_B: torch.Tensor) -> torch.Tensor:
        """fp32 ``[B]`` of whole groups."""
        grpo = self._cfg.grpo
        reward_BG = reward_B.view(-1, grpo.group_size)
        return group_advantages(reward_BG, eps=grpo.eps, std=grpo.std, baseline=grpo.baseline).flatten()

    def _truncated(self, batch: Batch) -> torch.Tensor:
        """True where the response ran into its limit without an end token."""
        last = batch.responses_BR.gather(1, (batch.response_lengths_B - 1)[:, None]).squeeze(1)
        ends = torch.tensor(sorted(self._tokenizer.eos_ids), device=last.device)
        return ~torch.isin(last, ends)
