"""Tasks of the package reasoning-gym: problems made by a seed, without end."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from megatron_grpo.config import ConfigError
from megatron_grpo.data.problem import Problem
from megatron_grpo.data.rows import QUESTION_SLOT, Reading

if TYPE_CHECKING:
    from megatron_grpo.config import SourceConfig

PREFIX = "reasoning_gym:"
CHUNK = 500
"""Problems of one dataset: some tasks prepare all of theirs when they are made."""
TRIES = 100
"""For a problem that is not held out, and short enough."""
VALIDATION = "validation"
VALIDATION_IDS = 2**62


class ReasoningTask:
    """The task `reasoning_gym:NAME`; `data.options` are its settings there.

    Validation has seeds of its own, the same for every training seed, and no training problem asks what it asks. A
    training problem's id is its place in the stream.
    """

    def __init__(self, data: SourceConfig, seed: int, *, val_size: int, reading: Reading) -> None:
        """Make the validation problems. Raises ConfigError for an unknown task or setting, or without the package."""
        self._data, self._seed, self._reading = data, seed, reading
        self._chunk = lru_cache(maxsize=8)(self._dataset)
        self._check()
        stream = (self._problem(VALIDATION, place, VALIDATION_IDS + place) for place in count())
        self._validation = list(islice(self._new(stream, val_size), val_size))
        self._held_out = {problem.prompt for problem in self._validation}

    def _new(self, stream: Iterator[Problem | None], wanted: int) -> Iterator[Problem]:
        """Problems of ``stream`` that differ in what they ask; a ConfigError when too few do."""
        seen: set[str] = set()
        for problem in islice(stream, TRIES * wanted):
            if problem is not None and problem.prompt not in seen:
                seen.add(problem.prompt)
                yield problem
        if len(seen) < wanted:
            raise ConfigError(
                f"data.val_size={wanted}: {self._data.task} made {len(seen)} different problems that fit "
                f"data.max_prompt={self._reading.max_prompt}; use fewer, a larger max_prompt, or other data.options"
            )

    def train_problem(self, index: int) -> Problem:
        """The first of the problems made by (seed, index, try) that is not held out and fits."""
        for attempt in range(TRIES):
            problem = self._problem(f"train/{self._seed}/{attempt}", index, index)
            if problem is not None and problem.prompt not in self._held_out:
                return problem
        raise ConfigError(
            f"data.max_prompt={self._reading.max_prompt}: {TRIES} problems of {self._data.task} in turn were longer, "
            "held out, or had an answer that reward.kind cannot read; use a larger one, a smaller data.val_size, or "
            "other data.options"
        )

    def fingerprint(self) -> str:
        """The settings, and what this version of the package makes of them. The held-out problems count, too: none of
        them is trained on; and so does the length beyond which problems are left out."""
        data, first, reading = self._data, self.train_problem(0), self._reading
        longest = reading.max_prompt if reading.drops else None
        made = repr([(problem.prompt, problem.answer) for problem in (first, *self._validation)])
        digest = hashlib.sha256(made.encode()).hexdigest()
        return f"{data.task} {sorted(data.options.items())} {data.prompt_template!r} {longest} {self._seed} {digest}"

    def validation(self) -> list[Problem]:
        return list(self._validation)

    def _problem(self, stream: str, place: int, identity: int) -> Problem | None:
        """The problem at ``place`` of a stream; None where its prompt is too long and, in training, which has begun by
        then, where the rewards cannot read its answer."""
        number, within = divmod(place, CHUNK)
        entry = self._chunk(stream, number)[within]
        prompt = self._data.prompt_template.replace(QUESTION_SLOT, entry["question"])
        answer = "" if entry["answer"] is None else str(entry["answer"])
        try:
            if not self._reading.fits(prompt):
                return None
        except ValueError as error:
            raise ConfigError(f"data.task={self._data.task}: {error}") from error
        try:
            self._reading.check(self._data.task, answer)
        except ValueError as error:
            if stream != VALIDATION:
                return None
            raise ConfigError(f"data.task={self._data.task}: {error}; use reward.kind=exact, the task's own") from error
        return Problem(identity, prompt, answer, task=self._data.task, entry=entry)

    def _dataset(self, stream: str, number: int) -> Any:
        digest = hashlib.sha256(f"{self._data.task}/{stream}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        return _gym(self._data.task).create_dataset(self._name, seed=seed, size=CHUNK, **self._data.options)

    @property
    def _name(self) -> str:
        return self._data.task.removeprefix(PREFIX)

    def _check(self) -> None:
        task = self._data.task
        known = sorted(_gym(task).factory.DATASETS)
        if self._name not in known:
            near = difflib.get_close_matches(self._name, known, n=3) or known[:3]
            raise ConfigError(f"data.task={task}: is not a task of reasoning-gym; use one such as {', '.join(near)}")
        try:
            self._dataset("check", 0)[0]
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"data.options={self._data.options}: {task} does not take them ({error}); see reasoning-gym's settings"
            ) from error


def _gym(task: str) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.task={task}: needs reasoning-gym, which is not installed; pip install 'megatron-grpo[data]'"
        ) from error
    return reasoning_gym
