"""Pickles of other people, read without running what they ask for."""

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

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


class Inert:
    """Stands in for a class that a checkpoint names and no tensor needs; it keeps what it is given and does nothing."""

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
            return Inert
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


class FileSlice(io.RawIOBase):
    """A part of an open file as a file of its own, so that it need not be copied to be parsed."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} lies before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        self._at += count
        return int(count)


def load_tensors(part: FileSlice, where: str) -> Any:
    """What ``torch.save`` put into ``part``: tensors and plain containers alone, every checksum compared.

    Args:
        where: the place in words, for errors.

    Raises:
        ConfigError: the bytes are damaged, or ask for more than tensors.
    """
    try:
        with zipfile.ZipFile(part) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise ConfigError(f"{where} is damaged (checksum of {bad}); fetch the checkpoint again")
        part.seek(0)
        return torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, NotImplementedError, OSError, *BROKEN) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where} is damaged or holds more than tensors ({reason}); do not use it") from error


def check_sums(file: Path) -> None:
    """Compare every checksum of what ``torch.save`` wrote.

    Raises:
        ConfigError: the file is missing, truncated, or a bit of it has changed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is missing; fetch the checkpoint again") from error
    except (zipfile.BadZipFile, NotImplementedError, OSError, *BROKEN) as error:
        raise ConfigError(f"{file} is damaged ({error}); fetch it again") from error
    if bad is not None:
        raise ConfigError(f"{file} is damaged (checksum of {bad}); fetch it again")


def load_mapped(file: Path, inert: Sequence[str] = ()) -> Any:
    """What ``torch.save`` wrote to ``file``, tensors mapped and not read; checksums are not compared.

    Args:
        inert: packages whose classes become :class:`Inert`; none of them is imported for it.

    Raises:
        ConfigError: the file cannot be read, or asks for any other class or function.
    """
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        foreign = sorted(name for name in others if name.partition(".")[0] not in inert)
        if foreign:
            raise ConfigError(f"{file} asks to run {foreign[0]}, which no checkpoint needs; do not use it")
        with torch.serialization.safe_globals([(Inert, name) for name in others]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, *BROKEN) as error:
        raise ConfigError(f"{file} cannot be read as tensors ({str(error).splitlines()[0]}); do not use it") from error
