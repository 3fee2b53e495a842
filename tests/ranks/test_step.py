"""Whole steps over ranks: rows, validation, bad gradients, the anchor at delay 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.anchor.merger import Shards
from megatron_grpo.backends.huggingface import load_tokenizer
from megatron_grpo.boundary.crossing import Pass
from megatron_grpo.data.tasks import build_task
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.rewards import NamedReward, Question, Verdict
from megatron_grpo.training.judge import Judge
from megatron_grpo.training.scoring import LocalPlace, Scorer
from megatron_grpo.training.step import StepRunner
from megatron_grpo.training.tick import TickRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, minibatch, policy_of, replay_of, runner_of, timeless, write_model

LOWRANK: dict[str, Any] = {"codec": "lowrank", "rank": 5, "payload": "float32"}


def steps(
    rank: int, world: int, layout: Layout, zero: int, count: int, sections: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Rows of ``count`` steps of the shipped policy, without what clocks say, and a validation after them."""
    cfg = config(TINY, layout, zero, **sections)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        rows = [row for step in range(count) for row in runner.run(step)]
        return timeless(rows), runner.validate()


@pytest.mark.parametrize("layout", [Layout(pipeline=4), Layout(pipeline=2, data=2)], ids=["pp4", "pp2dp2"])
def test_every_rank_holds_the_same_row(layout: Layout) -> None:
    """Case D9: a number that one stage owns reaches all ranks, and no reduction is left to some of them."""
    sections = {
        "boundary": LOWRANK,
        "anchor": {"enabled": True, "cadence": 1, "delay": 1},
        "grpo": {"minibatches": 2, "entropy_coef": 0.01, "kl_coef": 0.01, "prompts_per_step": 4},
        "data": {"val_size": 6},
        "rollout": {"max_response": 12},
    }
    results = run_ranks(steps, 4, layout, 1, 2, sections, timeout_s=120.0)
    assert len(results[0][0]) == 4
    assert all(result == results[0] for result in results)
    assert {"policy/kl", "policy/entropy", "reward/mean", "boundary/q_error_bwd"} <= results[0][0][-1].keys()


def groups(rank: int, world: int, dead_groups: str) -> tuple[list[dict[str, float]], list[list[int]], list[bool]]:
    """Two steps' rows, and the last step's prompts and what of it counts, on two replicas of two stages."""
    sections: dict[str, dict[str, Any]] = {
        "grpo": {"dead_groups": dead_groups, "resample_rounds": 2, "prompts_per_step": 8, "kl_coef": 0.01},
        "rollout": {"max_response": 12},
        "data": {"val_size": 2},
    }
    cfg = config(TINY, Layout(pipeline=2, data=2), 3, **sections)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        seen: list[Batch] = []
        drawn = runner._rollouts.step

        def noted(step: int, *, by_codec: bool) -> Any:
            result = drawn(step, by_codec=by_codec)
            seen.append(result[0])
            return result

        runner._rollouts.step = noted  # type: ignore[method-assign]
        rows = [row for step in range(2) for row in runner.run(step)]
        batch = seen[-1]
        assert batch.counted_B is not None
        return timeless(rows), batch.tokens_BS[:, : batch.prompt_columns].tolist(), batch.counted_B.tolist()


@pytest.mark.slow
def test_dead_groups_are_kept_dropped_or_sampled_anew_on_every_rank_alike() -> None:
    """Cases B6 and B10. No way changes how often a rank meets the others, ZeRO 3's gathering included: the replicas
    differ in how many dead groups they have."""
    results = {way: run_ranks(groups, 4, way, timeout_s=120.0) for way in ("keep", "drop", "resample")}
    for ranks in results.values():
        assert all(rows == ranks[0][0] for rows, _, _ in ranks)
    kept, dropped, anew = (results[way][0][0] for way in ("keep", "drop", "resample"))
    dead = sum(row["reward/zero_std_frac"] for row in kept)
    assert dead > 0 and dropped[0]["reward/zero_std_frac"] == kept[0]["reward/zero_std_frac"]
    assert [row["rollout/resampled_frac"] for row in kept + dropped] == [0.0] * 4
    assert sum(row["rollout/resampled_frac"] for row in anew) > 0
    assert anew[0]["reward/zero_std_frac"] < kept[0]["reward/zero_std_frac"]
    by_replica = [results["resample"][rank] for rank in (0, 1)]
    for _, prompts, counted in by_replica:
        for start in range(0, 16, 4):
            assert prompts[start : start + 4] == [prompts[start]] * 4  # still whole groups of one prompt
            assert len(set(counted[start : start + 4])) == 1
    assert any(not all(counted) for _, _, counted in results["drop"])
    assert all(all(counted) for _, _, counted in results["keep"])


