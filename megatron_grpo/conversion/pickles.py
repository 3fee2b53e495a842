"""Pickles of other people, read without running what they ask for."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.config import ConfigError

_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
_PLANNER = "SavePlan WriteItem WriteItemType TensorWriteData"
ALLOWED: frozenset[tuple[str, str]] = frozenset(
    [("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
    + [("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    + [("torch.distributed.checkpoint.metadata", name) for name in _METADATA.split()]
    + [("torch.distributed.checkpoint.planner", name) for name in _PLANNER.split()]
)
BROKEN = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    MemoryError,
    OverflowError,
)
"""What unpickling raises over bytes that are no pickle; it has no error of its own for them."""


class _Inert:
    """Stands in for a class of Megatron's that older checkpoints name; it keeps what it is given and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return _Inert
        raise ConfigError(f"asks to run {module}.{name}")


def load_metadata(file: Path) -> Any:
    """Unpickle the ``.metadata`` of a distributed checkpoint, with the few classes that it is made of.

    Raises:
        ConfigError: the file is missing or damaged, or asks for anything else.
    """
    try:
        return _AllowListUnpickler(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); fetch the checkpoint again") from error
    except ConfigError as error:
        raise ConfigError(f"{file} {error}, which no checkpoint needs; do not use it") from error
    except BROKEN as error:
        raise ConfigError(f"{file} is damaged ({error}); fetch the checkpoint again") from error


def load_tensors(raw: bytes, where: str) -> Any:
    """What ``torch.save`` put into ``raw``: tensors and plain containers alone, every checksum compared.

    Args:
        where: the place in words, for errors.

    Raises:
        ConfigError: the bytes are damaged, or ask for more than tensors.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise ConfigError(f"{where} is damaged (checksum of {bad}); fetch the checkpoint again")
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, NotImplementedError, OSError, *BROKEN) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where} is damaged or holds more than tensors ({reason}); do not use it") from error
