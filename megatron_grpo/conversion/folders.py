"""Directories that appear whole or not at all."""

import ctypes
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from megatron_grpo.config import ConfigError

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def fresh_directory(directory: Path, sources: Sequence[Path], *, marker: str, known: Sequence[str]) -> Iterator[Path]:
    """A new directory beside ``directory`` to write into; leaving the block puts it in its place.

    Whatever ends the block early, a termination signal included, leaves ``directory`` as it was and nothing beside it.

    Args:
        sources: directories that are read from, which ``directory`` must neither be nor hold.
        marker: the file by which a directory may be replaced: an older one of the same kind has it.
        known: patterns of all that a directory of the kind holds; one with anything else in it is not replaced.

    Raises:
        ConfigError: ``directory`` is or holds a source, is a file or a mount point, or holds something else than its
            kind.
    """
    directory = directory.resolve()
    _check_target(directory, [source.resolve() for source in sources], marker, known)
    temporary = directory.with_name(f".{directory.name}.{socket.gethostname()}.{os.getpid()}.writing")
    with _termination_as_exit():
        try:
            _reap(directory)
            temporary.mkdir(parents=True)
            yield temporary
            _put_in_place(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _reap(directory: Path) -> None:
    """Remove what processes of this host that are gone were writing; others may still be at it."""
    for left in directory.parent.glob(f".{directory.name}.{socket.gethostname()}.*.writing"):
        process = left.name.split(".")[-2]
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


def _check_target(directory: Path, sources: Sequence[Path], marker: str, known: Sequence[str]) -> None:
    if directory in sources:
        raise ConfigError(f"{directory} is the model's or tokenizer's own directory; write to another one")
    for source in sources:
        if directory in source.parents:
            raise ConfigError(f"{directory} holds its source {source}; write to another directory")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a new directory")
    if directory.exists() and not (directory / marker).is_file() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty and holds no model (no {marker}); give a new directory")
    if os.path.ismount(directory):
        raise ConfigError(f"{directory} is a mount point, which cannot be replaced; give a directory in it")
    for entry in sorted(directory.iterdir()) if directory.exists() else ():
        if not any(fnmatch(entry.name, pattern) for pattern in known):
            raise ConfigError(f"{directory} holds {entry.name} beside the model; give a new directory")


def _put_in_place(new: Path, directory: Path) -> None:
    """Afterwards ``directory`` is the new one, and ``new`` the older one if there was any."""
    if not directory.exists():
        os.rename(new, directory)
    elif not _exchange(new, directory):
        old = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)
        try:
            os.rename(new, directory)
        except OSError:
            os.rename(old, directory)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step, where the system can: no moment is without a checkpoint."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
    return int(rename(*paths, RENAME_EXCHANGE)) == 0


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception, so that what it began is undone."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
