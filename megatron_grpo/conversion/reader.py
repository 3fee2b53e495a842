"""Hugging Face directories, read: tensors of safetensors files, compared with the model's table."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.families import ModelShape
from megatron_grpo.conversion.names import DERIVED_ENDINGS, TABLES, Weight, embedding_name, head_name, hf_shapes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What safetensors calls the numbers of models."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a Hugging Face model directory") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; restore the file")
    return content


class HFReader:
    """The tensors of a Hugging Face directory, one file or indexed shards, opened when first asked for.

    Use it as a context manager: leaving it closes the files.

    Args:
        prefix: what names get in front where no name has it: a model's body was saved alone.

    Raises:
        ConfigError: there are no safetensors, the index is not one, or a shard that it names is missing,
            outside the directory, damaged, or without a tensor that the index puts there.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
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
        bare = prefix if not any(name.startswith(prefix) for name in self._file_of) else ""
        self._stored = {bare + name: name for name in self._file_of}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Close the files, and with them the memory their pages take; they open again when asked for."""
        self._open_files.clear()
        self._stack.close()

    @property
    def directory(self) -> Path:
        """Where the tensors come from."""
        return self._directory

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._stored)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor ``name``, on the CPU, in the dtype of the file."""
        tensor: torch.Tensor = self._file(name).get_tensor(self._stored[name])
        return tensor

    def parts(self, weight: Weight) -> tuple[torch.Tensor, ...]:
        """The tensors that ``weight`` is made of."""
        return tuple(self.get(name) for name in weight.hf)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``, from the header alone."""
        return tuple(self._file(name).get_slice(self._stored[name]).get_shape())

    def dtype_of(self, name: str) -> str:
        """safetensors dtype of ``name`` (such as ``F32`` or ``BF16``), from the header alone."""
        return str(self._file(name).get_slice(self._stored[name]).get_dtype())

    def weight_dtype(self, weight: Weight) -> torch.dtype:
        """The one dtype of the tensors that ``weight`` is made of.

        Raises:
            ConfigError: there are several.
        """
        found = sorted({self.dtype_of(name) for name in weight.hf})
        if len(found) > 1:
            raise ConfigError(
                f"{' and '.join(weight.hf)} make one Megatron tensor and are {' and '.join(found)}; give --dtype"
            )
        return DTYPES[found[0]]

    def _file(self, name: str) -> Any:
        if name not in self._stored:
            raise ConfigError(f"tensor {name} is missing from {self._directory}; fetch the model again")
        return self._open(self._file_of[self._stored[name]])

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self._directory / file_name
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error
            held = set(handle.keys())
            absent = sorted(name for name, file in self._file_of.items() if file == file_name and name not in held)
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


@contextmanager
def hf_source(directory: Path, shape: ModelShape) -> Iterator[HFReader]:
    """The weights of a Hugging Face directory for the length of the block.

    Raises:
        ConfigError: see ``HFReader`` and ``check_tensors``.
    """
    with HFReader(directory, TABLES[shape.family].prefix) as reader:
        check_tensors(reader, shape)
        yield reader


def check_tensors(reader: HFReader, shape: ModelShape) -> None:
    """Compare the whole directory with the model's table: every tensor there, in its shape, and no other.

    A tied model may carry its head once more as ``lm_head.weight``, if it equals the embedding.

    Raises:
        ConfigError: names the first tensor that is missing, surplus, misshapen or not floating point.
    """
    expected = hf_shapes(shape)
    alias = {head_name(shape)} if shape.tied else set()
    missing = sorted(expected.keys() - reader.names)
    surplus = sorted(n for n in reader.names - expected.keys() - alias if not n.endswith(DERIVED_ENDINGS))
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
        if reader.dtype_of(name) not in DTYPES:
            raise ConfigError(
                f"tensor {name} in {reader.directory} is {reader.dtype_of(name)}; use unquantized weights"
            )
    for name in alias & reader.names:
        if not torch.equal(reader.get(name), reader.get(embedding_name(shape))):
            raise ConfigError(
                f"tensor {name} in {reader.directory} differs from {embedding_name(shape)}, though "
                "tie_word_embeddings=true; set tie_word_embeddings to false, or remove the tensor"
            )
