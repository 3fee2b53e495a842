"""A run's problems, as its tokenizer and its rewards want them."""

import hashlib
from collections.abc import Callable

from megatron_grpo.backends.huggingface import Tokenizer
from megatron_grpo.config import Config, ConfigError, DataConfig
from megatron_grpo.data import Reading, Task, build_task
from megatron_grpo.rollout.rewards import gold_check


def prompt_encoder(tokenizer: Tokenizer, data: DataConfig) -> Callable[[str], list[int]]:
    """Text of a prompt to its ids: as it stands, or with ``data.chat`` as a user's message.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not data.chat:
        return tokenizer.encode
    if not tokenizer.has_chat_template:
        raise ConfigError("data.chat=true: the tokenizer has no chat template; use one that has, or data.chat=false")
    return lambda text: tokenizer.encode_chat(text, data.system)


DIGESTED = 200
"""Training problems that a digest looks at: a stream's first ones show its rows, order and settings."""


def digest_of(task: Task) -> str:
    """Of the stream that a run trains on: equal for the same data, template, settings and seed, wherever they lie."""
    digest = hashlib.sha256()
    for index in range(DIGESTED):
        problem = task.train_problem(index)
        digest.update(repr((problem.id, problem.prompt, problem.answer)).encode())
    return digest.hexdigest()


def build_problems(cfg: Config, tokenizer: Tokenizer) -> Task:
    """The run's task. Every prompt and every gold answer of a table is checked here.

    Raises:
        ConfigError: data that cannot be used, by file and row.
    """
    encode = prompt_encoder(tokenizer, cfg.data)
    reading = Reading(
        gold_check(cfg.reward),
        length=lambda prompt: len(encode(prompt)),
        max_prompt=cfg.data.max_prompt,
        drops=cfg.data.too_long == "drop",
    )
    return build_task(cfg.data, cfg.train.seed, reading)
