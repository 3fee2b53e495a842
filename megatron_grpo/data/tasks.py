"""The tasks by name, the built-in `chain_sum`, and the encoding of prompts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.config import ConfigError
from megatron_grpo.data.mixture import Mixture, shares
from megatron_grpo.data.problem import Problem, Task
from megatron_grpo.data.reasoning import PREFIX, ReasoningTask
from megatron_grpo.data.rows import Reading, RowTask

if TYPE_CHECKING:
    from megatron_grpo.config import DataConfig, SourceConfig

HELD_OUT_SHARE = 16
"""One problem in this many is held out of training."""


class ChainSum:
    """Sums of two-digit numbers modulo 100: prompt `12+07+95>`, answer `14`.

    A policy may answer at once (`=14`) or after running totals (`19,14=14`), so the response length is free.
    The digest of the numbers decides whether a problem is held out, so no training seed can reach validation.
    """

    def __init__(self, *, terms: int, val_size: int, seed: int) -> None:
        """Raise ConfigError when the task is too small to hold out `val_size` distinct problems."""
        room = 100**terms // (2 * HELD_OUT_SHARE)
        if val_size > room:
            raise ConfigError(
                f"data.val_size={val_size} is more than chain_sum can hold out with data.terms={terms}; "
                f"use at most {room}, or more terms"
            )
        self._terms = terms
        self._val_size = val_size
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        """The first draw of the generator seeded by (seed, index) that is not held out."""
        draw = random.Random(f"chain_sum/train/{self._seed}/{index}")
        while True:
            numbers = self._numbers(draw)
            if not is_held_out(numbers):
                return chain_sum_problem(numbers)

    def fingerprint(self) -> str:
        return f"chain_sum {self._terms} {self._seed}"

    def validation(self) -> list[Problem]:
        """`val_size` distinct held-out problems, the same for every training seed."""
        draw = random.Random("chain_sum/validation")
        chosen: dict[tuple[int, ...], Problem] = {}
        while len(chosen) < self._val_size:
            numbers = self._numbers(draw)
            if is_held_out(numbers):
                chosen[numbers] = chain_sum_problem(numbers)
        return list(chosen.values())

    def _numbers(self, draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.randrange(100) for _ in range(self._terms))


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether these terms belong to validation: decided by a digest of the terms alone."""
    digest = hashlib.sha256(bytes(numbers)).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def chain_sum_problem(numbers: Sequence[int]) -> Problem:
    """The problem that sums `numbers` (each 0 to 99); its id is the numbers read in base 100."""
    identity = 0
    for number in numbers:
        identity = identity * 100 + number
    prompt = "+".join(f"{number:02d}" for number in numbers) + ">"
    return Problem(identity, prompt, f"{sum(numbers) % 100:02d}", task="chain_sum")


def build_task(data: DataConfig, seed: int, reading: Reading | None = None) -> Task:
    """The task that `data` names, or the mixture of several.

    `seed` orders the training stream and nothing else; `reading` is what the run asks of every problem. Raises
    ConfigError when the data cannot be used.
    """
    reading = reading or Reading()
    sizes = [data.val_size]
    if data.mix:
        if data.val_size < len(data.mix):
            raise ConfigError(
                f"data.val_size={data.val_size}: is less than one problem of each of the {len(data.mix)} tasks"
            )
        sizes = [1 + size for size in shares(data.val_size - len(data.mix), [source.weight for source in data.mix])]
    tasks = [_source(source, seed, size, reading) for source, size in zip(data.sources, sizes, strict=True)]
    return Mixture(tasks, [source.weight for source in data.mix], seed) if data.mix else tasks[0]


def _source(source: SourceConfig, seed: int, val_size: int, reading: Reading) -> Task:
    if source.task == "chain_sum":
        return ChainSum(terms=source.terms, val_size=val_size, seed=seed)
    if source.task.startswith(PREFIX):
        return ReasoningTask(source, seed, val_size=val_size, reading=reading)
    return RowTask(source, seed, val_size=val_size, reading=reading)


def encode_prompts(encode: Callable[[str], list[int]], problems: Sequence[Problem], max_prompt: int) -> list[list[int]]:
    """Token ids of each prompt, in order, as `encode` makes them, special tokens included.

    Raises ConfigError, naming the problem, for a prompt of no tokens or of more than `max_prompt`.
    """
    encoded = []
    for problem in problems:
        ids = encode(problem.prompt)
        if not ids:
            raise ConfigError(f"problem {problem.id} has an empty prompt; remove it or set data.prompt_template")
        if len(ids) > max_prompt:
            raise ConfigError(
                f"data.max_prompt={max_prompt} is too small for problem {problem.id} of {len(ids)} tokens; "
                f"use at least {len(ids)} or remove the problem"
            )
        encoded.append(ids)
    return encoded
