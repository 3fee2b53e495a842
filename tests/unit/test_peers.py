"""Losses, advantages and importance weights against TRL's own, on the same random tensors.

TRL's methods run on a stand-in for its trainer, which hands them our log-probs in place of a model's. Legend: B
sequences, P prompt, R response.
"""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.config import GrpoConfig
from megatron_grpo.ops.advantages import group_advantages, overlong_penalty, weighted_reward
from megatron_grpo.ops.grpo import aggregate, importance_weight, kl_estimate
from megatron_grpo.training.loss import build_objective

pytestmark = pytest.mark.needs("trl")

B, P, R, GROUP = 12, 3, 9, 4
LENGTHS = [9, 1, 4, 7, 2, 9, 5, 3, 8, 6, 1, 9]


class OneProcess:
    """Accelerate's accelerator of a world of one."""

    device = torch.device("cpu")
    num_processes, process_index = 1, 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def trainer(logp_BR: torch.Tensor, **settings: Any) -> Any:
    """What TRL's methods read of a trainer, at its defaults, with ``settings`` in place of some."""
    args = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=False,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        per_device_train_batch_size=B,
    )
    defaults: dict[str, Any] = {
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": args,
        "accelerator": OneProcess(),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_get_per_token_logps_and_entropies": lambda *a, **k: (logp_BR, torch.zeros_like(logp_BR), None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": R,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    return SimpleNamespace(**(defaults | settings))


@pytest.fixture(name="tensors")
def _tensors() -> dict[str, torch.Tensor]:
    """Log-probs half a nat apart, so that either clip is often in force."""
    generator = torch.Generator().manual_seed(3)
    logp_BR = -3 * torch.rand(B, R, generator=generator)
    shifts = 0.5 * torch.randn(3, B, R, generator=generator)
    return {
        "logp": logp_BR,
        "old": logp_BR + shifts[0],
        "reference": logp_BR + shifts[1],
        "sampler": logp_BR + shifts[0] + 0.3 * shifts[2],
        "advantage": torch.randn(B, generator=generator),
        "mask": (torch.arange(R) < torch.tensor(LENGTHS)[:, None]).long(),
    }


def trl_loss(tensors: dict[str, torch.Tensor], **settings: Any) -> tuple[float, torch.Tensor]:
    """TRL's loss and its gradient at the log-probs."""
    from trl import GRPOTrainer

    logp_BR, mask_BR = tensors["logp"].clone().requires_grad_(), tensors["mask"]
    inputs = {
        "prompt_ids": torch.ones(B, P, dtype=torch.long),
        "prompt_mask": torch.ones(B, P, dtype=torch.long),
        "completion_ids": torch.ones(B, R, dtype=torch.long),
        "completion_mask": mask_BR,
        "advantages": tensors["advantage"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": mask_BR.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer(logp_BR, **settings), None, inputs)
    return loss.item(), torch.autograd.grad(loss, logp_BR)[0]


def our_loss(tensors: dict[str, torch.Tensor], cfg: GrpoConfig, cuts: Sequence[int]) -> tuple[float, torch.Tensor]:
    """The same from our functions, in micro-batches that start at ``cuts``."""
    logp_BR, mask_BR = tensors["logp"].clone().requires_grad_(), tensors["mask"]
    total = torch.zeros(())
    for rows in torch.arange(B).tensor_split(list(cuts)):
        per_token_BR, _ = build_objective(cfg)(
            logp_BR[rows], tensors["old"][rows], tensors["advantage"][rows], mask_BR[rows], weight_BR=None
        )
        if cfg.kl_coef:
            kl_BR = kl_estimate(logp_BR[rows], tensors["reference"][rows], mask_BR[rows], estimator=cfg.kl_estimator)
            per_token_BR = per_token_BR + cfg.kl_coef * kl_BR
        total = total + aggregate(
            per_token_BR, mask_BR[rows], how=cfg.aggregation, tokens=mask_BR.sum(), sequences=B, max_response=R
        )
    return total.item(), torch.autograd.grad(total, logp_BR)[0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
        ({"loss_type": "grpo", "beta": 0.05}, {"aggregation": "sequence_mean", "kl_coef": 0.05}),
        ({"loss_type": "grpo", "delta": 1.5}, {"aggregation": "sequence_mean", "dual_clip": 1.5}),
        ({"loss_type": "dr_grpo"}, {"aggregation": "fixed_length"}),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token_mean", "clip_high": 0.28}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
            {"objective": "gspo", "aggregation": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
        ),
        # TRL's epsilon_high is CISPO's bound itself
        ({"loss_type": "cispo", "epsilon_high": 1.3}, {"objective": "cispo", "clip_high": 0.3}),
    ],
    ids=["grpo", "grpo_kl", "grpo_dual_clip", "dr_grpo", "dapo", "gspo", "cispo"],
)
@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 9)])
def test_losses_and_their_gradients_are_trls(
    tensors: dict[str, torch.Tensor], theirs: dict[str, Any], ours: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    want, want_gradient_BR = trl_loss(tensors, **theirs)
    got, gradient_BR = our_loss(tensors, GrpoConfig(**({"dual_clip": None} | ours)), cuts)
    assert got == pytest.approx(want, abs=1e-6)
    assert want_gradient_BR.abs().max() > 1e-3
    torch.testing.assert_close(gradient_BR, want_gradient_BR, atol=1e-6, rtol=0)


def trl_rollout(tensors: dict[str, torch.Tensor], score_BK: torch.Tensor, **settings: Any) -> dict[str, torch.Tensor]:
    """What TRL makes of sampled sequences with these scores: advantages, importance ratios."""
    from trl import GRPOTrainer

    weights = settings.pop("weights", [1.0] * score_BK.shape[1])
    made = trainer(
        tensors["old"],
        environment_factories=None,
        tools=None,
        environments=None,
        _generate=lambda prompts: (
            [[1] * P] * B,
            [[1] * length for length in LENGTHS],
            None,
            ["text"] * B,
            [row[:length].tolist() for row, length in zip(tensors["sampler"], LENGTHS, strict=True)],
            {},
            None,
            None,
        ),
        pad_to_multiple_of=None,
        num_iterations=1,
        use_vllm=True,
        vllm_importance_sampling_clip_min=settings.pop("floor", None),
        vllm_importance_sampling_clip_max=settings.pop("cap", 2.0),
        _calculate_rewards=lambda *a: score_BK,
        num_generations=GROUP,
        mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.tensor(weights),
        reward_func_names=[f"reward{k}" for k in range(score_BK.shape[1])],
        _logs=defaultdict(lambda: defaultdict(list), prompt=[], completion=[], advantages=[]),
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
        **{"scale_rewards": "group", "vllm_importance_sampling_mode": "token_truncate"} | settings,
    )
    inputs = [{"prompt": "p"}] * B
    result: dict[str, torch.Tensor] = GRPOTrainer._generate_and_score_completions(made, inputs)
    return result


@pytest.mark.parametrize(("scale", "std"), [("group", "sample"), ("none", "none")])
def test_advantages_are_trls(tensors: dict[str, torch.Tensor], scale: str, std: str) -> None:
    """Two weighted rewards; some samples that one of them or both cannot score; a dead group."""
    score_BK = torch.rand(B, 2, generator=torch.Generator().manual_seed(4))
    score_BK[1, 0] = score_BK[2] = score_BK[5] = torch.nan
    score_BK[8:] = 0.5
    want_B = trl_rollout(tensors, score_BK, weights=[1.0, 0.3], scale_rewards=scale)["advantages"]
    reward_B = weighted_reward(score_BK.T, torch.tensor([1.0, 0.3]))
    got_BG = group_advantages(reward_B.view(-1, GROUP), eps=1e-4, std=std)  # type: ignore[arg-type]
    assert want_B.abs().max() > 0.1
    torch.testing.assert_close(got_BG.flatten(), want_B, atol=1e-6, rtol=0)


@pytest.mark.parametrize("how", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_are_trls(tensors: dict[str, torch.Tensor], how: str) -> None:
    bounds: dict[str, Any] = {"floor": 0.8, "cap": 1.2}
    made = trl_rollout(tensors, torch.rand(B, 1), vllm_importance_sampling_mode=how, **bounds)
    # TRL writes padding with the pad token's log-prob of its own and weighs it 1
    mask_BR = tensors["mask"]
    want_BR = made["importance_sampling_ratio"].expand(B, R)
    got_BR = importance_weight(tensors["old"], tensors["sampler"], mask_BR, how=how, **bounds)  # type: ignore[arg-type]
    kept = mask_BR.bool()
    assert len(want_BR[kept].unique()) > 3
    torch.testing.assert_close(got_BR[kept], want_BR[kept], atol=1e-6, rtol=1e-6)


def test_overlong_penalties_are_trls() -> None:
    from trl.rewards import get_soft_overlong_punishment

    want = get_soft_overlong_punishment(100, 20)([[1] * length for length in range(1, 130)])
    got = overlong_penalty(torch.arange(1, 130), limit=100, buffer=20).tolist()
    assert got == pytest.approx(want, abs=1e-6)
