"""A model cut at its boundaries: texts that it samples itself, and its passes over them.

Legend: B sequences, P prompt columns, R response columns, N rows that carry a token, H hidden, V vocabulary, M response
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_grpo.backends.huggingface import CausalModel
from megatron_grpo.ops.rows import Rows, SequenceMemory, carrying_rows
from megatron_grpo.ops.sampling import row_uniforms, sample
from megatron_grpo.rollout.batch import Batch, pad_prompts
from megatron_grpo.rollout.sampler import SamplingRule

Cross = Callable[[int, torch.Tensor, Rows], torch.Tensor]
"""What happens at boundary ``index``: rows ``[N, H]`` in, rows out."""


def unchanged(index: int, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The crossing that does nothing."""
    return x_NH


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model with a boundary after each of the layers ``after`` (counted from 1)."""

    model: CausalModel
    after: tuple[int, ...]

    def response_logits(self, batch: Batch, cross: Cross) -> torch.Tensor:
        """Teacher-forced logits ``[B, R, V]`` of the response, with ``cross`` at every boundary."""
        rows = carrying_rows(batch.carrying_BT(), batch.input_tokens_BT())
        with self.model.crossing(self.after, _at_rows(cross, rows)):
            return self.model.logits(batch.input_tokens_BT(), batch.padding_BT(), keep=batch.response_columns)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], rule: SamplingRule, cross: Cross = unchanged) -> Batch:
        """One response a prompt, token by token with a KV cache, with ``cross`` at every boundary."""
        device = self.model.device
        tokens_BP, prompt_lengths_B = (x.to(device) for x in pad_prompts(prompts, rule.pad_id))
        batch, columns = tokens_BP.shape
        padding_BT = torch.arange(columns, device=device) < (columns - prompt_lengths_B)[:, None]
        ids_BR = tokens_BP.new_full((batch, rule.max_response), rule.pad_id)
        logp_BR = torch.zeros(batch, rule.max_response, device=device)
        live_B = torch.ones(batch, dtype=torch.bool, device=device)
        ends = torch.tensor(sorted(rule.end_ids), device=device)
        memory, cache, row_ids_B = SequenceMemory(), None, torch.arange(batch, device=device)
        block_Bn, carrying_Bn, start = tokens_BP, ~padding_BT, 0
        lengths_B = torch.zeros_like(prompt_lengths_B)
        for column in range(rule.max_response):
            rows = carrying_rows(carrying_Bn, block_Bn, start=start, memory=memory)
            with self.model.crossing(self.after, _at_rows(cross, rows)):
                logits_BV, cache = self.model.advance(block_Bn, padding_BT, cache)
            uniform_B = row_uniforms(rule.seed, row_ids_B, column)
            ids_B, drawn_logp_B = sample(
                logits_BV,
                temperature=rule.temperature,
                top_k=rule.top_k,
                top_p=rule.top_p,
                valid=rule.valid,
                uniform_B=uniform_B,
            )
            ids_BR[:, column] = torch.where(live_B, ids_B, rule.pad_id)
            logp_BR[:, column] = torch.where(live_B, drawn_logp_B, 0.0)
            lengths_B += live_B
            live_B = live_B & ~torch.isin(ids_B, ends)
            if not bool(live_B.any()):
                break
            start = columns + column
            block_Bn, carrying_Bn = ids_BR[:, column : column + 1], live_B[:, None]
            padding_BT = torch.cat([padding_BT, padding_BT.new_zeros(batch, 1)], dim=1)
        width = int(lengths_B.max())
        return Batch(
            tokens_BS=torch.cat([tokens_BP, ids_BR[:, :width]], dim=1),
            prompt_columns=columns,
            prompt_lengths_B=prompt_lengths_B,
            response_lengths_B=lengths_B,
            sampler_logp_BR=logp_BR[:, :width],
            advantages_B=torch.zeros(batch, device=device),
        )


def _at_rows(cross: Cross, rows: Rows) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """``cross`` on the rows of a layer's output ``[B, n, H]``; zeros elsewhere."""

    def at(index: int, x_BnH: torch.Tensor) -> torch.Tensor:
        x_NH = rows.select(x_BnH.transpose(0, 1))
        return rows.scatter(cross(index, x_NH, rows), x_BnH.shape[1]).transpose(0, 1)

    return at


def token_log_probs(logits_BRV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Log-probabilities ``[M, V]`` of the whole vocabulary at every response token."""
    return logits_BRV[batch.response_mask_BR].float().log_softmax(dim=-1)


def response_ids(batch: Batch) -> torch.Tensor:
    """The sampled ids ``[M]``."""
    return batch.responses_BR[batch.response_mask_BR]


class Rowbook:
    """Collects the rows that pass each boundary, with what both ends know of them."""

    def __init__(self, boundaries: int) -> None:
        self.parts: list[list[tuple[torch.Tensor, Rows]]] = [[] for _ in range(boundaries)]

    def __call__(self, index: int, x_NH: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.parts[index].append((x_NH.detach(), rows))
        return x_NH

    def rows_NH(self, index: int) -> torch.Tensor:
        """All rows of one boundary."""
        return torch.cat([x_NH for x_NH, _ in self.parts[index]])
