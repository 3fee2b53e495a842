"""What the measuring commands print and write: tables, and JSON without numbers that JSON does not have."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_grpo.config import ConfigError

SCREEN = Path("-")


def check_folder(option: str, file: Path | None) -> None:
    """Refuse an output file in a folder that is not there.

    Raises:
        ConfigError: names the option.
    """
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option}={file}: the folder {file.parent} is not there; make it first")


def plain_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    return table


def write_json(result: Mapping[str, Any], file: Path) -> None:
    """Write to ``file``, or to stdout where it is ``-``; what is not finite becomes null."""
    text = json.dumps(finite(result), indent=2, allow_nan=False)
    if file == SCREEN:
        print(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """``value`` with ``None`` for every number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value
