"""A reward stage behind the policy changes where scores are made, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.config import deepspeed_settings
from megatron_grpo.parallel.groups import Layout, build_groups
from megatron_grpo.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_grpo.training.export import export_policy
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.policy import policy_runtime
from megatron_grpo.training.problems import build_problems
from megatron_grpo.training.resume import Progress
from megatron_grpo.training.reward_stage import scorer_of, serve
from megatron_grpo.training.step import StepRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, timeless, weights_of
from tests.ranks.test_score_model import write_scorer

CPU = torch.device("cpu")
PARTS = {
    "pp2": (Layout(pipeline=2), 1),
    "tp2": (Layout(tensor=2), 0),
    "dp2": (Layout(data=2), 3),
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scorer(tmp_path_factory.mktemp("judge"), vocab_size=64, pad_token_id=3, max_position_embeddings=128)


def train(
    rank: int, world: int, layout: Layout, zero: int, judge: str, folder: Path, reward_stage: bool, dead: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]] | None:
    """Two steps and a validation, saved and loaded in between; ``None`` on the reward stage."""
    cfg = config(
        TINY,
        layout,
        zero,
        parallel={"reward_stage": reward_stage},
        reward={"weights": {f"model:{judge}": 0.5, "exact": 1.0}},
        rollout={"micro_batches": 4, "max_response": 12, "in_flight": 2},
        grpo={"group_size": 4, "prompts_per_step": 4, "minibatches": 1, "dead_groups": dead},
        data={"val_size": 5},
    )
    groups = build_groups(layout, 60.0, reward_stage=reward_stage)
    if groups.is_reward_stage:
        serve(cfg, groups, CPU)
        return None
    tokenizer = load_tokenizer(TINY)
    with (
        policy_runtime(cfg, groups, deepspeed_settings(cfg), CPU) as policy,
        scorer_of(cfg, tokenizer, groups, CPU, policy.ledger) as scorer,
    ):
        runner = StepRunner(cfg, policy, build_problems(cfg, tokenizer), scorer, tokenizer)
        runner.calibrate()
        rows = runner.run(0)
        checkpoints = CheckpointFolder(folder, 2)
        save_checkpoint(cfg, checkpoints, policy, runner, Progress(1, {}))
        latest = checkpoints.resolve("auto", note=lambda text: None)
        assert latest is not None
        load_checkpoint(latest, policy, runner)
        rows += [*runner.run(1), runner.validate()]
        weights = weights_of(policy)
        export_policy(policy, folder / "policy", source=TINY, tokenizer=TINY)
    return rows, weights


@pytest.mark.parametrize(("name", "dead"), [("pp2", "keep"), ("tp2", "keep"), ("dp2", "resample")])
def test_rewards_and_weights_are_those_without_it(name: str, dead: str, judge: Path, tmp_path: Path) -> None:
    """G5 at ZeRO 3 ("dp2"): a reward model is no part of the engine, and whole where it scores. G3 there: replicas that
    draw different numbers of sequences anew still run the same collectives."""
    layout, zero = PARTS[name]
    found: dict[bool, list[Any]] = {}
    for stage in (False, True):
        world = layout.world_size + stage * layout.tensor * layout.data
        arguments = (layout, zero, str(judge), tmp_path / str(stage), stage, dead)
        found[stage] = run_ranks(train, world, *arguments, timeout_s=150.0)
    without, behind = found[False], found[True]
    assert behind[layout.world_size :] == [None] * (layout.tensor * layout.data)
    for (rows, weights), (other_rows, other_weights) in zip(without, behind[: layout.world_size], strict=True):
        hops = [row.pop("boundary/bytes_reward", None) for row in rows + other_rows]
        assert hops[:2] == [0, 0] and all(hop and hop > 0 for hop in hops[3:5])
        assert timeless(rows) == timeless(other_rows)
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
        assert rows[0]["rewards/model:" + judge.name] != 0.0 and rows[0]["reward/std"] > 0.0
        assert rows[0]["time/reward_hidden"] == 0.0
    assert (tmp_path / "True/policy/model.safetensors").read_bytes() == (
        tmp_path / "False/policy/model.safetensors"
    ).read_bytes()
