"""Pickles of other people, read without running what they ask for."""

import errno
import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from megatron_grpo.config import ConfigError
from megatron_grpo.conversion.behind import raw_bytes

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
    struct.error,
    AttributeError,
    MemoryError,
    OverflowError,
)
"""What unpickling raises over bytes that are no pickle; it has no error of its own for them."""

STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}
"""What ``torch.save`` calls the numbers of a tensor."""
HARDLY_ANY_BYTES = 2**20
LOCAL_HEADER, LOCAL_LENGTHS = 30, 26
"""Bytes of the header in front of each entry of a zip archive; it ends with the lengths of name and extra field."""


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


class _Pieces:
    """A file for ``zipfile`` that keeps what is written without copying it."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> int:
        self.pieces.append(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


class _ShellPickler(pickle.Pickler):
    """Pickles a tensor as ``torch.save`` does: its numbers are a file of their own, called 0."""

    def __init__(self, file: IO[bytes], tensor: torch.Tensor) -> None:
        super().__init__(file, protocol=2)
        self._numbers = ("storage", STORAGES[tensor.dtype], "0", "cpu", tensor.numel())

    def persistent_id(self, item: object) -> tuple[object, ...] | None:
        return self._numbers if isinstance(item, torch.storage.TypedStorage) else None


@lru_cache(maxsize=256)
def _pickle_of(shape: torch.Size, dtype: torch.dtype) -> bytes:
    """What ``torch.save`` says of a contiguous CPU tensor beside its numbers."""
    file, tensor = io.BytesIO(), torch.empty(shape, dtype=dtype)  # memory that is never touched
    _ShellPickler(file, tensor).dump(tensor)
    return file.getvalue()


def saved_tensor(tensor: torch.Tensor) -> list[bytes | memoryview]:
    """The file that ``torch.save`` makes of a CPU tensor, in pieces; numbers are not copied if it is contiguous.

    torch itself copies a tensor that is part of a larger one first, and takes twice as long for its checksums.
    """
    file = _Pieces()
    with zipfile.ZipFile(cast(IO[bytes], file), "w") as archive:
        for name, data in (
            ("data.pkl", _pickle_of(tensor.shape, tensor.dtype)),
            ("byteorder", sys.byteorder.encode()),
            ("data/0", raw_bytes(tensor)),
            ("version", b"3\n"),
        ):
            with archive.open(zipfile.ZipInfo(f"archive/{name}"), "w") as entry:
                entry.write(data)
    return file.pieces


def load_tensor(part: FileSlice, where: str, room: torch.Tensor) -> torch.Tensor:
    """The tensor that ``torch.save`` put into ``part``, every checksum compared.

    Args:
        where: the place in words, for errors.
        room: contiguous, of the shape and dtype that are expected; it is filled and returned where the file says no
            more than these. What says more is unpickled as a tensor of its own.

    Raises:
        ConfigError: the bytes are damaged, or ask for more than a tensor.
    """
    try:
        with zipfile.ZipFile(part) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("compressed entries, which torch does not write")
            [numbers] = (entry for entry in entries if entry.filename.endswith("/data/0"))
            said = [archive.read(entry) for entry in entries if entry is not numbers]
        plain = room.dtype in STORAGES and _pickle_of(room.shape, room.dtype) in said
        if plain and numbers.file_size == room.nbytes:
            _read_numbers(part, numbers, raw_bytes(room))
            value = stored = room
        else:
            part.seek(0)
            value = torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True)
            stored = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        if zlib.crc32(raw_bytes(stored)) != numbers.CRC:
            raise ValueError("checksum of its numbers")
    except (zipfile.BadZipFile, NotImplementedError, OSError, *BROKEN) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where} is damaged or holds more than a tensor ({reason}); do not use it") from error
    return value


def _read_numbers(part: FileSlice, entry: zipfile.ZipInfo, target: memoryview) -> None:
    """Fill ``target`` with an entry that is stored as it is."""
    part.seek(entry.header_offset)
    local = part.read(LOCAL_HEADER) or b""
    name, extra = struct.unpack_from("<HH", local, LOCAL_LENGTHS)
    part.seek(entry.header_offset + LOCAL_HEADER + name + extra)
    if part.readinto(target) != len(target):
        raise EOFError("it is cut short")


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
    others = refuse_code(file, inert)
    try:
        with torch.serialization.safe_globals([(Inert, name) for name in others]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, *BROKEN) as error:
        raise _unreadable(file, error) from error


def refuse_code(file: Path, inert: Sequence[str] = ()) -> list[str]:
    """The classes that ``file`` names beside those of tensors, all of them from the packages ``inert``.

    Nothing is run and no tensor is read.

    Raises:
        ConfigError: the file cannot be read, or asks for any other class or function.
    """
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (OSError, *BROKEN) as error:
        raise _unreadable(file, error) from error
    foreign = sorted(name for name in others if name.partition(".")[0] not in inert)
    if foreign:
        raise ConfigError(f"{file} asks to run {foreign[0]}, which no checkpoint needs; do not use it")
    return others


def _unreadable(file: Path, error: BaseException) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(f"{file} cannot be read as tensors ({reason}); do not use it")


def save_tensors(value: object, file: Path) -> None:
    """``torch.save``, whose own error on a full disk does not say what it is.

    Raises:
        OSError: the disk is full, or does not take the file for another reason.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        full = shutil.disk_usage(file.parent).free < HARDLY_ANY_BYTES
        reason = os.strerror(errno.ENOSPC) if full else str(error).splitlines()[0]
        raise OSError(errno.ENOSPC if full else errno.EIO, reason) from error
