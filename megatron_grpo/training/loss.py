"""The GRPO loss on the last stage: from logits to this micro-batch's share of the step's loss, and sums for metrics.

Legend: B micro-batch, T input columns, R response columns, P prompt columns, V vocabulary shard.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_grpo.backends.megatron.schedule import ModelInput
from megatron_grpo.config import GrpoConfig, RolloutConfig
from megatron_grpo.ops.grpo import aggregate, cispo_loss, gspo_loss, importance_weight, kl_estimate, policy_loss
from megatron_grpo.ops.logprobs import VocabReduce, token_logprobs, token_logprobs_and_entropy
from megatron_grpo.ops.rows import Rows, carrying_rows
from megatron_grpo.rollout.batch import Batch

SUMS = ("tokens", "clipped", "entropy", "kl", "compared", "gap", "loss")
"""What a micro-batch reports, in this order: sums over the tokens that the loss counts (loss: its share of the step's).

Compared are response tokens of which trainer and sampler both worked out a log-prob; gap is the sum over these."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A minibatch as the trainer sees it.

    Attributes:
        batch: this replica's sequences.
        old_logp_BR: log-probs at the step's first weights; ``None`` means the pass's own, so the ratio is 1.
        reference_logp_BR: log-probs of the reference policy, where a KL term wants them.
        tokens, sequences: that the loss counts, of the whole minibatch, over all replicas: its denominators.
        old_is_sampled: ``old_logp_BR`` are the sampler's, so that they tell nothing of how far the trainer's are off.
        step: whose rollout it is, where both ends of every boundary hold the rows that crossed in it.
    """

    batch: Batch
    old_logp_BR: torch.Tensor | None
    reference_logp_BR: torch.Tensor | None
    tokens: int
    sequences: int
    old_is_sampled: bool = False
    step: int | None = None

    def paired(self) -> "Replay":
        """The same minibatch with ratio 1, for the anchor."""
        return replace(self, old_logp_BR=None, old_is_sampled=False)

    def split(self, size: int) -> list["Replay"]:
        """Micro-batches of ``size`` sequences; denominators stay those of the minibatch."""
        starts = range(0, len(self.batch), size)

        def part(x: torch.Tensor | None, start: int) -> torch.Tensor | None:
            return None if x is None else x[start : start + size]

        return [
            replace(
                self,
                batch=batch,
                old_logp_BR=part(self.old_logp_BR, start),
                reference_logp_BR=part(self.reference_logp_BR, start),
            )
            for batch, start in zip(self.batch.split(size), starts, strict=True)
        ]


def model_inputs(replay: Replay, micro_batch: int) -> tuple[list[ModelInput], list[Rows]]:
    """Micro-batches for the schedule, and the boundary rows that each of them sends."""
    inputs, rows = [], []
    for micro in replay.split(micro_batch):
        batch = micro.batch
        inputs.append(ModelInput(batch.input_tokens_BT(), batch.attention_masked_B1TT(), micro))
        rows.append(carrying_rows(batch.carrying_BT(), batch.input_tokens_BT(), origin=batch.origin()))
    return inputs, rows


def response_logits(logits_BTV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The columns that predict the response: P - 1 to P + R - 2."""
    return logits_BTV[:, batch.prompt_columns - 1 :]


Objective = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(logp_BR, old_logp_BR, advantage_B, mask_BR, weight_BR=) -> loss a token, and where a clip is in force."""


def build_objective(cfg: GrpoConfig) -> Objective:
    """The surrogate that ``grpo.objective`` names, with its settings."""
    if cfg.objective == "cispo":
        return partial(cispo_loss, clip_high=cfg.clip_high, log_ratio_clamp=cfg.log_ratio_clamp)
    return partial(
        gspo_loss if cfg.objective == "gspo" else policy_loss,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
        log_ratio_clamp=cfg.log_ratio_clamp,
    )


class PolicyLoss:
    """GRPO's loss for one configuration; last stage only.

    Args:
        cfg: the ``grpo`` section.
        rollout: the ``rollout`` section: log-probs are of the policy that sampled, at its temperature.
        reduce: how vocabulary shards combine.
    """

    def __init__(self, cfg: GrpoConfig, rollout: RolloutConfig, reduce: VocabReduce) -> None:
        self._cfg, self._rollout, self._reduce = cfg, rollout, reduce
        self._objective = build_objective(cfg)

    def __call__(self, logits_BTV: torch.Tensor, micro: ModelInput) -> tuple[torch.Tensor, Any]:
        """This micro-batch's share of the loss, and ``(sums [7] fp64, |trainer - sampler| a token)``, detached."""
        cfg, replay = self._cfg, micro.payload
        batch: Batch = replay.batch
        mask_BR = batch.loss_mask_BR
        logp_BR, entropy_BR = token_logprobs_and_entropy(
            response_logits(logits_BTV, batch),
            batch.responses_BR,
            self._reduce,
            temperature=self._rollout.temperature,
            with_entropy=cfg.entropy_coef != 0.0,
        )
        old_BR = logp_BR.detach() if replay.old_logp_BR is None else replay.old_logp_BR
        weight_BR = None
        if cfg.is_cap is not None:
            weight_BR = importance_weight(
                old_BR, batch.sampler_logp_BR, mask_BR, how=cfg.is_correction, cap=cfg.is_cap, floor=cfg.is_floor
            )
        per_token_BR, clipped_BR = self._objective(logp_BR, old_BR, batch.advantages_B, mask_BR, weight_BR=weight_BR)
        kl_BR = None
        if replay.reference_logp_BR is not None:
            kl_BR = kl_estimate(logp_BR, replay.reference_logp_BR, mask_BR, estimator=cfg.kl_estimator)
            per_token_BR = per_token_BR + cfg.kl_coef * kl_BR
        if entropy_BR is not None:
            per_token_BR = per_token_BR - cfg.entropy_coef * entropy_BR
        loss = aggregate(
            per_token_BR,
            mask_BR,
            how=cfg.aggregation,
            tokens=replay.tokens,
            sequences=replay.sequences,
            max_response=self._rollout.max_response,
        )
        gap = (old_BR - batch.sampler_logp_BR).abs()[batch.response_mask_BR]
        if replay.old_is_sampled:
            gap = gap[:0]

        def total(x_BR: torch.Tensor | None) -> torch.Tensor:
            return loss.new_zeros(()) if x_BR is None else x_BR.detach()[mask_BR].sum()

        compared = loss.new_tensor(len(gap))
        sums = [
            *(mask_BR.sum(), total(clipped_BR), total(entropy_BR), total(kl_BR)),
            *(compared, gap.sum(), loss.detach()),
        ]
        return loss, (torch.stack([value.double() for value in sums]), gap.detach())


class ReadLogprobs:
    """Reads the response's log-probs off the logits; last stage only, no gradients."""

    def __init__(self, temperature: float, reduce: VocabReduce) -> None:
        self._temperature, self._reduce = temperature, reduce

    def __call__(self, logits_BTV: torch.Tensor, micro: ModelInput) -> torch.Tensor:
        batch: Batch = micro.payload.batch
        return token_logprobs(
            response_logits(logits_BTV, batch),
            batch.responses_BR,
            self._reduce,
            temperature=self._temperature,
        )
