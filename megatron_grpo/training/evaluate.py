"""Score a policy on the held-out problems of a task."""

from pathlib import Path

from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.backends.reward_models import check_reward_models
from megatron_grpo.config import Config, deepspeed_settings
from megatron_grpo.training.loop import process_group
from megatron_grpo.training.policy import policy_runtime
from megatron_grpo.training.problems import build_problems
from megatron_grpo.training.reward_stage import scorer_of
from megatron_grpo.training.scoring import check_scored
from megatron_grpo.training.step import StepRunner


def evaluate(cfg: Config) -> dict[str, float]:
    """Validation scores of ``cfg.model.path``, greedy and sampled, by the very code that training validates with.

    Collective: every rank of the config's world, which a launcher's environment describes.

    Raises:
        ConfigError: no response has a score.
    """
    with process_group(cfg) as (groups, device):
        tokenizer = load_tokenizer(Path(cfg.tokenizer.path or cfg.model.path))
        check_reward_models(cfg)
        with (
            policy_runtime(cfg, groups, deepspeed_settings(cfg), device) as policy,
            scorer_of(cfg, tokenizer, groups, device, policy.ledger) as scorer,
        ):
            steps = StepRunner(cfg, policy, build_problems(cfg, tokenizer), scorer, tokenizer)
            return check_scored(cfg.reward, steps.validate())
