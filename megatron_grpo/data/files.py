"""Tables on disk: JSON lines, Parquet, Hugging Face dataset folders. pyarrow is imported where it is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_grpo.config import ConfigError

if TYPE_CHECKING:
    from megatron_grpo.config import SourceConfig

Row = tuple[int, Mapping[str, Any]]
"""Its number from 1 (a line of JSON lines, a row of a table), and its fields."""

DEFAULT_SPLIT = "train"
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|dev|eval)(?=[-_.]|$)")


def read_table(path: Path, data: SourceConfig) -> list[Row]:
    """The rows of a file or folder in their order, with the question and answer fields of ``data`` at least.

    Raises ConfigError, naming the file and, where there is one, the row.
    """
    if data.task == "jsonl":
        return list(_json_lines(path))
    keys = (data.question_key, data.answer_key)
    if data.task == "parquet":
        return _numbered([_parquet(path, keys)])
    return _numbered(_folder(path, data.split, keys))


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a JSON-lines file") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, _json_object(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {number}: {error}; fix or remove the line") from error


def _json_object(line: bytes) -> dict[str, Any]:
    """One line as an object; raises ValueError in words when it is none."""
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return row


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a value that JSON allows")


def _numbered(tables: Sequence[Any]) -> list[Row]:
    rows = [row for table in tables for row in table.to_pylist()]
    return list(enumerate(rows, start=1))


def _parquet(path: Path, keys: Sequence[str]) -> Any:
    """The columns ``keys`` of a Parquet file, as a pyarrow table."""
    parquet = _pyarrow("pyarrow.parquet")
    return _columns(path, keys, lambda: parquet.ParquetFile(path).read(columns=list(dict.fromkeys(keys))))


def _arrow(path: Path, keys: Sequence[str]) -> Any:
    """The same of an Arrow stream, as ``Dataset.save_to_disk`` writes it."""
    arrow = _pyarrow("pyarrow")

    def read() -> Any:
        with arrow.memory_map(str(path)) as source:
            whole = arrow.ipc.open_stream(source).read_all()
            return whole.select([name for name in dict.fromkeys(keys) if name in whole.column_names])

    return _columns(path, keys, read)


def _columns(path: Path, keys: Sequence[str], read: Callable[[], Any]) -> Any:
    try:
        table = read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} cannot be read ({why}); give a Parquet file or a dataset folder") from error
    for key in keys:
        if key not in table.column_names:
            raise ConfigError(f"{path} has no column {key!r}; set data.question_key and data.answer_key")
    return table


def _folder(path: Path, split: str, keys: Sequence[str]) -> list[Any]:
    """The tables of one split of a folder: what ``save_to_disk`` wrote, or Parquet files as the hub has them."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; give one, or use data.task=parquet or jsonl for a file")
    if (path / "dataset_dict.json").is_file():
        splits = _json_file(path / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise ConfigError(f"data.split={split}: {path} has {', '.join(splits) or 'none'}; use one of them")
        path = path / split
    elif split != DEFAULT_SPLIT and (path / "state.json").is_file():
        raise ConfigError(f"data.split={split}: {path} is one table without splits; leave data.split and val_split out")
    if (path / "state.json").is_file():
        names = [entry["filename"] for entry in _json_file(path / "state.json").get("_data_files", [])]
        return [_arrow(path / name, keys) for name in names]
    files = _of_split(path, split)
    return [_parquet(file, keys) for file in files]


def _of_split(path: Path, split: str) -> list[Path]:
    """The Parquet files below ``path`` that belong to ``split`` by their name or folder; all where none names one."""
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise ConfigError(f"{path} holds neither a saved dataset nor Parquet files; give a dataset folder")

    def named(file: Path) -> str | None:
        for name in (file.name, *(parent.name for parent in file.relative_to(path).parents)):
            if name.startswith((f"{split}-", f"{split}.")) or name == split:
                return split
            if match := _SPLIT_NAME.match(name):
                return match[1]
        return None

    splits = {file: named(file) for file in files}
    if set(splits.values()) == {None}:
        if split != DEFAULT_SPLIT:
            raise ConfigError(f"data.split={split}: no file below {path} names a split; leave split and val_split out")
        return files
    chosen = [file for file in files if splits[file] == split]
    if not chosen:
        known = ", ".join(sorted({name for name in splits.values() if name}))
        raise ConfigError(f"data.split={split}: {path} has {known}; use one of them")
    return chosen


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); save the dataset again") from error
    return content


def _pyarrow(module: str) -> ModuleType:
    try:
        import importlib

        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "data.task=parquet and folder need pyarrow, which is not installed; pip install 'megatron-grpo[data]'"
        ) from error
