"""The `jsonl` task: one question with its answer a line, as GSM8K has them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_grpo.config import ConfigError
from megatron_grpo.data.problem import Problem

if TYPE_CHECKING:
    from megatron_grpo.config import DataConfig

GOLD_MARKER = "####"
QUESTION_SLOT = "{question}"

_NO_ANSWER = {"", "none", "null", "nan"}
_SIGN = {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"}
_SIGN_SPACE = re.compile(r"^([+-])\s+")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_LATEX_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[^\W\d_]{2,}[\s:,;]+[^\W\d_]{2,}")


class JsonlTask:
    """Rows of `data.path`, shuffled anew each epoch; each row is drawn once an epoch.

    Validation is the first `data.val_size` rows of `data.val_path` when that is given; otherwise the last
    `data.val_size` rows of `data.path`, which training then never sees. Ids are line numbers from 1 (those of
    `data.val_path` go on after the last training line), so an error can name its row.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Read and check every row. Raises ConfigError for a missing file, a bad row or too few rows."""
        if data.path is None:
            raise ConfigError("data.path is missing; data.task=jsonl needs the file with the training rows")
        rows = read_rows(Path(data.path), data)
        if data.val_path is not None:
            offset = rows[-1].id
            held_out = read_rows(Path(data.val_path), data)[: data.val_size]
            self._validation = [replace(row, id=offset + row.id) for row in held_out]
            self._train = rows
        else:
            if data.val_size >= len(rows):
                raise ConfigError(
                    f"data.val_size={data.val_size} leaves no row to train on: {data.path} has {len(rows)}; "
                    f"use at most {len(rows) - 1}, or give data.val_path"
                )
            cut = len(rows) - data.val_size
            self._train, self._validation = rows[:cut], rows[cut:]
        self._epoch_order = lru_cache(maxsize=2)(partial(epoch_order, len(self._train), seed))

    def train_problem(self, index: int) -> Problem:
        """Row number `index % rows` of the shuffled epoch `index // rows`."""
        epoch, place = divmod(index, len(self._train))
        return self._train[self._epoch_order(epoch)[place]]

    def validation(self) -> list[Problem]:
        """The held-out rows in file order."""
        return list(self._validation)


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of `rows` rows in an epoch: a permutation that depends on nothing but the arguments."""
    order = list(range(rows))
    random.Random(f"jsonl/{seed}/{epoch}").shuffle(order)
    return order


def read_rows(path: Path, data: DataConfig) -> list[Problem]:
    """The problems of a JSON-lines file in file order; blank lines are skipped.

    Raises ConfigError, naming file and line, for anything that cannot become a problem with a usable gold.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a JSON-lines file") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                problems.append(_parse_row(line, number, data))
            except ValueError as error:
                raise ConfigError(f"{path} line {number}: {error}; fix or remove the line") from error
    if not problems:
        raise ConfigError(f"{path} has no rows; give a file with one JSON object a line")
    return problems


def _parse_row(line: bytes, number: int, data: DataConfig) -> Problem:
    """One line as a problem; raises ValueError in words when it is not one."""
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
    question, answer = _field(row, data.question_key), _field(row, data.answer_key)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{data.question_key!r} is not a text with something in it")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{data.answer_key!r} is neither a text nor a number")
    return Problem(number, data.prompt_template.replace(QUESTION_SLOT, question), normalise_gold(str(answer)))


def _field(row: dict[str, object], key: str) -> object:
    if key not in row:
        raise ValueError(f"it has no key {key!r} (it has {', '.join(sorted(row)) or 'none'})")
    return row[key]


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a value that JSON allows")


def normalise_gold(answer: str) -> str:
    """The gold answer: what follows the last `####`, or all; a number loses `$`, commas and a final dot.

    Anything else is kept as it is (an expression, a LaTeX term, one word). Raises ValueError when nothing is
    left, or when what is left is several lines or prose, which no reward could compare.
    """
    gold = answer.rsplit(GOLD_MARKER, 1)[-1].strip()
    if gold.lower() in _NO_ANSWER:
        raise ValueError(f"its answer is empty ({gold!r})")
    for sign, plain in _SIGN.items():
        gold = gold.replace(sign, plain)
    number = _SIGN_SPACE.sub(r"\1", gold.replace("$", "").strip())
    if _NUMBER.fullmatch(number) and any(character.isdigit() for character in number):
        return number.replace(",", "").removesuffix(".").removeprefix("+")
    if "\n" in gold or _PROSE.search(_LATEX_COMMAND.sub(" ", gold)):
        shown = gold if len(gold) <= 60 else gold[:57] + "..."
        raise ValueError(
            f"its answer {shown!r} is prose, not a value (write a value, or end a solution in '#### value')"
        )
    return gold
