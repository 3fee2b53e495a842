"""Hugging Face directories, written: safetensors files tensor by tensor, and the files beside them."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.reader import DTYPES, INDEX_FILE, WEIGHTS_FILE, read_hf_config

MAX_FILE_BYTES = 5_000_000_000
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)

HF_FILES = ("config.json", "generation_config.json", "*.safetensors", INDEX_FILE, *TOKENIZER_FILES)
"""All that a directory that is written here holds, as patterns."""

Plan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class HFWriter:
    """Writes the tensors of a Hugging Face directory one at a time, in any order.

    Files are laid out before the first tensor is there: one file, or indexed shards where one would exceed
    ``max_file_bytes``. Use it as a context manager; every planned tensor must be written by its end.

    Args:
        directory: exists.
        plan: name to shape and dtype of every tensor.

    Raises:
        ConfigError: a dtype that safetensors files of models do not have.
    """

    def __init__(self, directory: Path, plan: Plan, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._place: dict[str, tuple[BinaryIO, int]] = {}
        odd = sorted(name for name, (_, dtype) in plan.items() if dtype not in DTYPE_NAMES)
        if odd:
            raise ConfigError(f"tensor {odd[0]} is {plan[odd[0]][1]}; use one of {', '.join(DTYPES)}")
        files = _files_of(plan, max_file_bytes)
        for file, names in files.items():
            self._open(directory / file, names)
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            total = sum(_bytes_of(plan, name) for name in plan)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
        assert error is not None or not self._place, f"never written: {sorted(self._place)}"

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor planned under ``name``, once."""
        shape, dtype = self._plan[name]
        assert tensor.shape == shape and tensor.dtype == dtype, (name, tensor.shape, tensor.dtype)
        file, offset = self._place.pop(name)
        file.seek(offset)
        file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def _open(self, path: Path, names: Sequence[str]) -> None:
        """Write the header, in the order of the safetensors library: wide numbers first, so that each is aligned."""
        ordered = sorted(names, key=lambda name: (-self._plan[name][1].itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        for name in ordered:
            shape, dtype = self._plan[name]
            starts[name], end = end, end + _bytes_of(self._plan, name)
            offsets = [starts[name], end]
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        file = self._stack.enter_context(path.open("wb"))
        file.write(len(raw).to_bytes(8, "little") + raw)
        self._place.update({name: (file, 8 + len(raw) + start) for name, start in starts.items()})


def _bytes_of(plan: Plan, name: str) -> int:
    shape, dtype = plan[name]
    return math.prod(shape) * dtype.itemsize


def _files_of(plan: Plan, max_file_bytes: int) -> dict[str, list[str]]:
    """File name to the tensors in it, in the order of the plan."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in plan:
        size = _bytes_of(plan, name)
        if shards[-1] and filled + size > max_file_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, start=1)
    }


def carry_files(source_dir: Path, directory: Path, *, dtype: torch.dtype, tokenizer_dir: Path | None = None) -> None:
    """Copy config, generation config and tokenizer files.

    The config gets the dtype of the weights, for transformers loads in the dtype that it names.

    Args:
        tokenizer_dir: where the tokenizer files come from, if not from ``source_dir``.
    """
    config = read_hf_config(source_dir)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for folder, names in ((source_dir, ("generation_config.json",)), (tokenizer_dir or source_dir, TOKENIZER_FILES)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, directory / name)
