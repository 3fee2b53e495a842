"""The sections that say what is asked and what is right: ``data`` and ``reward``."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from .sections import Natural, NonNegativeFloat, Positive, PositiveFloat, Section

TASKS = ("chain_sum", "jsonl", "parquet", "folder")
"""Tasks by name; ``reasoning_gym:NAME`` is one of that package's."""
TABLES = ("jsonl", "parquet", "folder")


class SourceConfig(Section):
    """Where problems come from."""

    task: str = "chain_sum"
    """chain_sum; rows of a jsonl or parquet file or of a dataset folder (saved by datasets, or Parquet files as on the
    hub); reasoning_gym:NAME."""
    terms: Annotated[int, Field(ge=2)] = 3
    """Numbers in one chain_sum prompt."""
    options: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies defaults
    """Settings of a reasoning_gym task, under the names they have there."""
    path: str | None = None
    """Training rows: a file, for folder a folder."""
    val_path: str | None = None
    """Validation rows; without it and val_split the last val_size training rows are held out."""
    split: str = "train"
    """Split of a folder that is trained on."""
    val_split: str | None = None
    """Split of a folder that is validated on; of val_path, or else of path."""
    rows: str | None = None
    """Slice of the training rows as start:stop, counted from 0 as Python does; null: all."""
    val_rows: str | None = None
    """Slice of the validation rows."""
    prompt_template: str = "{question}\n"
    question_key: str = "question"
    answer_key: str = "answer"

    @field_validator("task")
    @classmethod
    def _known_task(cls, value: str) -> str:
        if value not in TASKS and not (value.startswith("reasoning_gym:") and value.partition(":")[2]):
            raise ValueError(f"is not a task; use {', '.join(TASKS)} or reasoning_gym:NAME")
        return value

    @field_validator("rows", "val_rows")
    @classmethod
    def _is_slice(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(-?\d+)?:(-?\d+)?", value):
            raise ValueError("is no slice; write start:stop, such as 0:1000")
        return value

    @field_validator("prompt_template")
    @classmethod
    def _has_question(cls, value: str) -> str:
        if "{question}" not in value:
            raise ValueError("has no place for the question; put {question} into it")
        return value


class MixedSource(SourceConfig):
    weight: PositiveFloat = 1.0
    """Share of the stream, relative to the others'."""


class DataConfig(SourceConfig):
    val_size: Positive = 256
    """Held-out problems scored at each validation."""
    max_prompt: Positive = 64
    """Longest prompt, in tokens."""
    too_long: Literal["error", "drop"] = "error"
    """What is done about a longer one."""
    chat: bool = False
    """Prompts go through the tokenizer's chat template, as a user's message."""
    system: str | None = None
    """The system message before it."""
    mix: Annotated[tuple[MixedSource, ...], Field(strict=False)] = ()
    """Several tasks in place of one, mixed by weight; each has the keys of where problems come from."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The run's tasks."""
        return self.mix or (self,)


REWARDS = ("exact", "math", "gsm8k", "choice", "format")
"""Rewards by name; ``python:package.module:function`` is the user's own, ``model:PATH`` a reward model."""
REWARD_MODEL = "model:"


def _check_reward(kind: str) -> str:
    module, colon, name = kind.removeprefix("python:").partition(":")
    is_function = kind.startswith("python:") and module and colon and name
    if kind not in REWARDS and not is_function and kind.removeprefix(REWARD_MODEL) in ("", kind):
        raise ValueError(f"is not a reward; use {', '.join(REWARDS)}, python:package.module:function or model:PATH")
    return kind


def reward_name(kind: str) -> str:
    """What the metrics call a reward: a model's path is its last folder's name."""
    folder = kind.rstrip("/").rpartition("/")[2]
    return REWARD_MODEL + folder.removeprefix(REWARD_MODEL) if kind.startswith(REWARD_MODEL) else kind


class RewardConfig(Section):
    kind: str = "exact"
    """exact: the task's own rule; math: the answer is compared as a number or formula; gsm8k: as the number after the
    last ####; choice: as a letter; format: thoughts in think tags; python:package.module:function: your own;
    model:PATH: what a sequence classifier with one label says of prompt and response, which it reads in the policy's
    own tokens."""
    weights: dict[str, float] = {}  # noqa: RUF012  # pydantic copies defaults
    """Several rewards in place of kind, each with its weight in their sum: {math: 1.0, format: 0.2}."""
    flexible: bool = False
    """gsm8k: without #### the last number of the response counts."""
    time_limit: PositiveFloat = 5.0
    """Seconds for one sample of math, of reasoning_gym's own rules and of python functions; after it the score is 0.
    The rules take half of parallel.timeout_s for a batch at most: what is left then has no score."""
    overlong_buffer: Natural = 0
    """Tokens before rollout.max_response in which the reward falls by up to overlong_weight (DAPO); 0: none."""
    overlong_weight: NonNegativeFloat = 1.0
    length_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a response of rollout.max_response tokens, and in proportion off shorter ones."""

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        return _check_reward(value)

    @field_validator("weights")
    @classmethod
    def _all_known(cls, value: dict[str, float]) -> dict[str, float]:
        for kind in value:
            _check_reward(kind)
        if value and not any(value.values()):
            raise ValueError("are all zero: no response would be worth more than another; give one of them a weight")
        return value

    @property
    def weighted(self) -> dict[str, float]:
        """The run's rewards and their weights."""
        return self.weights or {self.kind: 1.0}

    @property
    def models(self) -> dict[str, Path]:
        """The directory of each reward model, by reward."""
        return {kind: Path(kind.removeprefix(REWARD_MODEL)) for kind in self.weighted if kind.startswith(REWARD_MODEL)}
