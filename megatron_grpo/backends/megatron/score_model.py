"""A reward model: a sequence classifier with one label, on the tensor ranks of one stage.

Legend: B sequences, S columns.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_grpo.backends.megatron.model import Stage, build_stage, whole_logits
from megatron_grpo.conversion.families import scorer_shape
from megatron_grpo.conversion.reader import hf_source, read_hf_config
from megatron_grpo.parallel.groups import ParallelGroups


class ScoreModel:
    """Scores sequences of ids, as transformers' sequence classifiers do.

    Args:
        stage: the whole model.
        pad_id: the padding token that its config.json names, if any.
        micro_batch: sequences that go through together.
    """

    def __init__(self, stage: Stage, *, pad_id: int | None, micro_batch: int, device: torch.device) -> None:
        self._stage, self._pad_id, self._micro_batch, self._device = stage, pad_id, micro_batch, device
        stage.module.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """What the head says at the last token of each sequence that is no padding: fp32 ``[B]`` on the CPU.

        Call inside ``megatron_runtime``. Collective over the tensor ranks.
        """
        size = self._micro_batch
        parts = [self._values(sequences[start : start + size]) for start in range(0, len(sequences), size)]
        return torch.cat(parts).cpu()

    def _values(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Padded on the right, where attention never looks from the columns before."""
        ids_BS = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        last_B = torch.tensor([last_token(ids, self._pad_id) for ids in sequences], device=self._device)
        score_BS = whole_logits(self._stage, ids_BS.to(self._device)).squeeze(-1)
        return score_BS.gather(1, last_B[:, None]).squeeze(1)


def last_token(ids: Sequence[int], pad_id: int | None) -> int:
    """Place of the last token that is not ``pad_id``; 0 where all are.

    A model whose padding is its end token is thus read before the end, as transformers reads it.
    """
    places = (place for place in range(len(ids) - 1, -1, -1) if ids[place] != pad_id)
    return next(places, 0)


def load_score_model(
    directory: Path, groups: ParallelGroups, *, dtype: torch.dtype, micro_batch: int, device: torch.device
) -> ScoreModel:
    """The sequence classifier of a Hugging Face directory, cut over the tensor ranks of this rank's stage.

    Call inside ``megatron_runtime``.

    Raises:
        ConfigError: it is another model, or its files do not fit it.
    """
    fields = read_hf_config(directory)
    shape = scorer_shape(fields)
    with hf_source(directory, shape) as source:
        stage = build_stage(
            source,
            shape,
            groups.one_stage(),
            split=(shape.layers,),
            dtype=dtype,
            recompute=False,
            device=device,
        )
    return ScoreModel(stage, pad_id=fields.get("pad_token_id"), micro_batch=micro_batch, device=device)
