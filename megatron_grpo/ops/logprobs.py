"""Log-probabilities and entropy of tokens whose vocabulary may be split over shards.

The caller says how shards combine (:class:`VocabReduce`), so no process group enters here. Legend: B
sequences, R response, V rows of the vocabulary in this shard.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class VocabReduce(Protocol):
    """How the shards of a vocabulary combine. Every shard makes the same calls in the same order."""

    @property
    def start(self) -> int:
        """First vocabulary row of this shard."""
        ...

    @property
    def valid(self) -> int:
        """True vocabulary size; rows from there on are padding."""
        ...

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the shards, without gradient."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the shards; its backward hands each shard the gradient of the sum."""
        ...


@dataclass(frozen=True, slots=True)
class OneShard:
    """The whole vocabulary in one place."""

    valid: int
    start: int = 0

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


def token_logprobs(
    logits_BRV: torch.Tensor, target_BR: torch.Tensor, reduce: VocabReduce, *, temperature: float
) -> torch.Tensor:
    """Log-probability of each target under softmax(logits / temperature), fp32 ``[B, R]``.

    Maths in fp32 from any dtype. Padding rows have probability 0 and no gradient; a padding target gets -inf.
    Every shard returns the same numbers.

    Raises:
        ValueError: ``temperature`` not above 0.
    """
    return token_logprobs_and_entropy(logits_BRV, target_BR, reduce, temperature=temperature, with_entropy=False)[0]


def entropy(logits_BRV: torch.Tensor, reduce: VocabReduce, *, temperature: float) -> torch.Tensor:
    """Entropy of softmax(logits / temperature) in nats, fp32 ``[B, R]``.

    Precision, padding, shards and errors are those of :func:`token_logprobs`.
    """
    shifted_BRV, padding_V = _shifted(logits_BRV, reduce, temperature)
    weights_BRV, total_BR = _partition(shifted_BRV, padding_V, reduce)
    return _entropy(shifted_BRV, padding_V, weights_BRV, total_BR, reduce)


def token_logprobs_and_entropy(
    logits_BRV: torch.Tensor,
    target_BR: torch.Tensor,
    reduce: VocabReduce,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`token_logprobs` and, if asked for, :func:`entropy` (else ``None``) from one softmax."""
    shifted_BRV, padding_V = _shifted(logits_BRV, reduce, temperature)
    weights_BRV, total_BR = _partition(shifted_BRV, padding_V, reduce)
    logp_BR = _target_logits(shifted_BRV, padding_V, target_BR, reduce) - total_BR.log()
    if not with_entropy:
        return logp_BR, None
    return logp_BR, _entropy(shifted_BRV, padding_V, weights_BRV, total_BR, reduce)


def _shifted(logits_BRV: torch.Tensor, reduce: VocabReduce, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits / temperature minus their maximum over all shards, fp32, and which rows ``[V]`` are padding."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; greedy decoding takes no temperature")
    rows_V = torch.arange(logits_BRV.shape[-1], device=logits_BRV.device) + reduce.start
    padding_V = rows_V >= reduce.valid
    scaled_BRV = logits_BRV.float() / temperature
    top_BR = reduce.max(scaled_BRV.detach().masked_fill(padding_V, -torch.inf).amax(dim=-1))
    return scaled_BRV - top_BR[..., None], padding_V


def _partition(
    shifted_BRV: torch.Tensor, padding_V: torch.Tensor, reduce: VocabReduce
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(shifted), 0 on padding, and its sum over all shards ``[B, R]``."""
    weights_BRV = shifted_BRV.masked_fill(padding_V, -torch.inf).exp()
    return weights_BRV, reduce.sum(weights_BRV.sum(dim=-1))


def _target_logits(
    shifted_BRV: torch.Tensor, padding_V: torch.Tensor, target_BR: torch.Tensor, reduce: VocabReduce
) -> torch.Tensor:
    """The targets' shifted logits: the shard that holds a target gives it, the others give 0."""
    local_BR = target_BR - reduce.start
    rows = shifted_BRV.shape[-1]
    here_BR = (local_BR >= 0) & (local_BR < rows)
    local_BR = local_BR.clamp(0, rows - 1)
    found_BR = shifted_BRV.gather(-1, local_BR[..., None]).squeeze(-1)
    found_BR = found_BR.masked_fill(padding_V[local_BR], -torch.inf)
    return reduce.sum(torch.where(here_BR, found_BR, 0.0))


def _entropy(
    shifted_BRV: torch.Tensor,
    padding_V: torch.Tensor,
    weights_BRV: torch.Tensor,
    total_BR: torch.Tensor,
    reduce: VocabReduce,
) -> torch.Tensor:
    """log Z - sum(w s) / Z, with w = exp(s) and Z = sum(w)."""
    weighted_BR = reduce.sum((weights_BRV * shifted_BRV.masked_fill(padding_V, 0.0)).sum(dim=-1))
    return total_BR.log() - weighted_BR / total_BR
