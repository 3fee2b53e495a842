"""Megatron's distributed checkpoint ``torch_dist``, read weight by weight: ours and Megatron's own, cut in any way."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.names import Weight, megatron_shape, model_table
from megatron_grpo.conversion.pickles import FileSlice, load_metadata, load_tensor
from megatron_grpo.conversion.shards import to_hf
from megatron_grpo.conversion.torch_dist import METADATA_FILE, dist_key

MOST_PADDING = 2**20
"""Rows; more than any vocabulary is padded by."""
READERS = 2
"""Threads that read and check the chunks of a tensor: checksums take longer than reading."""
MODEL_PREFIXES = ("decoder.", "embedding.", "output_layer.")
Index = tuple[int, ...]


class _Memory(threading.local):
    """Memory for one tensor at a time, in each thread: to get fresh memory takes longer than to read into it."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Index, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with any content, in the place of the one before."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._held):
            self.clear()
            self._held = torch.empty(size, dtype=torch.uint8)
        return self._held[:size].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._held = torch.empty(0, dtype=torch.uint8)


class DistReader:
    """The weights of a model, each assembled when it is asked for, in the place of the one before.

    Raises:
        ConfigError: the metadata is damaged, hostile or not of this model: a tensor is missing, surplus or misshapen.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self._directory, self._shape = directory, shape
        self._readers = ThreadPoolExecutor(READERS)  # its threads end with it
        self._entries, self._storage = read_entries(directory)
        _check_files(directory, self._storage.values())
        self._place: dict[str, tuple[tuple[str, ...], int | None]] = {}
        used: set[str] = set()
        for weight in model_table(shape):
            keys, layer = self._find(weight)
            self._check_shape(weight, keys, layer)
            self._place[weight.megatron] = (keys, layer)
            used.update(keys)
        self._memory = _Memory()
        surplus = sorted(key for key in self._entries.keys() - used if key.startswith(MODEL_PREFIXES))
        if surplus:
            raise ConfigError(
                f"tensor {surplus[0]} ({len(surplus)} in all) of {directory} is not a part of the model that its "
                "config.json describes; use the config.json of the same model"
            )

    def weight_dtype(self, weight: Weight) -> torch.dtype:
        """The dtype of ``weight``, from the metadata."""
        dtype: torch.dtype = self._entries[self._place[weight.megatron][0][0]].properties.dtype
        return dtype

    def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
        """The Hugging Face tensors of ``weight``.

        Raises:
            ConfigError: a file is missing, truncated or damaged, or chunks leave a hole or overlap.
        """
        keys, layer = self._place[weight.megatron]
        shapes = [self._shape_of(key, layer) for key in keys]
        whole = self._room(weight, (sum(shape[0] for shape in shapes), *shapes[0][1:]))
        for key, target in zip(keys, torch.split(whole, [shape[0] for shape in shapes]), strict=True):
            self._fill(key, layer, target)
        return to_hf(whole, weight, self._shape)

    def release(self) -> None:
        """Nothing is kept between two weights."""

    def _find(self, weight: Weight) -> tuple[tuple[str, ...], int | None]:
        """The global tensors that hold ``weight``, and its place on their first axis.

        Layers lie in one tensor or each in its own; then Megatron may also keep the halves of gate over up apart.
        """
        key = dist_key(weight)
        if key in self._entries:
            return (key,), weight.layer
        own = key.replace("decoder.layers.", f"decoder.layers.{weight.layer}.")
        for keys in ((own,), (f"{own}_w", f"{own}_v")):
            if weight.layer is not None and all(name in self._entries for name in keys):
                return keys, None
        raise ConfigError(
            f"tensor {key} ({', '.join(weight.hf)} in Hugging Face) is missing from {self._directory}; use the "
            "config.json of the same model"
        )

    def _check_shape(self, weight: Weight, keys: Sequence[str], layer: int | None) -> None:
        wanted = list(megatron_shape(self._shape, weight))
        sizes = [list(self._entries[key].size) for key in keys]
        if layer is not None:
            wanted.insert(0, self._shape.layers)
        found = [sum(size[0] for size in sizes), *sizes[0][1:]] if len(sizes) > 1 else sizes[0]
        padded = weight.how == "vocab" and len(found) > 0 and 0 < found[0] - wanted[0] < MOST_PADDING
        if found[1 if padded else 0 :] != wanted[1 if padded else 0 :] or len(found) != len(wanted):
            raise ConfigError(
                f"tensor {keys[0]} in {self._directory} has shape {found}, but config.json makes it {wanted}; use the "
                "config.json of the same model"
            )

    def _room(self, weight: Weight, shape: Index) -> torch.Tensor:
        """Memory for a weight; those of layers take turns in theirs, which is given back outside them."""
        if weight.layer is not None:
            return self._memory.empty(shape, self.weight_dtype(weight))
        self._memory.clear()
        return torch.empty(shape, dtype=self.weight_dtype(weight))

    def _shape_of(self, key: str, layer: int | None) -> Index:
        size = tuple(self._entries[key].size)
        return size if layer is None else size[1:]

    def _fill(self, key: str, layer: int | None, target: torch.Tensor) -> None:
        """Read every chunk of ``target`` into its place."""
        chunks = list(self._chunks_of(key, layer))
        boxes = [(offset, size) for _, offset, size in chunks]
        if sum(math.prod(size) for _, size in boxes) != target.numel() or _overlap(boxes):
            raise ConfigError(f"the chunks of {key} in {self._directory} do not cover it once; fetch it again")

        def read(chunk: tuple[Any, Index, Index]) -> None:
            place, offset, size = chunk
            box = target[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
            value = self._load(key, place, layer, box)
            if value.data_ptr() != box.data_ptr():
                box.copy_(value)

        for _ in self._readers.map(read, chunks):
            pass

    def _chunks_of(self, key: str, layer: int | None) -> Iterator[tuple[Any, Index, Index]]:
        """The chunks that hold a part of ``layer``: as stored, and place and size within the layer."""
        entry = self._entries[key]
        for chunk in entry.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            if len(offset) != len(entry.size) or any(
                start < 0 or length < 1 or start + length > end
                for start, length, end in zip(offset, size, entry.size, strict=False)
            ):
                raise ConfigError(f"a chunk of {key} in {self._directory} lies outside the tensor; fetch it again")
            if layer is None:
                yield chunk, offset, size
            elif offset[0] <= layer < offset[0] + size[0]:
                yield chunk, offset[1:], size[1:]

    def _load(self, key: str, chunk: Any, layer: int | None, target: torch.Tensor) -> torch.Tensor:
        """The part of ``layer`` in a chunk; it is ``target``, filled, where that can be read into."""
        info = self._storage.get(MetadataIndex(key, chunk.offsets))
        if info is None or getattr(info, "transform_descriptors", None):
            raise ConfigError(f"{self._directory / METADATA_FILE} does not say where {key} is stored; fetch it again")
        path = self._directory / info.relative_path
        fits = target.is_contiguous() and target.numel() == math.prod(chunk.sizes)
        room = target.view(chunk.sizes) if fits else self._memory.empty(chunk.sizes, target.dtype)
        try:
            with path.open("rb") as file:
                value = load_tensor(FileSlice(file, info.offset, info.length), f"{path} (tensor {key})", room)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); fetch the checkpoint again") from error
        if value.shape != chunk.sizes:
            raise ConfigError(f"{path} holds something else than {key} of shape {list(chunk.sizes)}; do not use it")
        if value.dtype != self._entries[key].properties.dtype:
            raise ConfigError(f"{path} holds {key} as {value.dtype}, which its metadata does not say; do not use it")
        return value if layer is None else value[layer - chunk.offsets[0]]


def read_entries(directory: Path) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, Any]]:
    """The tensors that ``.metadata`` describes, and where their chunks are.

    Raises:
        ConfigError: the file is missing, damaged, hostile, or something else than metadata.
    """
    file = directory / METADATA_FILE
    metadata = load_metadata(file)
    try:
        entries = {key: x for key, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
        storage = dict(metadata.storage_data)
        fine = all(_is_entry(x) for x in entries.values()) and all(_is_place(x) for x in storage.values())
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:
        raise ConfigError(f"{file} is not the metadata of a distributed checkpoint; fetch it again")
    return entries, storage


def _is_entry(entry: TensorStorageMetadata) -> bool:
    """Unpickling sets attributes without looking at them."""
    sizes = [entry.size, *(x for chunk in entry.chunks for x in (chunk.offsets, chunk.sizes))]
    return isinstance(entry.properties.dtype, torch.dtype) and all(isinstance(size, torch.Size) for size in sizes)


def _is_place(info: Any) -> bool:
    return isinstance(info.relative_path, str) and isinstance(info.offset, int) and isinstance(info.length, int)


def _check_files(directory: Path, places: Iterable[Any]) -> None:
    """Every file must be as long as the metadata says, the parts of it that hold no weights included."""
    ends: dict[str, int] = {}
    for info in places:
        if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
            raise ConfigError(f"{directory / METADATA_FILE} names {info.relative_path!r}, no place in {directory}")
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = directory / name
        if not path.is_file():
            raise ConfigError(f"{path} is missing, though {METADATA_FILE} names it; fetch the checkpoint again")
        if path.stat().st_size < end:
            raise ConfigError(f"{path} is truncated ({path.stat().st_size} of {end} bytes); fetch it again")


def _overlap(boxes: Sequence[tuple[Index, Index]]) -> bool:
    return any(
        all(a < b + m and b < a + n for a, n, b, m in zip(at, size, other_at, other_size, strict=True))
        for number, (at, size) in enumerate(boxes)
        for other_at, other_size in boxes[:number]
    )