def unscorable(rank: int, world: int) -> tuple[list[dict[str, float]], list[bool]]:
    """A step of two rewards, one of which cannot score every other sample and the other nothing but those."""
    reward = {"weights": {"exact": 2.0, "format": 1.0}, "length_penalty": 0.5}
    cfg = config(TINY, Layout(pipeline=2), 1, reward=reward, data={"val_size": 2})
    count = iter(range(1_000_000))

    def half(response: str, question: Question, finished: bool) -> Verdict:
        return Verdict(None if (number := next(count)) % 2 else float(number % 4 == 0), number % 2 == 0)

    def never(response: str, question: Question, finished: bool) -> Verdict:
        return Verdict(None, True)

    with policy_of(cfg) as policy:
        rules = (NamedReward("exact", 2.0, half), NamedReward("format", 1.0, never))
        tokenizer = load_tokenizer(TINY)
        place = LocalPlace(Judge(("exact", "format"), rules, {}, tokenizer)) if policy.groups.is_last_stage else None
        scorer = Scorer(cfg.reward, place, policy.groups)
        runner = StepRunner(cfg, policy, build_task(cfg.data, 0), scorer, tokenizer)
        batch, _ = runner._rollouts.step(0, by_codec=False)
        assert batch.counted_B is not None
        assert bool((batch.advantages_B[~batch.counted_B] == 0).all())
        return timeless(runner.run(1)), batch.counted_B.tolist()


def test_samples_that_nobody_can_score_are_left_out() -> None:
    results = run_ranks(unscorable, 2)
    for rows, counted in results:
        assert rows == results[0][0]
        assert counted == [True, False] * 4
        (row,) = rows
        assert row["reward/unscored_frac"] == 0.5 and row["reward/parse_fail_frac"] == 0.0
        assert row["rewards/exact"] == 0.5 and "rewards/format" not in row
        # weight 2 on a mean of one half, and half a point off a response of full length
        length = row["rewards/length"]
        assert -0.5 <= length < 0.0
        assert row["reward/mean"] == pytest.approx(1.0 + length, abs=0.1)


def test_fewer_validation_problems_than_replicas_is_no_hang() -> None:
    """Under ZeRO 3 sampling is collective over replicas, whether or not each has a problem of its own."""
    sections = {"data": {"val_size": 1}}
    results = run_ranks(steps, 4, Layout(pipeline=2, data=2), 3, 1, sections, timeout_s=60.0)
    assert all(0.0 <= scores["val/score"] <= 1.0 for _, scores in results)


def test_dense_bootstrap_samples_dense_too() -> None:
    sections = {
        "boundary": LOWRANK,
        "anchor": {"enabled": True, "bootstrap": "dense"},
        "rollout": {"path": "codec", "max_response": 12},
        "data": {"val_size": 2},
    }
    first = run_ranks(steps, 2, Layout(pipeline=2), 0, 1, sections)[0][0][0]
    assert first["rollout/logprob_gap"] < 1e-4
    assert first["boundary/q_error_fwd"] < 1e-6


def defaults(rank: int, world: int, path: str) -> list[dict[str, float]]:
    """Two steps of two ticks with the default boundary."""
    sections: dict[str, dict[str, Any]] = {
        "boundary": {"codec": None, "payload": None},
        "grpo": {"minibatches": 2, "prompts_per_step": 4},
        "rollout": {"path": path, "max_response": 12},
        "data": {"val_size": 2},
    }
    cfg = config(TINY, Layout(pipeline=2), 1, **sections)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        return [row for step in range(2) for row in runner.run(step)]


