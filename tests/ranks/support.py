"""What the rank tests share: a tiny random model, a fixed minibatch, and a policy built as a run builds it.

Legend: B sequences, P prompt columns, R response columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.config import Config, deepspeed_settings
from megatron_grpo.parallel.groups import Layout, build_groups
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.judge import build_judge
from megatron_grpo.training.loss import Replay
from megatron_grpo.training.policy import Policy, policy_runtime
from megatron_grpo.training.problems import build_problems
from megatron_grpo.training.scoring import LocalPlace, Scorer
from megatron_grpo.training.step import Row, StepRunner
from tests.models import hf_weights

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/tiny/policy"
VOCAB, HIDDEN, LAYERS = 61, 32, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model(folder: Path, family: str = "llama", *, tied: bool = False, layers: int = LAYERS) -> Path:
    """A random model of ``family`` in Hugging Face layout."""
    torch.manual_seed(11)
    sizes = SIZES | {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
    for parameter in model.parameters():
        # Larger than usual, and norms not at one, so that no error hides in a near-identity.
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def config(path: Path, layout: Layout, zero: int = 0, **sections: dict[str, Any]) -> Config:
    """A config of the tiny model; ``sections`` override."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"path": str(path)},
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
            "timeout_s": 60.0,
        },
        "boundary": {"codec": "identity", "payload": "float32"},
        "anchor": {"enabled": False},
        "merger": {"kind": "none"},
        "grpo": {"group_size": 4, "prompts_per_step": 2, "minibatches": 1},
        "rollout": {"max_response": 6, "path": "dense"},
        "deepspeed": {"config": str(ROOT / f"deepspeed_configs/zero{zero}.json")},
        "train": {"micro_batch": 2, "steps": 3},
    }
    for section, values in sections.items():
        raw[section] = raw.get(section, {}) | values
    return Config.model_validate(raw)


def minibatch(sequences: int = 8, *, seed: int = 3) -> Batch:
    """Random sequences with prompts of 3 to 5 tokens and responses of 2 to 6, and random advantages."""
    generator = torch.Generator().manual_seed(seed)
    columns, response = 5, 6
    tokens = torch.randint(3, VOCAB, (sequences, columns + response), generator=generator)
    prompts = torch.randint(3, columns + 1, (sequences,), generator=generator)
    lengths = torch.randint(2, response + 1, (sequences,), generator=generator)
    lengths[0] = response
    tokens[torch.arange(columns + response) < (columns - prompts)[:, None]] = 0
    tokens[torch.arange(columns + response) >= (columns + lengths)[:, None]] = 0
    return Batch(
        tokens_BS=tokens,
        prompt_columns=columns,
        prompt_lengths_B=prompts,
        response_lengths_B=lengths,
        sampler_logp_BR=-torch.rand(sequences, response, generator=generator) * 4,
        advantages_B=torch.randn(sequences, generator=generator),
    )


def replay_of(batch: Batch, policy: Policy, *, old: bool = True) -> Replay:
    """This replica's equal share of ``batch``; the sampler's log-probs stand in for old ones."""
    groups = policy.groups
    share = len(batch) // groups.layout.data
    start = groups.at.data * share
    mine = batch.split(share)[groups.at.data] if share < len(batch) else batch
    assert len(mine) == share and start + share <= len(batch)
    return Replay(
        mine,
        mine.sampler_logp_BR if old else None,
        None,
        tokens=batch.response_tokens,
        sequences=len(batch),
    )


@contextmanager
def policy_of(cfg: Config) -> Iterator[Policy]:
    """The policy of this rank, in an initialised world."""
    layout = Layout(pipeline=cfg.pipeline_ranks, data=cfg.parallel.data, tensor=cfg.parallel.tensor)
    groups = build_groups(layout, cfg.parallel.timeout_s)
    with policy_runtime(cfg, groups, deepspeed_settings(cfg), torch.device("cpu")) as policy:
        yield policy


def runner_of(cfg: Config, policy: Policy, tokenizer_dir: Path = TINY) -> StepRunner:
    """Whole steps on the task of ``cfg``; random models go with the shipped tokenizer."""
    tokenizer = load_tokenizer(tokenizer_dir)
    place = (
        LocalPlace(build_judge(cfg, tokenizer, policy.groups, policy.device)) if policy.groups.is_last_stage else None
    )
    scorer = Scorer(cfg.reward, place, policy.groups)
    return StepRunner(cfg, policy, build_problems(cfg, tokenizer), scorer, tokenizer)


def timeless(rows: list[Row]) -> list[Row]:
    """Rows without what clocks say."""
    return [
        {key: value for key, value in row.items() if not key.startswith("time/") and "tokens_per_s" not in key}
        for row in rows
    ]


def whole(policy: Policy, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors named like this stage's parameters, as one model's under Hugging Face names; on every rank."""
    place = (policy.groups.at.pipeline, policy.groups.at.tensor)
    gathered: list[Any] = [None] * policy.groups.model.size()
    dist.all_gather_object(gathered, (place, tensors), group=policy.groups.model)
    return hf_weights(dict(gathered), policy.shape, list(policy.stage.split))


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """The whole model's weights under Hugging Face names; on every rank."""
    with policy.engine.whole_parameters():
        mine = {name: tensor.detach().clone() for name, tensor in policy.stage.module.named_parameters()}
    return whole(policy, mine)


def gradients_of(policy: Policy) -> dict[str, torch.Tensor]:
    """The whole model's gradients under Hugging Face names; ZeRO 0 only."""
    return whole(policy, {name: p.grad.clone() for name, p in policy.stage.module.named_parameters()})


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest over tensors of norm(a - b) / norm(b); 1 where only one of them is zero."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, reference in b.items():
        worst = max(worst, ((a[name] - reference).norm() / reference.norm().clamp(min=1e-12)).item())
    return worst
