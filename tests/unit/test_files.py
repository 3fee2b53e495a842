"""Atomic files and checkpoint folders: what survives a kill, a full disk, and a folder that is not there."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.config import ConfigError
from megatron_grpo.training.files import (
    CheckpointError,
    CheckpointFolder,
    tick_of,
    write_json_atomic,
    write_text_atomic,
)


def save(folder: CheckpointFolder, tick: int, content: str) -> None:
    """Commit a checkpoint of two files, one of them in a sub-folder."""
    with folder.saving(tick) as path:
        (path / "engine").mkdir()
        (path / "engine" / "weights").write_text(content)
        (path / "state").write_text(content)


def content_of(checkpoint: Path | None) -> str:
    """What was saved, after checking that the checkpoint is whole."""
    assert checkpoint is not None
    engine, state = (checkpoint / "engine" / "weights").read_text(), (checkpoint / "state").read_text()
    assert engine == state
    return state


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def raise_disk_full(*_args: Any, **_kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_text_and_json_replace_the_old_file_and_leave_nothing_else(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a", "old")
    write_text_atomic(tmp_path / "a", "new\u00e9")
    write_json_atomic(tmp_path / "b.json", {"x": [1, None], "y": "z"})
    assert (tmp_path / "a").read_bytes() == b"new\xc3\xa9"
    assert json.loads((tmp_path / "b.json").read_text()) == {"x": [1, None], "y": "z"}
    assert names(tmp_path) == ["a", "b.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_atomic(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomic(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a", {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(tmp_path / "a", {"x": float("nan")})
    assert json.loads((tmp_path / "a").read_text()) == {"x": 1}


def test_the_last_keep_checkpoints_stay_and_latest_names_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for tick in (10, 20, 30):
        save(folder, tick, f"at {tick}")
    assert names(folder.root) == ["latest", "tick000020", "tick000030"]
    assert (folder.root / "latest").read_text() == "tick000030\n"
    latest = folder.latest()
    assert content_of(latest) == "at 30"
    assert latest is not None and tick_of(latest) == 30


def test_ticks_sort_as_numbers_beyond_six_digits(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 999_999, "a")
    save(folder, 1_000_000, "b")
    assert names(tmp_path) == ["latest", "tick1000000"]


def test_begin_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 10, "ten")
    (folder.begin(20) / "state").write_text("half")
    assert content_of(folder.latest()) == "ten"
    path = folder.begin(30)
    assert path == folder.temporary(30) == tmp_path / ".tmp-tick000030"
    assert names(tmp_path) == [".tmp-tick000030", "latest", "tick000010"]
    assert names(path) == []


def test_saving_a_tick_again_replaces_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 10, "first")
    save(folder, 10, "second")
    assert names(tmp_path) == ["latest", "tick000010"]
    assert content_of(folder.latest()) == "second"


def test_going_on_from_an_earlier_tick_drops_the_abandoned_later_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for tick in (35, 70, 50):
        save(folder, tick, f"at {tick}")
    assert names(tmp_path) == ["latest", "tick000035", "tick000050"]
    assert content_of(folder.latest()) == "at 50"


@pytest.mark.parametrize("tracker", [None, "", "garbage", "tick000099\n", "../tick000010"])
def test_latest_falls_back_on_the_highest_tick_without_a_usable_tracker(tmp_path: Path, tracker: str | None) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 10, "ten")
    save(folder, 20, "twenty")
    (tmp_path / "latest").unlink()
    if tracker is not None:
        (tmp_path / "latest").write_text(tracker)
    assert content_of(folder.latest()) == "twenty"


def test_an_error_in_the_body_removes_the_temporary_folder_and_is_not_changed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 10, "ten")
    with pytest.raises(KeyError, match="weights"), folder.saving(20):
        raise KeyError("weights")
    assert names(tmp_path) == ["latest", "tick000010"]


def write_to_a_full_disk(folder: CheckpointFolder, _monkeypatch: pytest.MonkeyPatch) -> None:
    with folder.saving(20) as path:
        (path / "state").write_text("half")
        raise_disk_full()


def rename_on_a_full_disk(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.begin(20) / "state").write_text("whole")
    monkeypatch.setattr(os, "replace", raise_disk_full)
    folder.commit(20)


def open_on_a_full_disk(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.begin(20) / "state").write_text("whole")
    monkeypatch.setattr("builtins.open", raise_disk_full)
    folder.commit(20)


def write_natively_to_a_full_disk(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=10**9, used=10**9 - 500, free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with folder.saving(20):
        raise RuntimeError("unexpected pos 576 vs 534")


def begin_on_a_full_disk(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", raise_disk_full)
    folder.begin(20)


@pytest.mark.parametrize(
    "attempt",
    [
        write_to_a_full_disk,
        write_natively_to_a_full_disk,
        rename_on_a_full_disk,
        open_on_a_full_disk,
        begin_on_a_full_disk,
    ],
)
def test_a_full_disk_is_one_clear_error_and_keeps_the_old_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempt: Callable[[CheckpointFolder, pytest.MonkeyPatch], None],
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 10, "ten")
    with pytest.raises(CheckpointError) as caught:
        attempt(folder, monkeypatch)
    monkeypatch.undo()
    assert names(tmp_path) == ["latest", "tick000010"]
    assert content_of(folder.latest()) == "ten"
    message = str(caught.value)
    assert "tick 20" in message and "no space left" in message and "tick000010" in message


def test_a_full_disk_while_replacing_a_tick_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 10, "first")
    real_replace = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-tick"):
            raise_disk_full()
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError):
        save(folder, 10, "second")
    assert names(tmp_path) == ["latest", "tick000010"]
    assert content_of(folder.latest()) == "first"


def save_until_killed(root: Path, tick: int, operation: int) -> None:
    """Save ``tick`` and get SIGKILL just before the given file operation under ``root`` (counted from 0)."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        watched = event == "open" or event.startswith(("os.", "shutil."))
        if watched and any(str(root) in str(each) for each in args):
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)
    save(CheckpointFolder(root, keep=1), tick, "new")