def test_what_is_sampled_through_the_codec_needs_no_old_logprobs() -> None:
    """Sampler and trainer are one policy, token by token and as whole sequences, before and after a refresh."""
    rows = run_ranks(defaults, 2, "codec")[0]
    assert [row["boundary/bytes_old_logprob"] for row in rows] == [0] * 4
    assert all(row["rollout/logprob_gap"] < 1e-3 for row in rows[1::2])
    assert all(0.1 < row["boundary/q_error_fwd"] < 1.0 for row in rows)
    apart = run_ranks(defaults, 2, "dense")[0]
    assert [row["boundary/bytes_old_logprob"] > 0 for row in apart] == [True, False, True, False]
    assert all(row["rollout/logprob_gap"] > 1e-3 for row in apart[1::2])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def merged_and_dense(rank: int, world: int, model: str, layout: Layout, zero: int) -> tuple[Shards, Shards]:
    """Shards of G on a fire tick of delayed_ef with delay 0, and of the uncompressed gradient of the same minibatch."""
    sections = {
        "boundary": LOWRANK,
        "anchor": {"enabled": True, "cadence": 1, "delay": 0, "beta": 0.0},
        "merger": {"kind": "delayed_ef", "lam": 1.0},
    }
    cfg = config(Path(model), layout, zero, **sections)
    with policy_of(cfg) as policy:
        runner = TickRunner(cfg, policy)
        replay = replay_of(minibatch(), policy, old=False)
        runner._pass(replay, Pass("fast", dense=True))
        dense = [gradient.clone() for gradient in policy.engine.gradients()]
        policy.engine.discard_gradients()
        seen: list[Shards] = []
        runner._update = lambda tick, report: seen.append([g.clone() for g in policy.engine.gradients()])  # type: ignore[method-assign]
        runner.run(1, replay, uncompressed=False)
        return seen[0], dense


@pytest.mark.parametrize("zero", [0, 3])
def test_delayed_ef_without_delay_is_the_dense_gradient(llama: Path, zero: int) -> None:
    for merged, dense in run_ranks(merged_and_dense, 4, str(llama), Layout(pipeline=2, data=2), zero, timeout_s=120.0):
        difference = sum((a - b).square().sum() for a, b in zip(merged, dense, strict=True))
        assert difference.sqrt() < 1e-5 * sum(b.square().sum() for b in dense).sqrt()


def with_bad_ticks(rank: int, world: int, model: str, kind: str) -> tuple[list[dict[str, float]], bool]:
    """Four ticks, the second with a fast gradient that is not finite; what each reported, and whether weights are."""
    sections = {
        "boundary": LOWRANK,
        "anchor": {"enabled": True, "cadence": 1, "delay": 1},
        "merger": {"kind": kind},
    }
    cfg = config(Path(model), Layout(pipeline=2), 1, **sections)
    with policy_of(cfg) as policy:
        runner = TickRunner(cfg, policy)
        values = []
        for tick in range(4):
            policy.boundaries.commit()
            replay = replay_of(minibatch(seed=tick), policy)
            if tick == 1:
                replay.batch.advantages_B[0] = float("inf")
            values.append(runner.run(tick, replay, uncompressed=False).values)
        finite = all(bool(tensor.isfinite().all()) for tensor in policy.engine.weights())
        return values, finite


@pytest.mark.parametrize("kind", ["signed_ema", "delayed_ef"])
def test_a_gradient_that_is_not_finite_costs_one_tick(llama: Path, kind: str) -> None:
    """Its tick is skipped and counted; its replay a tick later teaches neither M nor Q, and training goes on."""
    for values, finite in run_ranks(with_bad_ticks, 2, str(llama), kind):
        assert finite
        assert [row["train/skipped"] for row in values] == [0, 1, 1, 1]
        assert [row.get("anchor/age") for row in values] == [None, 1, 2, 1]
        assert all(torch.isfinite(torch.tensor(row["policy/grad_norm"])) for row in values[2:])
