"""Atomic files and checkpoint folders. No torch and no process groups: one rank commits, the others write.

Names inside a checkpoint root (all on one file system, so that a rename is atomic):

    tick000070          a complete checkpoint; it never exists half-written or half-deleted
    latest              text: the name of the checkpoint to go on from
    .tmp-tick000070     a save in progress, or what an interrupted one left
    .tmp-pruned-...     a checkpoint on its way out
    .old-tick000070     the previous checkpoint of a tick that is being saved again
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_grpo.config import ConfigError

LATEST = "latest"
MANIFEST = "checkpoint.json"
_TICK_NAME = re.compile(r"tick(\d{6,})")
_HARDLY_ANY_BYTES = 2**20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are untouched."""


def write_text_atomic(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) in one step: a reader sees the old file or the new, never a part.

    Errors: OSError as the system raised it; the temporary file is gone and the old file unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_json_atomic(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as indented JSON by ``write_text_atomic``. ValueError on NaN or infinity."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def tick_of(checkpoint: Path) -> int:
    """The tick after which a committed checkpoint was taken, from its manifest."""
    return int(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["tick"])


class CheckpointFolder:
    """The checkpoints of a run: written aside, renamed when complete, the last ``keep`` kept.

    A kill between any two file operations leaves a complete checkpoint that ``latest`` finds, once one was
    committed. In a distributed save one rank calls ``begin``, every rank writes into ``temporary(tick)``, and
    after a barrier that one rank calls ``commit``.
    """

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"train.keep={keep} would keep no checkpoint; use at least 1")
        self.root = root
        self.keep = keep

    def temporary(self, tick: int) -> Path:
        """Where the ranks write the checkpoint of ``tick`` between ``begin`` and ``commit``."""
        return self.root / f".tmp-{_name(tick)}"

    def begin(self, tick: int) -> Path:
        """Remove what interrupted saves left, make the temporary folder of ``tick`` and return it.

        Errors: CheckpointError on a full disk; the temporary folder is removed.
        """
        temporary = self.temporary(tick)
        with self.writing(tick):
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
        return temporary

    def commit(self, tick: int) -> Path:
        """Make the temporary folder of ``tick`` the latest checkpoint, then drop those beyond ``keep``.

        Checkpoints of later ticks go too: they belong to a continuation that this run, resumed from before
        them, has abandoned. Errors: CheckpointError on a full disk; every earlier checkpoint is kept.
        """
        final = self.root / _name(tick)
        with self.writing(tick):
            temporary = self.temporary(tick)
            write_json_atomic(temporary / MANIFEST, {"tick": tick})
            _sync_tree(temporary)
            replaced = self._move_aside(final)
            os.replace(temporary, final)
            write_text_atomic(self.root / LATEST, final.name + "\n")
        if replaced is not None:
            shutil.rmtree(replaced)
        self._prune(tick)
        return final

    def abort(self, tick: int) -> None:
        """Remove the temporary folder of ``tick`` and put a checkpoint that was moved aside back."""
        # What cannot be removed now goes at the next begin; failing here would hide the cause of the abort.
        shutil.rmtree(self.temporary(tick), ignore_errors=True)
        self._restore_moved_aside()

    @contextmanager
    def saving(self, tick: int) -> Iterator[Path]:
        """``begin``, the body (which writes into the yielded folder), ``commit``; ``abort`` if one fails."""
        temporary = self.begin(tick)
        with self.writing(tick):
            yield temporary
        self.commit(tick)

    def latest(self) -> Path | None:
        """The checkpoint to go on from: the one ``latest`` names, else the highest tick; None without any."""
        found = self._loadable()
        if not found:
            return None
        tracker = self.root / LATEST
        named = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
        match = _TICK_NAME.fullmatch(named)
        chosen = int(match[1]) if match and int(match[1]) in found else max(found)
        return found[chosen]

    def resolve(self, resume: str | Path, note: Callable[[str], object] = print) -> Path | None:
        """The checkpoint that ``--resume`` means: ``auto`` or the path of a checkpoint or of a run directory.

        ``auto`` without a checkpoint tells ``note`` that training starts from scratch and returns None.
        Errors: ConfigError when a path given explicitly holds no complete checkpoint.
        """
        if str(resume) == "auto":
            chosen = self.latest()
            if chosen is None:
                note(f"--resume auto: no checkpoint in {self.root}; starting from scratch")
            return chosen
        path = Path(resume)
        if not path.is_dir():
            raise ConfigError(f"--resume={path}: no such folder; give a checkpoint folder, a run directory or auto")
        if (path / MANIFEST).is_file() and not path.name.startswith(".tmp-"):
            return path
        for root in (path / "checkpoints", path):
            chosen = CheckpointFolder(root, self.keep).latest()
            if chosen is not None:
                return chosen
        raise ConfigError(
            f"--resume={path}: no complete checkpoint in it; give a folder like checkpoints/{_name(70)}, or auto"
        )

    @contextmanager
    def writing(self, tick: int) -> Iterator[None]:
        """For every rank, around what it writes: abort the save when the body raises.

        Errors: CheckpointError on a full disk, saying what to do; anything else as it is.
        """
        try:
            yield
        except BaseException as error:
            full = _disk_full(error, self.root)
            self.abort(tick)
            if full:
                raise CheckpointError(self._disk_full_message(tick)) from error
            raise

    def _disk_full_message(self, tick: int) -> str:
        kept = self.latest()
        remedy = "free some space" + (f" or lower train.keep={self.keep}" if self.keep > 1 else "")
        left = f"the last complete checkpoint is {kept}" if kept else "there is no earlier checkpoint"
        return f"checkpoint of tick {tick} not saved: no space left for {self.root}; {remedy}; {left}"

    def _loadable(self) -> dict[int, Path]:
        """Complete checkpoints by tick; one moved aside counts while its successor is not in place."""
        found: dict[int, Path] = {}
        for prefix in (".old-", ""):
            for path in self.root.glob(f"{prefix}tick*"):
                match = _TICK_NAME.fullmatch(path.name.removeprefix(prefix))
                if match and (path / MANIFEST).is_file():
                    found[int(match[1])] = path
        return found

    def _move_aside(self, final: Path) -> Path | None:
        """Make room for ``final`` where a checkpoint of that tick exists; where it went, or None."""
        if not final.exists():
            return None
        aside = final.with_name(f".old-{final.name}")
        os.replace(final, aside)
        return aside

    def _restore_moved_aside(self) -> None:
        """Put a checkpoint whose successor never arrived back in its place; drop one whose successor did."""
        for aside in self.root.glob(".old-tick*"):
            final = aside.with_name(aside.name.removeprefix(".old-"))
            if final.exists():
                shutil.rmtree(aside)
            else:
                os.replace(aside, final)

    def _remove_leftovers(self) -> None:
        self._restore_moved_aside()
        for path in self.root.glob(".tmp-*"):
            shutil.rmtree(path)

    def _prune(self, tick: int) -> None:
        """Keep the newest ``keep`` checkpoints up to ``tick``. Renamed first: none is ever half-deleted."""
        found = self._loadable()
        kept = sorted(each for each in found if each <= tick)[-self.keep :]
        for each in sorted(found.keys() - set(kept)):
            leaving = self.root / f".tmp-pruned-{found[each].name}"
            os.replace(found[each], leaving)
            shutil.rmtree(leaving)


def _name(tick: int) -> str:
    return f"tick{tick:06d}"


def _disk_full(error: BaseException, root: Path) -> bool:
    """Whether ``error`` came from a full disk: by its errno, or because hardly any space is left.

    The second is for native writers such as torch.save, whose errors carry no errno.
    """
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return isinstance(error, Exception) and root.exists() and shutil.disk_usage(root).free < _HARDLY_ANY_BYTES


def _sync(path: Path) -> None:
    """Ask the system to put a file or a folder's entries on the disk, so that a power cut finds them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
