"""A stage's weights out of a Hugging Face directory, and a directory out of the weights of all stages.

Legend: a stage dict maps Megatron parameter names (layers numbered from 0 on every stage) to one tensor
rank's slices.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.folders import fresh_directory
from megatron_grpo.conversion.names import (
    check_tensor_size,
    embedding_name,
    hf_shapes,
    stage_table,
)
from megatron_grpo.conversion.reader import HFReader
from megatron_grpo.conversion.shards import slice_of, to_hf, to_megatron, unshard
from megatron_grpo.conversion.sources import Source
from megatron_grpo.conversion.writer import MAX_FILE_BYTES, HFWriter, carry_files


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
) -> dict[str, torch.Tensor]:
    """The Megatron parameters of one rank, as fresh contiguous CPU tensors of ``dtype``.

    Args:
        source: of this very ``shape``, which opening it has checked.
        layers: global numbers of the stage's layers; names come out numbered from 0.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head (tied and not ``first``: the embedding's copy).

    Raises:
        ConfigError: ``tensor_size`` cuts a KV group.
    """
    check_tensor_size(shape, tensor_size)
    return {
        weight.megatron: slice_of(
            to_megatron(source.parts(weight), weight, shape), weight, shape, tensor_rank, tensor_size
        ).to(dtype, copy=True, memory_format=torch.contiguous_format)
        for weight in stage_table(shape, layers, first=first, last=last)
    }


def read_embedding(directory: Path, shape: ModelShape) -> torch.Tensor:
    """The token embedding ``[V, H]`` fp32 of a Hugging Face directory."""
    with HFReader(directory) as reader:
        return reader.get(embedding_name(shape)).float()


def hf_weights(
    stage_dicts: Mapping[tuple[int, int], Mapping[str, torch.Tensor]], shape: ModelShape, split: list[int]
) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of all stages: the exact inverse of ``stage_weights`` over every rank.

    Args:
        stage_dicts: by (stage, tensor rank), complete.
        split: layers of every stage.

    Returns:
        Contiguous tensors in the dtype of the stages, without vocabulary padding; tied: without ``lm_head``.

    Raises:
        ValueError: a rank or a parameter is missing or surplus, or the two copies of a tied embedding differ.
    """
    tensor_size = 1 + max(rank for _, rank in stage_dicts)
    wanted = {(stage, rank) for stage in range(len(split)) for rank in range(tensor_size)}
    if stage_dicts.keys() != wanted or sum(split) != shape.layers:
        raise ValueError(
            f"split={split} of {shape.layers} layers needs the (stage, tensor rank) parts {sorted(wanted)}, "
            f"got {sorted(stage_dicts)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for stage, count in enumerate(split):
        ranks = [stage_dicts[stage, rank] for rank in range(tensor_size)]
        layers = range(sum(split[:stage]), sum(split[:stage]) + count)
        table = list(stage_table(shape, layers, first=stage == 0, last=stage == len(split) - 1))
        _check_stage_names(stage, ranks, {weight.megatron for weight in table})
        for weight in table:
            whole = unshard([part[weight.megatron] for part in ranks], weight.how)
            for name, tensor in zip(weight.hf, to_hf(whole, weight, shape), strict=True):
                if name in tensors and not torch.equal(tensors[name], tensor):
                    raise ValueError(f"{weight.megatron} of stage {stage} differs from the embedding it is tied to")
                tensors[name] = tensor.contiguous()
    return {name: tensors[name] for name in hf_shapes(shape)}


def _check_stage_names(stage: int, ranks: list[Mapping[str, torch.Tensor]], wanted: set[str]) -> None:
    for rank, part in enumerate(ranks):
        wrong = sorted(wanted ^ part.keys())
        if wrong:
            raise ValueError(f"stage {stage}, tensor rank {rank}: parameter {wrong[0]} is missing or surplus")


def write_hf(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    source_dir: Path,
    *,
    tokenizer_dir: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face directory aside, then rename it into place; an older export is replaced.

    Weights are safetensors, indexed shards when they exceed ``max_file_bytes``. The config (its dtype set to
    what is written), the generation config and the tokenizer files are those of ``source_dir``.

    Args:
        tokenizer_dir: where the tokenizer files come from, if not from ``source_dir``.

    Raises:
        ConfigError: ``directory`` is a source, or holds something that is not a model.
        OSError: nothing is left of the new directory, and the older export stays.
    """
    tokenizer_dir = tokenizer_dir or source_dir
    planned = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with fresh_directory(directory, (source_dir, tokenizer_dir), marker="config.json") as temporary:
        with HFWriter(temporary, planned, max_file_bytes) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        carry_files(source_dir, temporary, dtype=next(iter(tensors.values())).dtype, tokenizer_dir=tokenizer_dir)
