"""Megatron's distributed checkpoint ``torch_dist``, written weight by weight.

It is torch's distributed checkpoint under the names that ``GPTModel.sharded_state_dict`` gives (megatron-core 0.16.1):
one global tensor for a parameter of all layers, ``[layers, ...]``, stored as chunks. Loaders read it at any layout;
ours decides how it is cut and how far the vocabulary is padded. Neither Megatron nor a process group is needed.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.behind import Behind
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.names import Weight, megatron_shape, padded_vocab
from megatron_grpo.conversion.pickles import save_tensors, saved_tensor
from megatron_grpo.conversion.shards import shard, to_megatron

BLOCK_BYTES, COPIED_BYTES = 2**24, 2**21
"""A chunk is written, and read, in blocks of at most so many; of so many where its rows must be copied together."""
METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
LAYER = re.compile(r"^decoder\.layers\.\d+\.")
# Megatron names norms after the matrix that Transformer Engine fuses them with, in the local layer spec too.
FUSED_NORMS = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}
# Modules whose loaders ask for an extra state, which is empty: those of the local layer spec, and Transformer Engine's.
EXTRA_STATES = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def dist_key(weight: Weight) -> str:
    """The name of the global tensor that ``weight`` is in: a layer's is that of all layers."""
    name = LAYER.sub("decoder.layers.", weight.megatron)
    for norm, fused in FUSED_NORMS.items():
        name = name.replace(norm, fused)
    return name


class DistWriter:
    """Writes the weights of a model, in any order, as each rank of a tensor x pipeline layout would.

    Use it as a context manager; the checkpoint is complete at its end.

    Args:
        directory: exists.
        split: layers of every stage.
    """

    def __init__(self, directory: Path, shape: ModelShape, *, tensor: int, split: Sequence[int]) -> None:
        self._directory, self._shape, self._tensor = directory, shape, tensor
        self._stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
        self._last_stage = len(split) - 1
        self._entries: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, int] = {}
        self._stack = ExitStack()
        self._behind = Behind()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._stack:
            try:
                if error is None:
                    self._finish()
            finally:
                self._behind.__exit__(kind, error, tb)

    def write(self, weight: Weight, parts: Sequence[torch.Tensor]) -> None:
        """Write ``weight`` out of its Hugging Face tensors, all of one dtype.

        Raises:
            ConfigError: the dtype is not that of the same parameter in other layers.
        """
        key, dtype = dist_key(weight), parts[0].dtype
        entry = self._entries.setdefault(key, self._entry(weight, dtype))
        if entry.properties.dtype != dtype:
            raise ConfigError(f"{weight.hf[0]} is {dtype}, and {entry.properties.dtype} in other layers; give --dtype")
        for rank, offset, chunk in self._chunks(weight, parts):
            for start, block in _blocks(chunk):
                at = (offset[0] + start, *offset[1:])
                if weight.layer is not None:
                    at, block = (weight.layer, *at), block[None]
                place = torch.Size(at)
                entry.chunks.append(ChunkStorageMetadata(place, block.shape))
                self._save(self._file_name(weight, rank), saved_tensor(block), MetadataIndex(key, place))
        self._behind.wait()

    def _entry(self, weight: Weight, dtype: torch.dtype) -> TensorStorageMetadata:
        whole = megatron_shape(self._shape, weight)
        if weight.how == "vocab":
            whole = (padded_vocab(self._shape.vocab, self._tensor), *whole[1:])
        layers = () if weight.layer is None else (self._shape.layers,)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size((*layers, *whole)), [])

    def _file_name(self, weight: Weight, tensor_rank: int) -> str:
        if weight.layer is not None:
            stage = self._stage_of[weight.layer]
        else:
            stage = 0 if weight.megatron.startswith("embedding.") else self._last_stage
        return f"__{stage * self._tensor + tensor_rank}_0.distcp"

    def _chunks(
        self, weight: Weight, parts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, tuple[int, ...], torch.Tensor]]:
        """Tensor rank, place in the whole tensor, and numbers of every slice; copies count one time."""
        if weight.how == "vocab":
            yield from self._vocabulary(parts[0])
            return
        size = self._tensor
        pieces = list(parts) if weight.how == "gate_up" else [to_megatron(parts, weight, self._shape)]
        start, dim = 0, 1 if weight.how == "row" else 0
        for piece in pieces:
            for rank in range(1 if weight.how == "replicated" else size):
                chunk = shard(piece, "column" if weight.how == "gate_up" else weight.how, rank, size)
                offset = [0] * chunk.dim()
                offset[dim] = start + rank * chunk.shape[dim]
                yield rank, tuple(offset), chunk
            start += piece.shape[0]

    def _vocabulary(self, table_VH: torch.Tensor) -> Iterator[tuple[int, tuple[int, ...], torch.Tensor]]:
        """The slices of an embedding or head; the zeros that pad it are chunks of their own."""
        vocab, hidden = table_VH.shape
        rows = padded_vocab(vocab, self._tensor) // self._tensor
        for rank in range(self._tensor):
            start, end = rank * rows, (rank + 1) * rows
            if start < vocab:
                yield rank, (start, 0), table_VH[start : min(end, vocab)]
            if end > vocab:
                padding = max(start, vocab)
                yield rank, (padding, 0), table_VH.new_zeros(end - padding, hidden)

    def _save(self, file_name: str, pieces: Sequence[bytes | memoryview], index: MetadataIndex) -> None:
        if file_name not in self._files:
            self._files[file_name] = self._stack.enter_context((self._directory / file_name).open("wb"))
        start, length = self._ends.get(file_name, 0), sum(memoryview(piece).nbytes for piece in pieces)
        self._behind.do(partial(self._files[file_name].writelines, pieces))
        self._ends[file_name] = start + length
        self._storage[index] = _StorageInfo(file_name, start, length)

    def _finish(self) -> None:
        layers = self._shape.layers
        names = [
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
            for module in EXTRA_STATES
            for layer in range(layers)
        ]
        for name in [*names, "decoder.final_layernorm._extra_state/shard_0_1"]:
            self._entries[name] = BytesStorageMetadata()
            self._save("__0_0.distcp", [_saved([None])], MetadataIndex(name))
        metadata = Metadata(self._entries, storage_data=self._storage)
        (self._directory / METADATA_FILE).write_bytes(pickle.dumps(metadata))
        save_tensors({"checkpoint_version": 3.0, "iteration": 0}, self._directory / COMMON_FILE)
        (self._directory / BACKEND_FILE).write_text(json.dumps(BACKEND) + "\n", encoding="utf-8")


def _blocks(chunk: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and rows of every block."""
    most = BLOCK_BYTES if chunk.is_contiguous() else COPIED_BYTES
    rows = max(1, most * len(chunk) // max(1, chunk.nbytes))
    for start in range(0, len(chunk), rows):
        yield start, chunk[start : start + rows]


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
