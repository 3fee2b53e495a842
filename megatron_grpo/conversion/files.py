"""A stage's weights out of a checkpoint, and a Hugging Face directory that appears whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.folders import fresh_directory
from megatron_grpo.conversion.names import (
    Weight,
    check_tensor_size,
    embedding_name,
    stage_table,
)
from megatron_grpo.conversion.reader import HFReader
from megatron_grpo.conversion.shards import slice_of, to_megatron
from megatron_grpo.conversion.sources import Source
from megatron_grpo.conversion.writer import HF_FILES, MAX_FILE_BYTES, HFWriter, Plan, carry_files


def stage_weights(
    source: Source,
    shape: ModelShape,
    layers: range,
    *,
    first: bool,
    last: bool,
    tensor_rank: int,
    tensor_size: int,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The Megatron parameters of one rank with their names, one by one, as fresh contiguous CPU tensors of ``dtype``.

    Args:
        source: of this very ``shape``, which opening it has checked.
        layers: global numbers of the stage's layers; names come out numbered from 0.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head (tied and not ``first``: the embedding's copy).

    Raises:
        ConfigError: ``tensor_size`` cuts a KV group.
    """
    check_tensor_size(shape, tensor_size)

    def mine(weight: Weight) -> torch.Tensor:
        whole = to_megatron(source.parts(weight), weight, shape)
        return slice_of(whole, weight, shape, tensor_rank, tensor_size).to(
            dtype, copy=True, memory_format=torch.contiguous_format
        )

    return ((weight.megatron, mine(weight)) for weight in stage_table(shape, layers, first=first, last=last))


def read_embedding(directory: Path, shape: ModelShape) -> torch.Tensor:
    """The token embedding ``[V, H]`` fp32 of a Hugging Face directory."""
    with HFReader(directory) as reader:
        return reader.get(embedding_name(shape)).float()


@contextmanager
def hf_directory(
    directory: Path,
    plan: Plan,
    source_dir: Path,
    *,
    tokenizer_dir: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Iterator[HFWriter]:
    """Write a Hugging Face directory aside, then rename it into place; an older export is replaced.

    Weights are safetensors, indexed shards when they exceed ``max_file_bytes``. The config (its dtype set to
    what is written), the generation config and the tokenizer files are those of ``source_dir``.

    Args:
        plan: name to shape and dtype of every tensor; all of them must be written in the block.
        tokenizer_dir: where the tokenizer files come from, if not from ``source_dir``.

    Raises:
        ConfigError: ``directory`` is a source, or holds something that is not a model.
        OSError: nothing is left of the new directory, and the older export stays.
    """
    tokenizer_dir = tokenizer_dir or source_dir
    dtype = next(iter(plan.values()))[1]
    with fresh_directory(directory, (source_dir, tokenizer_dir), marker="config.json", known=HF_FILES) as temporary:
        with HFWriter(temporary, plan, max_file_bytes) as writer:
            yield writer
        carry_files(source_dir, temporary, dtype=dtype, tokenizer_dir=tokenizer_dir)
