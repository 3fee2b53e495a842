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


def digest_of(task: Task, tokenizer: Tokenizer, data: DataConfig) -> str:
    """Of what a run trains on: equal for the same problems in the same order, put to the policy in the same way."""
    prompt = prompt_encoder(tokenizer, data)(task.train_problem(0).prompt)
    return hashlib.sha256(f"{task.fingerprint()} {prompt}".encode()).hexdigest()


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
