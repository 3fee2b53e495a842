"""A batch of sequences: prompts padded on the left, responses on the right.

Legend: B sequences, P prompt columns, R response columns, S = P + R.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_grpo.ops.rows import Origin


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and what is known of them. Every rank of a replica holds the same batch.

    Attributes:
        tokens_BS: int64 ids.
        prompt_columns: P; the response starts there.
        prompt_lengths_B: true prompt lengths; columns before ``P - length`` are padding.
        response_lengths_B: tokens sampled, the end token included.
        sampler_logp_BR: fp32 log-probs of the sampled ids in the sampler (temperature-scaled, untruncated).
        advantages_B: fp32.
        counted_B: bool; sequences that are False enter neither the loss nor its denominators. ``None``: all count.
        drawn_B: int64, number of each in the rollout that drew it; ``None``: nobody asks.
    """

    tokens_BS: torch.Tensor
    prompt_columns: int
    prompt_lengths_B: torch.Tensor
    response_lengths_B: torch.Tensor
    sampler_logp_BR: torch.Tensor
    advantages_B: torch.Tensor
    counted_B: torch.Tensor | None = None
    drawn_B: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_BS)

    @property
    def response_columns(self) -> int:
        return self.tokens_BS.shape[1] - self.prompt_columns

    @property
    def responses_BR(self) -> torch.Tensor:
        return self.tokens_BS[:, self.prompt_columns :]

    @property
    def response_mask_BR(self) -> torch.Tensor:
        """True on sampled tokens."""
        columns = torch.arange(self.response_columns, device=self.tokens_BS.device)
        return columns < self.response_lengths_B[:, None]

    @property
    def response_tokens(self) -> int:
        return int(self.response_lengths_B.sum())

    @property
    def loss_mask_BR(self) -> torch.Tensor:
        """True on sampled tokens of sequences that the loss counts."""
        mask_BR = self.response_mask_BR
        return mask_BR if self.counted_B is None else mask_BR & self.counted_B[:, None]

    @property
    def loss_sequences(self) -> int:
        """Sequences that the loss counts."""
        return len(self) if self.counted_B is None else int(self.counted_B.sum())

    def rows(self, start: int, stop: int) -> "Batch":
        """Sequences ``start`` to ``stop``, with the columns that none of them fills cut off on the right."""
        return self._part(slice(start, stop), int(self.response_lengths_B[start:stop].max()))

    def split(self, size: int) -> list["Batch"]:
        """Micro-batches of ``size`` sequences, all of this batch's width."""
        return [self._part(slice(start, start + size), self.response_columns) for start in range(0, len(self), size)]

    def _part(self, rows: slice, width: int) -> "Batch":
        return replace(
            self,
            tokens_BS=self.tokens_BS[rows, : self.prompt_columns + width],
            prompt_lengths_B=self.prompt_lengths_B[rows],
            response_lengths_B=self.response_lengths_B[rows],
            sampler_logp_BR=self.sampler_logp_BR[rows, :width],
            advantages_B=self.advantages_B[rows],
            counted_B=None if self.counted_B is None else self.counted_B[rows],
            drawn_B=None if self.drawn_B is None else self.drawn_B[rows],
        )

    def with_rows(self, rows_K: torch.Tensor, other: "Batch", pad_id: int) -> "Batch":
        """The same batch with the K sequences of ``other`` at ``rows_K``; columns are padded to the wider of both."""
        prompt = max(self.prompt_columns, other.prompt_columns)
        response = max(self.response_columns, other.response_columns)
        ours, theirs = (batch._padded(prompt, response, pad_id) for batch in (self, other))

        def put(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            return whole.index_copy(0, rows_K, part)

        return replace(
            ours,
            tokens_BS=put(ours.tokens_BS, theirs.tokens_BS),
            prompt_lengths_B=put(ours.prompt_lengths_B, theirs.prompt_lengths_B),
            response_lengths_B=put(ours.response_lengths_B, theirs.response_lengths_B),
            sampler_logp_BR=put(ours.sampler_logp_BR, theirs.sampler_logp_BR),
            advantages_B=put(ours.advantages_B, theirs.advantages_B),
            drawn_B=None if ours.drawn_B is None or theirs.drawn_B is None else put(ours.drawn_B, theirs.drawn_B),
        )

    def _padded(self, prompt: int, response: int, pad_id: int) -> "Batch":
        left, right = prompt - self.prompt_columns, response - self.response_columns
        return replace(
            self,
            tokens_BS=torch.nn.functional.pad(self.tokens_BS, (left, right), value=pad_id),
            prompt_columns=prompt,
            sampler_logp_BR=torch.nn.functional.pad(self.sampler_logp_BR, (0, right)),
        )

    def with_advantages(self, advantages_B: torch.Tensor, counted_B: torch.Tensor | None = None) -> "Batch":
        return replace(self, advantages_B=advantages_B, counted_B=counted_B)

    def input_tokens_BT(self) -> torch.Tensor:
        """What the model reads: every column but the last, which predicts nothing."""
        return self.tokens_BS[:, :-1]

    def origin(self) -> Origin | None:
        """Whose rows the input tokens make."""
        return None if self.drawn_B is None else Origin(self.drawn_B, self.prompt_columns - self.prompt_lengths_B)

    def padding_BT(self) -> torch.Tensor:
        """True on the left padding of :meth:`input_tokens_BT`."""
        columns = torch.arange(self.tokens_BS.shape[1] - 1, device=self.tokens_BS.device)
        return columns < (self.prompt_columns - self.prompt_lengths_B)[:, None]

    def carrying_BT(self) -> torch.Tensor:
        """True on input tokens that a prediction needs: no padding, and nothing from the last sampled token on."""
        columns = torch.arange(self.tokens_BS.shape[1] - 1, device=self.tokens_BS.device)
        ends = self.prompt_columns + self.response_lengths_B - 1
        return ~self.padding_BT() & (columns < ends[:, None])

    def attention_masked_B1TT(self) -> torch.Tensor:
        """True where attention must not look: later columns and left padding."""
        length = self.tokens_BS.shape[1] - 1
        later = torch.ones(length, length, dtype=torch.bool, device=self.tokens_BS.device).triu(1)
        return (later | self.padding_BT()[:, None, :])[:, None]


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad to one width: int64 ``[B, P]`` and the true lengths ``[B]``."""
    width = max(len(prompt) for prompt in prompts)
    tokens_BP = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
    return tokens_BP, torch.tensor([len(prompt) for prompt in prompts])
