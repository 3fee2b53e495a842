"""What coding the activations does to the log-probs of texts that the model sampled itself.

Legend: B sequences, R response columns, N rows, M response tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_grpo.bench.arms import Coded
from megatron_grpo.bench.limits import fit_limit
from megatron_grpo.bench.texts import Cross, Rowbook, SplitModel, response_ids, token_log_probs, unchanged
from megatron_grpo.boundary.codec import Codec
from megatron_grpo.ops.rows import Rows
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import SamplingRule


@dataclass(frozen=True, slots=True)
class Gap:
    """Of the coded against the dense model, a token: |difference of log-prob|, and KL(dense, coded), in nats."""

    median: float
    mean: float
    kl: float

    def row(self) -> dict[str, float]:
        return {"gap_median": self.median, "gap_mean": self.mean, "kl": self.kl}


class DenseReference:
    """The dense model's distributions at every response token, kept to compare with."""

    @torch.no_grad()
    def __init__(self, split: SplitModel, batches: Sequence[Batch]) -> None:
        self._split, self._batches = split, batches
        self._logp = [token_log_probs(split.response_logits(batch, unchanged), batch) for batch in batches]

    @torch.no_grad()
    def gap(self, cross: Cross) -> Gap:
        """Teacher-forced on the same texts, with ``cross`` at every boundary."""
        gaps, divergences = [], []
        for batch, dense_MV in zip(self._batches, self._logp, strict=True):
            coded_MV = token_log_probs(self._split.response_logits(batch, cross), batch)
            ids_M1 = response_ids(batch)[:, None]
            gaps.append((coded_MV.gather(1, ids_M1) - dense_MV.gather(1, ids_M1)).abs()[:, 0])
            divergences.append((dense_MV.exp() * (dense_MV - coded_MV)).sum(dim=-1))
        gap_M = torch.cat(gaps).double()
        return Gap(gap_M.median().item(), gap_M.mean().item(), torch.cat(divergences).double().mean().item())


def forward_row(reference: DenseReference, codecs: list[Codec]) -> dict[str, Any]:
    """Bytes, errors and gap of one codec at all boundaries."""
    coded = Coded(codecs)
    gap = reference.gap(coded)
    energy, median = coded.errors()
    return {"bytes": coded.share, "error": energy, "error_median": median, **gap.row()}


@torch.no_grad()
def rollout_gap(
    split: SplitModel, prompts: Sequence[Sequence[int]], rule: SamplingRule, codecs: list[Codec]
) -> dict[str, float]:
    """|trainer - sampler| log-prob a token, of texts sampled through the codecs, the trainer coding alike.

    Round-off now and then moves a number over a quantiser's threshold; all later rows of that sequence then differ. The
    median leaves those few sequences out, the mean tells of them.
    """
    batch = split.sample(prompts, rule, Coded(codecs))
    logp_MV = token_log_probs(split.response_logits(batch, Coded(codecs)), batch)
    trainer_M = logp_MV.gather(1, response_ids(batch)[:, None])[:, 0]
    gap_M = (trainer_M - batch.sampler_logp_BR[batch.response_mask_BR]).abs().double()
    return {"rollout_gap_median": gap_M.median().item(), "rollout_gap_mean": gap_M.mean().item()}


def limit_rows(
    reference: DenseReference,
    seen: Rowbook,
    shares: Sequence[float],
    *,
    embedding_VH: torch.Tensor | None,
    seed: int,
) -> list[dict[str, Any]]:
    """The gap at the rate-distortion limit, of every share; with a prediction if an embedding is given."""
    fits = [fit_limit(parts, embedding_VH) for parts in seen.parts]
    found = []
    for share in shares:
        generator = torch.Generator().manual_seed(seed)

        def cross(
            index: int, x_NH: torch.Tensor, rows: Rows, share: float = share, draw: torch.Generator = generator
        ) -> torch.Tensor:
            return fits[index].code(x_NH, rows, share, draw)

        predict = "none" if embedding_VH is None else "embedding+previous"
        found.append({"predict": predict, "share": share, **reference.gap(cross).row()})
    return found
