"""A batch of sequences: prompts padded on the left, responses on the right.

Legend: B sequences, P prompt columns, R response columns, S = P + R.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


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
    """

    tokens_BS: torch.Tensor
    prompt_columns: int
    prompt_lengths_B: torch.Tensor
    response_lengths_B: torch.Tensor
    sampler_logp_BR: torch.Tensor
    advantages_B: torch.Tensor

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

    def rows(self, start: int, stop: int) -> "Batch":
        """Sequences ``start`` to ``stop``, with the columns that none of them fills cut off on the right."""
        width = int(self.response_lengths_B[start:stop].max())
        return replace(
            self,
            tokens_BS=self.tokens_BS[start:stop, : self.prompt_columns + width],
            prompt_lengths_B=self.prompt_lengths_B[start:stop],
            response_lengths_B=self.response_lengths_B[start:stop],
            sampler_logp_BR=self.sampler_logp_BR[start:stop, :width],
            advantages_B=self.advantages_B[start:stop],
        )

    def split(self, size: int) -> list["Batch"]:
        """Micro-batches of ``size`` sequences, all of this batch's width."""
        return [
            replace(
                self,
                tokens_BS=self.tokens_BS[start : start + size],
                prompt_lengths_B=self.prompt_lengths_B[start : start + size],
                response_lengths_B=self.response_lengths_B[start : start + size],
                sampler_logp_BR=self.sampler_logp_BR[start : start + size],
                advantages_B=self.advantages_B[start : start + size],
            )
            for start in range(0, len(self), size)
        ]

    def with_advantages(self, advantages_B: torch.Tensor) -> "Batch":
        return replace(self, advantages_B=advantages_B)

    def input_tokens_BT(self) -> torch.Tensor:
        """What the model reads: every column but the last, which predicts nothing."""
        return self.tokens_BS[:, :-1]

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
