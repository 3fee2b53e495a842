"""What coding the activation gradients does to the gradient of each stage's parameters.

Legend: B sequences, G of a group, R response columns, N rows, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_grpo.bench.arms import Coded
from megatron_grpo.bench.texts import Cross, Rowbook, SplitModel, unchanged
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.ops.advantages import group_advantages
from megatron_grpo.ops.grpo import aggregate, policy_loss
from megatron_grpo.ops.logprobs import OneShard, token_logprobs
from megatron_grpo.ops.rows import Rows
from megatron_grpo.rollout.batch import Batch

Gradients = list[list[torch.Tensor]]
"""Of the parameters of every stage that has a boundary behind it."""


def with_random_advantages(batch: Batch, group: int, seed: int) -> Batch:
    """The batch as if its groups had been scored at random: the direction of a GRPO gradient without a reward."""
    generator = torch.Generator().manual_seed(seed)
    reward_BG = torch.randn(len(batch) // group, group, generator=generator)
    advantages_BG = group_advantages(reward_BG, eps=1e-6, std="sample")
    return replace(batch, advantages_B=advantages_BG.flatten().to(batch.tokens_BS.device))


def group_loss(split: SplitModel, batch: Batch, cross: Cross, *, tokens: int, sequences: int) -> torch.Tensor:
    """This micro-batch's share of GRPO's loss at ratio 1, a mean over ``tokens``."""
    logits_BRV = split.response_logits(batch, cross)
    logp_BR = token_logprobs(logits_BRV, batch.responses_BR, OneShard(split.model.vocabulary), temperature=1.0)
    mask_BR = batch.response_mask_BR
    per_token_BR, _ = policy_loss(
        logp_BR,
        logp_BR.detach(),
        batch.advantages_B,
        mask_BR,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_clamp=20.0,
        weight_BR=None,
    )
    columns = batch.response_columns
    return aggregate(per_token_BR, mask_BR, how="token_mean", tokens=tokens, sequences=sequences, max_response=columns)


def totals(batches: Sequence[Batch]) -> dict[str, int]:
    """The loss's denominators over all micro-batches."""
    return {"tokens": sum(batch.response_tokens for batch in batches), "sequences": sum(map(len, batches))}


def boundary_gradients(split: SplitModel, batches: Sequence[Batch]) -> Rowbook:
    """dX of every boundary, uncompressed, with the rows it belongs to."""
    book = Rowbook(len(split.after))
    for batch in batches:
        inputs: list[torch.Tensor] = []
        places: list[Rows] = []

        def keep(
            index: int,
            x_NH: torch.Tensor,
            rows: Rows,
            inputs: list[torch.Tensor] = inputs,
            places: list[Rows] = places,
        ) -> torch.Tensor:
            # Weights are frozen here: the graph starts at the first boundary.
            x_NH = x_NH if x_NH.requires_grad else x_NH.detach().requires_grad_()
            inputs.append(x_NH)
            places.append(rows)
            return x_NH

        loss = group_loss(split, batch, keep, **totals(batches))
        for index, (dx_NH, rows) in enumerate(zip(torch.autograd.grad(loss, inputs), places, strict=True)):
            book(index, dx_NH, rows)
    return book


class _Gate(torch.autograd.Function):
    """Nothing forward; backward the gradient goes through ``code``."""

    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, code: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.code = code
        return x_NH.view_as(x_NH)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.code(grads[0]), None


class RetainedPasses:
    """Dense forward passes kept with their graphs, to be run backward once for every codec.

    Holds the activations of all its texts.
    """

    def __init__(self, split: SplitModel, batches: Sequence[Batch]) -> None:
        self._code: Cross = unchanged
        bounds = [0, *split.after]
        stages = [split.model.layers[first:last] for first, last in zip(bounds, split.after, strict=False)]
        self._parameters = [[weight for layer in stage for weight in layer.parameters()] for stage in stages]
        for weight in self._flat():
            weight.requires_grad_(True)
        self._losses = [group_loss(split, batch, self._gate, **totals(batches)) for batch in batches]
        self._dense = self._gradients(unchanged)

    def _flat(self) -> list[torch.Tensor]:
        return [weight for stage in self._parameters for weight in stage]

    def _gate(self, index: int, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        gated: torch.Tensor = _Gate.apply(x_NH, lambda dx_NH: self._code(index, dx_NH, rows))  # type: ignore[no-untyped-call]  # torch's own
        return gated

    def _gradients(self, code: Cross) -> Gradients:
        """The gradient of every stage before a boundary, its weights' own order, with ``code`` at the boundaries."""
        self._code, weights = code, self._flat()
        total = [torch.zeros_like(weight) for weight in weights]
        for loss in self._losses:
            for part, grad in zip(total, torch.autograd.grad(loss, weights, retain_graph=True), strict=True):
                part += grad
        found = iter(total)
        return [[next(found) for _ in stage] for stage in self._parameters]

    def row(self, codecs: list[Codec]) -> dict[str, Any]:
        """Bytes and errors of one codec, and how each stage's gradient compares with the dense one."""
        coded = Coded(codecs)
        pairs = list(zip(self._gradients(coded), self._dense, strict=True))
        energy, median = coded.errors()
        compared = [compare(coded_stage, dense_stage) for coded_stage, dense_stage in pairs]
        return {
            "bytes": coded.share,
            "error": energy,
            "error_median": median,
            "cosine": [cosine for cosine, _ in compared],
            "norm_ratio": [ratio for _, ratio in compared],
        }


def compare(coded: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Cosine and ratio of norms of two gradients, each taken as one vector; a zero one has cosine 0."""
    product, coded_square, dense_square = (
        sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(first, second, strict=True))
        for first, second in ((coded, dense), (coded, coded), (dense, dense))
    )
    if coded_square == 0.0 or dense_square == 0.0:
        return 0.0, 0.0
    return product / (coded_square * dense_square) ** 0.5, (coded_square / dense_square) ** 0.5