@pytest.mark.parametrize("tick", [20, 10], ids=["next tick", "same tick again"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path: Path, tick: int) -> None:
    fork = multiprocessing.get_context("fork")
    found = []
    for operation in range(200):
        root = tmp_path / str(operation)
        save(CheckpointFolder(root, keep=1), 10, "old")
        child = fork.Process(target=save_until_killed, args=(root, tick, operation))
        child.start()
        child.join()
        found.append(content_of(CheckpointFolder(root, keep=1).latest()))
        save(CheckpointFolder(root, keep=1), 30, "after")
        assert names(root) == ["latest", "tick000030"]
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert operation > 10, "the hook saw too few operations to prove anything"
    assert found == ["old"] * found.count("old") + ["new"] * found.count("new")
    assert found[0] == "old" and found[-1] == "new"


def test_a_process_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 10, "ten")
    program = """
        import sys, time
        from pathlib import Path
        from megatron_grpo.training.files import CheckpointFolder
        with CheckpointFolder(Path(sys.argv[1]), keep=1).saving(20) as path:
            (path / "state").write_text("half")
            print("writing", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    assert names(tmp_path) == [".tmp-tick000020", "latest", "tick000010"]
    assert content_of(CheckpointFolder(tmp_path, keep=1).resolve("auto")) == "ten"


@pytest.mark.parametrize("exists", [True, False])
def test_resume_auto_without_a_checkpoint_says_so_and_starts_from_scratch(tmp_path: Path, exists: bool) -> None:
    root = tmp_path / "checkpoints"
    if exists:
        root.mkdir()
    said: list[str] = []
    assert CheckpointFolder(root, keep=1).resolve("auto", note=said.append) is None
    assert said == [f"--resume auto: no checkpoint in {root}; starting from scratch"]


def test_resume_takes_a_checkpoint_a_checkpoint_root_or_a_run_directory(tmp_path: Path) -> None:
    other = CheckpointFolder(tmp_path / "other" / "checkpoints", keep=2)
    save(other, 10, "ten")
    save(other, 20, "twenty")
    folder = CheckpointFolder(tmp_path / "mine" / "checkpoints", keep=2)
    for given, content in (
        (other.root / "tick000010", "ten"),
        (str(other.root), "twenty"),
        (tmp_path / "other", "twenty"),
    ):
        assert content_of(folder.resolve(given)) == content


@pytest.mark.parametrize("made", ["nothing", "empty", "interrupted", "unrelated"])
def test_an_explicit_resume_path_without_a_checkpoint_is_an_error(tmp_path: Path, made: str) -> None:
    """G13, F7."""
    path = tmp_path / made
    if made == "interrupted":
        path = CheckpointFolder(tmp_path, keep=1).begin(20)
        (path / "checkpoint.json").write_text('{"tick": 20}')
    elif made != "nothing":
        path.mkdir()
    if made == "unrelated":
        (path / "tick000010").write_text("a file")
    pattern = rf"--resume={re.escape(str(path))}: .*(no such folder|no complete checkpoint).*auto"
    with pytest.raises(ConfigError, match=pattern):
        CheckpointFolder(tmp_path / "checkpoints", keep=1).resolve(path)


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.keep=0 .* at least 1"):
        CheckpointFolder(tmp_path, keep=0)
