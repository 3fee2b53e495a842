"""Hugging Face directories: read a stage's weights out of one, write one from the weights of all stages.

Legend: a stage dict maps Megatron parameter names (layers numbered from 0 on every stage) to one tensor
rank's slices.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.names import (
    EMBEDDING,
    HEAD,
    ModelShape,
    Weight,
    check_tensor_size,
    hf_shapes,
    padded_vocab,
    stage_table,
)
from megatron_grpo.conversion.shards import (
    fuse_gate_up,
    fuse_qkv,
    pad_vocab,
    shard,
    split_gate_up,
    split_qkv,
    strip_vocab,
    unshard,
)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# A buffer that old Llama exports carry; it follows from the config.
DERIVED_ENDING = ".rotary_emb.inv_freq"


class HFReader:
    """The tensors of a Hugging Face directory, one file or indexed shards, opened when first asked for.

    Use it as a context manager: leaving it closes the files.

    Raises:
        ConfigError: there are no safetensors, the index is not one, or a shard that it names is missing,
            outside the directory, damaged, or without a tensor that the index puts there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._open_files: dict[str, Any] = {}
        self._stack = ExitStack()
        self._file_of: dict[str, str] = {}
        if (self._directory / WEIGHTS_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        elif (self._directory / INDEX_FILE).is_file():
            self._file_of = self._read_index()
        else:
            raise ConfigError(
                f"model.path={directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}, and training never "
                "starts from random weights; give a directory with safetensors weights"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open_files.clear()
        self._stack.close()

    @property
    def directory(self) -> Path:
        """Where the tensors come from."""
        return self._directory

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor ``name``, on the CPU, in the dtype of the file."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``, from the header alone."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype_of(self, name: str) -> str:
        """safetensors dtype of ``name`` (such as ``F32`` or ``BF16``), from the header alone."""
        return str(self._file(name).get_slice(name).get_dtype())

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(f"tensor {name} is missing from {self._directory}; fetch the model again")
        return self._open(self._file_of[name])

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self._directory / file_name
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error
            absent = sorted(
                name for name, file in self._file_of.items() if file == file_name and name not in set(handle.keys())
            )
            if absent:
                raise ConfigError(f"{INDEX_FILE} puts tensor {absent[0]} in {path}, which lacks it; fetch both again")
            self._open_files[file_name] = handle
        return self._open_files[file_name]

    def _read_index(self) -> dict[str, str]:
        path = self._directory / INDEX_FILE
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not an index with a weight_map; fetch it again") from error
        for file in sorted(set(file_of.values())):
            if Path(file).name != file:
                raise ConfigError(f"{path} names shard {file!r} outside its directory; fetch the index again")
            if not (self._directory / file).is_file():
                raise ConfigError(f"shard {self._directory / file} is missing, though {INDEX_FILE} names it; fetch it")
        return file_of


def check_tensors(reader: HFReader, shape: ModelShape) -> None:
    """Compare the whole directory with the model's table: every tensor there, in its shape, and no other.

    A tied model may carry its head once more as ``lm_head.weight``, if it equals the embedding.

    Raises:
        ConfigError: names the first tensor that is missing, surplus, misshapen or not floating point.
    """
    expected = hf_shapes(shape)
    alias = set(HEAD.hf) if shape.tied else set()
    missing = sorted(expected.keys() - reader.names)
    surplus = sorted(n for n in reader.names - expected.keys() - alias if not n.endswith(DERIVED_ENDING))
    for kind, names in (("missing from", missing), ("not a part of the model of", surplus)):
        if names:
            raise ConfigError(
                f"tensor {names[0]} ({len(names)} in all) is {kind} {reader.directory}; "
                "use the config.json and weights of the same model"
            )
    for name, wanted in expected.items():
        found = reader.shape_of(name)
        if found != wanted:
            raise ConfigError(
                f"tensor {name} in {reader.directory} has shape {list(found)}, but config.json makes it "
                f"{list(wanted)}; use the config.json and weights of the same model"
            )
        if reader.dtype_of(name) not in ("F64", "F32", "F16", "BF16"):
            raise ConfigError(
                f"tensor {name} in {reader.directory} is {reader.dtype_of(name)}; use unquantized weights"
            )
    for name in alias & reader.names:
        if not torch.equal(reader.get(name), reader.get(EMBEDDING.hf[0])):
            raise ConfigError(
                f"tensor {name} in {reader.directory} differs from {EMBEDDING.hf[0]}, though "
                "tie_word_embeddings=true; set tie_word_embeddings to false, or remove the tensor"
            )


def stage_weights(
    reader: HFReader,
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
        layers: global numbers of the stage's layers; names come out numbered from 0.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head (tied and not ``first``: the embedding's copy).

    Raises:
        ConfigError: ``tensor_size`` cuts a KV group, or the directory does not hold exactly this model.
    """
    check_tensor_size(shape, tensor_size)
    check_tensors(reader, shape)
    return {
        weight.megatron: shard(
            _to_megatron(reader, shape, weight, tensor_size), weight.how, tensor_rank, tensor_size
        ).to(dtype, copy=True, memory_format=torch.contiguous_format)
        for weight in stage_table(shape, layers, first=first, last=last)
    }


def read_embedding(directory: Path) -> torch.Tensor:
    """The token embedding ``[V, H]`` fp32 of a Hugging Face directory."""
    with HFReader(directory) as reader:
        return reader.get(EMBEDDING.hf[0]).float()


def _to_megatron(reader: HFReader, shape: ModelShape, weight: Weight, tensor_size: int) -> torch.Tensor:
    """The whole Megatron tensor of ``weight``, before it is cut."""
    parts = [reader.get(name) for name in weight.hf]
    if weight.how == "qkv":
        q, k, v = parts
        return fuse_qkv(q, k, v, shape.heads, shape.kv_groups)
    if weight.how == "gate_up":
        return fuse_gate_up(*parts)
    if weight.how == "vocab":
        return pad_vocab(parts[0], padded_vocab(shape.vocab, tensor_size))
    return parts[0]


def _to_hf(whole: torch.Tensor, shape: ModelShape, weight: Weight) -> tuple[torch.Tensor, ...]:
    """The Hugging Face tensors of a whole Megatron tensor, in the order of ``weight.hf``."""
    if weight.how == "qkv":
        return split_qkv(whole, shape.heads, shape.kv_groups)
    if weight.how == "gate_up":
        return split_gate_up(whole)
    if weight.how == "vocab":
        return (strip_vocab(whole, shape.vocab),)
    return (whole,)


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
            for name, tensor in zip(weight.hf, _to_hf(whole, shape, weight), strict=True):
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
    directory, source_dir = directory.resolve(), source_dir.resolve()
    tokenizer_dir = source_dir if tokenizer_dir is None else tokenizer_dir.resolve()
    _check_target(directory, (source_dir, tokenizer_dir))
    temporary = directory.with_name(f".{directory.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_tensors(temporary, tensors, max_file_bytes)
        _write_config(temporary, source_dir, tensors)
        for folder, names in ((source_dir, ("generation_config.json",)), (tokenizer_dir, TOKENIZER_FILES)):
            for name in names:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, temporary / name)
        _replace_directory(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_target(directory: Path, sources: tuple[Path, ...]) -> None:
    if directory in sources:
        raise ConfigError(f"{directory} is the model's or tokenizer's own directory; write to another one")
    if directory.exists() and not (directory / "config.json").is_file() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty and holds no model; give a new directory")


def _replace_directory(new: Path, directory: Path) -> None:
    old = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    try:
        os.rename(new, directory)
    except OSError:
        if old.exists():
            os.rename(old, directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_file_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(directory: Path, source_dir: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy config.json with the dtype of the weights, for transformers loads in the dtype that it names."""
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
