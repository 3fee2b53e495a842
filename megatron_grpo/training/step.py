"""One step: sample, score, old log-probs, then its ticks; and validation. Rows for the metrics come from here.

Legend: B sequences, G of one prompt.
"""

import time
from dataclasses import replace
from math import lcm
from typing import Any

import torch

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.backends.megatron.schedule import forward_only
from megatron_grpo.boundary.cache import CacheSettings
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.config import Config
from megatron_grpo.data.problem import Task
from megatron_grpo.ops.lowrank import seed_of
from megatron_grpo.parallel.collectives import sum_over
from megatron_grpo.parallel.link import Kind
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.brakes import Brakes
from megatron_grpo.training.loss import ReadLogprobs, Replay, model_inputs
from megatron_grpo.training.measure import Measure, mean_of
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.rollout import Rollouts
from megatron_grpo.training.scoring import Scorer, reward_names
from megatron_grpo.training.tick import TickRunner

Row = dict[str, float]


class StepRunner:
    """Runs steps of one policy on one task. Every rank calls everything, in the same order.

    Args:
        cfg: the whole config.
        policy: this rank's part of the policy.
        task: where problems come from; data position is the step number.
        scorer: has what was sampled scored.
        tokenizer: the policy's.
    """

    def __init__(self, cfg: Config, policy: Policy, task: Task, scorer: Scorer, tokenizer: Tokenizer) -> None:
        self._cfg, self._policy = cfg, policy
        self._rollouts = Rollouts(cfg, policy, task, scorer, tokenizer)
        self._validation = task.validation()
        self._read = ReadLogprobs(cfg.rollout.temperature, policy.vocab)
        self._reference = policy.engine.weights() if cfg.grpo.kl_coef > 0 else None
        self._measure = Measure(policy, cfg.grpo, reward_names(cfg.reward))
        self.ticks = TickRunner(cfg, policy)
        self.brakes = Brakes(cfg.train)
        self._drift = [0.0] * cfg.grpo.minibatches  # of the step before, by minibatch
        self._gap: float | None = None  # mean |dense - codec| log-prob, as last measured; for rollout.path=auto

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the engine and the codecs."""
        return {
            "ticks": self.ticks.state_dict(),
            "brakes": self.brakes.state_dict(),
            "gap": self._gap,
            "drift": list(self._drift),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ticks.load_state_dict(state["ticks"])
        self.brakes.load_state_dict(state["brakes"])
        self._gap = state["gap"]
        self._drift = list(state["drift"])

    def calibrate(self) -> None:
        """Fit the first basis of ``boundary.basis=self`` and measure the first gap of ``rollout.path=auto``.

        Collective: every rank, before the first step. ``boundary.calibration`` sequences are sampled uncompressed, so
        that both ends see the same rows and fit alike; where gradients teach anything, one training pass through that
        fit brings them back uncompressed. The gap is that of other sequences than were fitted on. All of it counts as
        basis.
        """
        policy = self._policy
        if self._owns_basis:
            replay = self._whole_replay(self._calibration_batch())
            self._fit_alike()
            if policy.boundaries.learns_backward or policy.boundaries.learns_from_gradients:
                self.ticks.observe(replay, Pass("basis", observe="gradients"))
                self._fit_alike()
        if self._measures_gap:
            self._gap = self._measure_gap(self._unseen_batch(), dense=False)

    def _fit_alike(self) -> None:
        """Put to use what both ends have learned."""
        self._policy.link.refresh(self._policy.groups.data)
        self._policy.boundaries.commit()

    def run(self, step: int) -> list[Row]:
        """Step ``step``: one row for each of its ticks, equal on every rank.

        No row where no response has a score: then there is nothing to learn from, and nothing has changed.
        """
        cfg, policy = self._cfg, self._policy
        start = time.perf_counter()
        policy.boundaries.begin_step(step)
        policy.boundaries.commit()
        refreshes = self._owns_basis and refresh_due(step + 1, cfg.boundary.refresh_steps)
        by_codec = self._samples_by_codec(step)
        self._open_caches(step, dense=not by_codec)
        drawn = self._rollouts.step(step, by_codec=by_codec)
        if drawn is None:
            return []
        batch, figures = drawn
        replays_start = time.perf_counter()
        replays = self._replays(step, batch, by_codec=by_codec)
        if self._measures_gap and gap_due(step, cfg.boundary.refresh_steps):
            self._gap = self._measure_gap(batch.rows(0, self._gap_sequences), dense=by_codec)
        old_seconds = time.perf_counter() - replays_start
        rows = []
        for number, replay in enumerate(replays):
            tick = step * cfg.grpo.minibatches + number
            delta = cfg.boundary.send_once == "delta" and self._drift[number] > cfg.boundary.delta_tolerance
            report = self.ticks.run(
                tick,
                replay,
                uncompressed=self._uncompressed(tick),
                learn=refreshes,
                delta=delta,
                check=number == 0 and step % cfg.boundary.backward_check == 0,
            )
            if number == 0:
                report.seconds["time/train"] += old_seconds
            last = number == len(replays) - 1
            row: Row = {"step": step, "tick": tick}
            row |= self._measure.row(report, figures if last else None)
            if last:
                row["time/step"] = time.perf_counter() - start
            self._drift[number] = row.get("boundary/drift", 0.0)
            rows.append(row)
        if refreshes:
            policy.link.refresh_from_sender(policy.groups.data)
        return rows

    @property
    def _sends_once(self) -> bool:
        return self._cfg.boundary.send_once != "off"

    @property
    def cache_settings(self) -> CacheSettings:
        """How rows of rollouts are kept."""
        return CacheSettings(self._cfg.boundary.cache_place, self._cfg.boundary.cache_limit)

    def _open_caches(self, step: int, *, dense: bool) -> None:
        """Both ends keep this step's rollout, and those before it that an anchor will replay."""
        if self._sends_once:
            boundaries = self._policy.boundaries
            boundaries.drop_caches(self.ticks.rollouts())
            boundaries.open_caches(step, self.cache_settings, dense=dense)

    def _uncompressed(self, tick: int) -> bool:
        """Whether ``tick`` crosses dense: every ``boundary.dense_every``-th, and the bootstrap.

        Until the first basis is fitted nothing is compressed: the bootstrap lasts one step, as every basis does.
        """
        cfg = self._cfg
        bootstrap = cfg.anchor.enabled and cfg.anchor.bootstrap == "dense" and tick < cfg.grpo.minibatches
        every = cfg.boundary.dense_every
        return bootstrap or (every > 0 and tick % every == 0)

    @property
    def _owns_basis(self) -> bool:
        """Whether senders learn from their own rows."""
        return self._cfg.boundary.basis == "self" and self._policy.boundaries.learns

    @property
    def _measures_gap(self) -> bool:
        """Whether the path is chosen by the gap; where nothing is coded there is none."""
        cfg = self._cfg
        crosses = cfg.parallel.pipeline > 1 and cfg.boundary.codec_of("forward") != "identity"
        return cfg.rollout.path == "auto" and (crosses or "tensor" in cfg.boundary.links)

    def _samples_by_codec(self, step: int) -> bool:
        cfg = self._cfg
        if self._measures_gap:
            return self._gap is not None and self._gap <= cfg.rollout.gap_limit
        bootstrap = step == 0 and cfg.anchor.enabled and cfg.anchor.bootstrap == "dense"
        return cfg.rollout.path == "codec" and not bootstrap

    def validate(self) -> Row:
        """Greedy and sampled score on the held-out problems, through the dense policy.

        Where the codec samples, through the codec too. Means over the responses that have a score; where some have
        none, ``val/unscored_frac`` is the largest share of them, and where none has one there is no mean. Collective:
        every rank.
        """
        cfg = self._cfg
        scores: Row = {}
        most_unscored = 0.0
        paths = [("", True)] + ([("_codec", False)] if cfg.rollout.path == "codec" or self._measures_gap else [])
        for suffix, dense in paths:
            for name, temperature in (("val/score", None), ("val/score_sampled", 1.0)):
                mean, scored = self._validation_score(temperature, dense=dense)
                if scored > 0:
                    scores[name + suffix] = mean
                most_unscored = max(most_unscored, 1.0 - scored)
        if most_unscored > 0:
            scores["val/unscored_frac"] = most_unscored
        return scores

    def _validation_score(self, temperature: float | None, *, dense: bool) -> tuple[float, float]:
        """Mean over the responses that have a score, and the share of those."""
        problems, groups = self._validation, self._policy.groups
        # A replica without a problem of its own repeats the first one, uncounted: under ZeRO 3 sampling is collective.
        mine = list(range(groups.at.data, len(problems), groups.layout.data))
        rule = self._rollouts.rule(temperature, seed=seed_of(self._cfg.train.seed, 0, "validation"))
        rule = replace(rule, top_k=0, top_p=1.0)
        sampled = mine or [0]
        _, scores, _ = self._rollouts.draw(
            [problems[index] for index in sampled], torch.tensor(sampled), rule, Pass("validation", dense=dense)
        )
        scored_B = ~scores.reward_B.isnan()
        sums = torch.stack([scores.reward_B.double().nan_to_num(0.0).sum(), scored_B.double().sum()])
        total, count = sum_over(sums if mine else torch.zeros_like(sums), groups.data).tolist()
        return total / max(count, 1.0), count / len(problems)

    def _calibration_batch(self) -> Batch:
        """Sampled uncompressed before both ends' eyes, scored, of whole micro-batches on every replica."""
        cfg, groups = self._cfg, self._policy.groups
        size = cfg.grpo.group_size
        unit = lcm(size, cfg.train.micro_batch) // size * groups.layout.data  # prompts
        prompts = -(-cfg.boundary.calibration // (size * unit)) * unit
        problems, row_ids = self._rollouts.deal(0, prompts)
        rule = self._rollouts.rule(cfg.rollout.temperature, seed=seed_of(cfg.train.seed, 0, "calibration"))
        batch, scores, _ = self._rollouts.draw(problems, row_ids, rule, Pass("basis", dense=True, observe="both"))
        return batch.with_advantages(self._rollouts.advantages(scores.reward_B))

    def _unseen_batch(self) -> Batch:
        """As many sequences as a gap is measured on, sampled uncompressed, of the second step's prompts."""
        cfg = self._cfg
        prompts = self._gap_sequences // cfg.grpo.group_size * self._policy.groups.layout.data
        problems, row_ids = self._rollouts.deal(cfg.grpo.prompts_per_step, prompts)
        rule = self._rollouts.rule(cfg.rollout.temperature, seed=seed_of(cfg.train.seed, 0, "gap"))
        return self._rollouts.draw(problems, row_ids, rule, Pass("basis", dense=True))[0]

    @property
    def _gap_sequences(self) -> int:
        """Sequences of a replica that a gap is measured on: a group, in micro-batches of one shape."""
        cfg = self._cfg
        size, micro = cfg.grpo.group_size, cfg.train.micro_batch
        return size if size <= micro else min(lcm(size, micro), cfg.rows_per_minibatch * cfg.grpo.minibatches)

    def _whole_replay(self, batch: Batch) -> Replay:
        """A batch as one minibatch with ratio 1."""
        data = self._policy.groups.data
        tokens = sum_over(torch.tensor([batch.response_tokens], device=self._policy.device), data)
        return Replay(batch, None, None, tokens=int(tokens), sequences=len(batch) * data.size())

    def _measure_gap(self, batch: Batch, *, dense: bool) -> float:
        """Mean |trainer - sampler| log-prob of ``batch`` through the other path than it was sampled by.

        The mean and not the median: most tokens are all but certain by either path. Collective: every rank.
        """
        policy, mask_BR = self._policy, batch.response_mask_BR
        logp_BR = self._logprobs(self._whole_replay(batch), uncompressed=dense, kind="basis")
        gaps = (logp_BR - batch.sampler_logp_BR).abs()[mask_BR]
        return mean_of(gaps if policy.groups.is_last_stage else gaps[:0], policy.groups, policy.device)

    def _replays(self, step: int, batch: Batch, *, by_codec: bool) -> list[Replay]:
        """The step's minibatches with their old log-probs and global denominators."""
        cfg, groups = self._cfg, self._policy.groups
        size = cfg.rows_per_minibatch
        minibatches = [batch.rows(start, start + size) for start in range(0, len(batch), size)]
        counts = [[int(part.loss_mask_BR.sum()), part.loss_sequences] for part in minibatches]
        totals = sum_over(torch.tensor(counts, device=self._policy.device), groups.data).tolist()
        replays = []
        for number, (minibatch, (tokens, sequences)) in enumerate(zip(minibatches, totals, strict=True)):
            kept = step if self._sends_once else None
            replay = Replay(minibatch, None, None, tokens=tokens, sequences=sequences, step=kept)
            # The first tick runs at the weights that old log-probs are of: its own forward is the old one. Not so
            # where a basis may change inside the step.
            uncompressed = self._uncompressed(step * cfg.grpo.minibatches + number)
            one_policy = self._one_policy(by_codec=by_codec, uncompressed=uncompressed)
            if number > 0 and one_policy:
                replay = replace(replay, old_logp_BR=minibatch.sampler_logp_BR, old_is_sampled=True)
            elif not one_policy and (number > 0 or cfg.boundary.commit == "tick"):
                replay = replace(replay, old_logp_BR=self._logprobs(replay, uncompressed))
            if self._reference is not None:
                with self._policy.engine.at_weights(self._reference):
                    # of other weights than those that the kept rows were made with
                    reference_BR = self._logprobs(replace(replay, step=None), uncompressed)
                replay = replace(replay, reference_logp_BR=reference_BR)
            replays.append(replay)
        return replays

    def _one_policy(self, *, by_codec: bool, uncompressed: bool) -> bool:
        """Whether the sampler's log-probs are a tick's old ones: both went through the same codecs on every link, or
        took the same uncompressed rows."""
        boundary = self._cfg.boundary
        coded_alike = by_codec and not uncompressed and boundary.commit == "step"
        # Kept rows serve the pipeline alone; the tensor link codes what is sampled uncompressed.
        dense_alike = not by_codec and (uncompressed or "tensor" not in boundary.links)
        return coded_alike or (self._sends_once and dense_alike)

    def _logprobs(self, replay: Replay, uncompressed: bool, kind: Kind = "old_logprob") -> torch.Tensor:
        """The trainer's log-probs ``[B, R]`` at the current weights, through the codec; zeros off the last stage."""
        policy = self._policy
        inputs, rows = model_inputs(replay, self._cfg.train.micro_batch)
        plan = Pass(kind, rows=rows, dense=uncompressed, reuses=replay.step)
        parts: list[Any] = forward_only(policy.stage, policy.link, inputs, plan, self._read)
        return torch.cat(parts) if parts else torch.zeros_like(replay.batch.sampler_logp_BR)


def refresh_due(steps: int, every: int) -> bool:
    """Whether a basis is refreshed after so many steps: at every multiple, and before the first at 2, 4, 8 ...

    The first fit rests on few rows; each refresh of a young basis gains more than a late one.
    """
    return steps % every == 0 or (1 < steps < every and steps & (steps - 1) == 0)


def gap_due(step: int, every: int) -> bool:
    """Whether the gap is measured in ``step``: the first one that crosses by a refreshed basis, and every multiple,
    which crosses by that of the refresh before it."""
    return step > 0 and (step == min(2, every) or step % every == 0)
