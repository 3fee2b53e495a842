"""Checks of the reward models that a config names. Reads config files, tokenizers and the headers of weights."""

from pathlib import Path

from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.config import Config, ConfigError
from megatron_grpo.conversion.families import scorer_shape
from megatron_grpo.conversion.names import check_tensor_size
from megatron_grpo.conversion.reader import hf_source, read_hf_config

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_reward_models(cfg: Config) -> None:
    """Refuse a reward model that cannot score what the policy of ``cfg`` samples.

    Raises:
        ConfigError: it is no sequence classifier with one label, its files do not fit it, the tensor ranks cannot cut
            it, it has too few positions, or it reads other tokens than the policy writes.
    """
    for kind, directory in cfg.reward.models.items():
        try:
            _check(cfg, directory)
        except ConfigError as error:
            raise ConfigError(f"reward.kind={kind}: {error}") from error


def _check(cfg: Config, directory: Path) -> None:
    shape = scorer_shape(read_hf_config(directory))
    check_tensor_size(shape, cfg.parallel.tensor)
    with hf_source(directory, shape):
        pass
    longest = cfg.data.max_prompt + cfg.rollout.max_response
    if longest > shape.max_positions:
        raise ConfigError(
            f"has {shape.max_positions} positions, and data.max_prompt and rollout.max_response make {longest} "
            f"tokens; use at most {shape.max_positions} for both together"
        )
    policy = load_tokenizer(Path(cfg.tokenizer.path or cfg.model.path))
    if policy.size > shape.vocab:
        raise ConfigError(
            f"has a vocabulary of {shape.vocab} and the policy's tokenizer has {policy.size} tokens; "
            "use a reward model that was trained with the policy's tokenizer"
        )
    if any((directory / name).is_file() for name in TOKENIZERS):
        own = load_tokenizer(directory)
        differing = sorted(token for token, _ in own.vocabulary.items() ^ policy.vocabulary.items())
        if differing:
            raise ConfigError(
                f"its tokenizer is not the policy's (token {differing[0]!r} differs, {len(differing)} in all), and it "
                "would read other words than were written; use a reward model that was trained with the policy's"
            )
