"""Tasks that are rows of a table, each with a question and its answer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config import ConfigError
from megatron_grpo.data.files import read_table
from megatron_grpo.data.problem import Problem

if TYPE_CHECKING:
    from megatron_grpo.config import SourceConfig

QUESTION_SLOT = "{question}"


def any_answer(task: str, answer: str) -> None:
    """Every answer will do."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run asks of every problem.

    Attributes:
        check: (task, answer) -> nothing; raises ValueError, in words, for an answer that a reward cannot read.
        length: tokens of a prompt; None: nobody asks.
        max_prompt: the most of them.
        drops: whether a longer one is left out; otherwise it is an error.
    """

    check: Callable[[str, str], None] = any_answer
    length: Callable[[str], int] | None = None
    max_prompt: int = 0
    drops: bool = False

    def fits(self, prompt: str) -> bool:
        """Whether a prompt is short enough to be used. Raises ValueError for one that is not and may not be dropped."""
        tokens = 0 if self.length is None else self.length(prompt)
        if self.length is None or tokens <= self.max_prompt:
            return True
        if self.drops:
            return False
        raise ValueError(
            f"its prompt of {tokens} tokens is longer than data.max_prompt={self.max_prompt} "
            f"(use at least {tokens}, or data.too_long=drop)"
        )


class RowTask:
    """Rows of `data.path`, shuffled anew each epoch; each row is drawn once an epoch.

    Validation is the first `val_size` rows of `data.val_path`, or of split `data.val_split`, when one is given;
    otherwise the last `val_size` rows of `data.path`, which training then never sees. Ids are row numbers from 1 (those
    of a validation table go on after the last training row), so an error can name its row, and rows of equal text are
    still different problems.
    """

    def __init__(self, data: SourceConfig, seed: int, *, val_size: int, reading: Reading) -> None:
        """Read and check every row. Raises ConfigError for a missing file, a bad row or too few rows."""
        if data.path is None:
            raise ConfigError(f"data.path is missing; data.task={data.task} needs the rows to train on")
        rows = read_rows(Path(data.path), data, data.rows, reading)
        held_out = _validation_rows(data, reading)
        if held_out is not None:
            _refuse_overlap(data, rows, held_out)
            if len(held_out) < val_size:
                raise ConfigError(
                    f"data.val_size={val_size}: the validation table has {len(held_out)} rows; use at most "
                    f"{len(held_out)}, or one with more"
                )
            self._validation = [replace(row, id=rows[-1].id + row.id) for row in held_out[:val_size]]
            self._train = rows
        elif val_size >= len(rows):
            raise ConfigError(
                f"data.val_size={val_size} leaves no row to train on: {data.path} has {len(rows)}; "
                f"use at most {len(rows) - 1}, or give data.val_path"
            )
        else:
            cut = len(rows) - val_size
            self._train, self._validation = rows[:cut], rows[cut:]
        self._seed = seed
        self._epoch_order = lru_cache(maxsize=2)(partial(epoch_order, len(self._train), seed))

    def train_problem(self, index: int) -> Problem:
        """Row number `index % rows` of the shuffled epoch `index // rows`."""
        epoch, place = divmod(index, len(self._train))
        return self._train[self._epoch_order(epoch)[place]]

    def fingerprint(self) -> str:
        """Every row counts: they are shuffled by their number and the seed."""
        digest = hashlib.sha256()
        for row in self._train:
            digest.update(repr((row.id, row.prompt, row.answer)).encode())
        return f"rows {digest.hexdigest()} {self._seed}"

    def validation(self) -> list[Problem]:
        """The held-out rows in file order."""
        return list(self._validation)


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of `rows` rows in an epoch: a permutation that depends on nothing but the arguments."""
    order = list(range(rows))
    random.Random(f"jsonl/{seed}/{epoch}").shuffle(order)
    return order


def _validation_rows(data: SourceConfig, reading: Reading) -> list[Problem] | None:
    """The rows of the validation table; None where there is none."""
    if data.val_path is None and data.val_split is None:
        return None
    if data.val_split is not None and data.task != "folder":
        raise ConfigError(
            f"data.val_split={data.val_split}: only data.task=folder has splits; name a file in data.val_path"
        )
    path = data.val_path or data.path
    assert path is not None
    table = data if data.val_split is None else data.model_copy(update={"split": data.val_split})
    return read_rows(Path(path), table, data.val_rows, reading)


def _refuse_overlap(data: SourceConfig, rows: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """A validation on rows of the table that is trained on must be on others of them."""
    path, val_path = (Path(name or "").resolve() for name in (data.path, data.val_path or data.path))
    if path != val_path or data.val_split not in (None, data.split):
        return
    both = {row.id for row in rows} & {row.id for row in held_out}
    if both:
        raise ConfigError(
            f"data.val_path={data.val_path}: {len(both)} validation rows of {path} are trained on, row {min(both)} "
            "first; use another table, or slices apart in data.rows and data.val_rows"
        )


def read_rows(path: Path, data: SourceConfig, part: str | None, reading: Reading) -> list[Problem]:
    """The problems of a table in its order, of its rows `part` (`start:stop`, None: all).

    Raises ConfigError, naming file and row, for anything that cannot become a problem with a usable gold.
    """
    rows = read_table(path, data)
    if not rows:
        raise ConfigError(f"{path} has no rows; give one with questions and answers")
    if part is not None:
        start, _, stop = part.partition(":")
        rows = rows[slice(int(start) if start else None, int(stop) if stop else None)]
    word = "line" if data.task == "jsonl" else "row"
    problems = []
    for number, row in rows:
        try:
            problem = _problem(row, number, data, reading)
            if reading.fits(problem.prompt):
                problems.append(problem)
        except ValueError as error:
            raise ConfigError(f"{path} {word} {number}: {error}; fix or remove the {word}") from error
    if not problems:
        why = f"data.rows={part}" if not rows else f"data.max_prompt={reading.max_prompt}"
        raise ConfigError(f"{why} leaves no row of {path}; use a larger one")
    return problems


def _problem(row: Mapping[str, Any], number: int, data: SourceConfig, reading: Reading) -> Problem:
    """One row as a problem; raises ValueError in words when it is not one."""
    question, answer = _field(row, data.question_key), _field(row, data.answer_key)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{data.question_key!r} is not a text with something in it")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{data.answer_key!r} is neither a text nor a number")
    prompt = data.prompt_template.replace(QUESTION_SLOT, question)
    reading.check(data.task, str(answer))
    return Problem(number, prompt, str(answer), task=data.task)


def _field(row: Mapping[str, object], key: str) -> object:
    if key not in row:
        raise ValueError(f"it has no key {key!r} (it has {', '.join(sorted(row)) or 'none'})")
    return row[key]
