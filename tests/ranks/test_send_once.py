"""``boundary.send_once``: rows that crossed while a rollout was sampled do not cross again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.conversion.convert import Wish, convert
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.training.checkpoint import load_checkpoint, load_universal, save_checkpoint
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.resume import Progress
from megatron_grpo.training.step import Row, StepRunner
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, policy_of, runner_of, timeless, weights_of
from tests.ranks.test_zero import update_difference

Tensors = dict[str, torch.Tensor]
OFF = {"codec": "identity", "payload": "float32"}
REUSE = OFF | {"send_once": "reuse"}
LONGEST = 20 * 96 * 4
"""Bytes of a sequence: 9 tokens of a prompt, and 11 of a response that are read."""
RESAMPLE = {"dead_groups": "resample", "resample_rounds": 2, "group_size": 2, "prompts_per_step": 8}


def run(
    rank: int, world: int, layout: Layout, steps: int, zero: int, sections: dict[str, Any]
) -> tuple[list[Row], Tensors]:
    """Rows of some steps of the tiny policy, and what they changed of its weights."""
    usual = {
        "grpo": {"group_size": 4, "prompts_per_step": 4},
        "rollout": {"max_response": 12, "path": "dense"},
        "data": {"val_size": 5},
    }
    merged = {name: usual.get(name, {}) | sections.get(name, {}) for name in usual.keys() | sections.keys()}
    cfg = config(TINY, layout, zero, **merged)
    with policy_of(cfg) as policy:
        runner, before = runner_of(cfg, policy), weights_of(policy)
        runner.calibrate()
        rows = [row for step in range(steps) for row in runner.run(step)]
        return timeless(rows), {name: after - before[name] for name, after in weights_of(policy).items()}


@pytest.mark.slow
def test_one_tick_a_step_on_four_stages_trains_as_dense_does() -> None:
    layout, steps = Layout(pipeline=4), 10
    ((off, dense), *_) = run_ranks(run, 4, layout, steps, 1, {"boundary": OFF}, timeout_s=150.0)
    ((rows, update), *_) = run_ranks(run, 4, layout, steps, 1, {"boundary": REUSE}, timeout_s=150.0)
    assert update_difference(update, dense) < 1e-4
    for key in ("reward/mean", "rollout/response_length"):
        assert [row[key] for row in rows] == [row[key] for row in off]
    for row, other in zip(rows, off, strict=True):
        assert row["boundary/bytes_fast_fwd"] == 0 and row["boundary/bytes_old_logprob"] == 0
        assert row["boundary/bytes_fast_bwd"] == other["boundary/bytes_fast_bwd"] > 0
        assert row["boundary/bytes_rollout"] == other["boundary/bytes_rollout"]
        assert row["boundary/bytes_dense_equivalent"] == other["boundary/bytes_dense_equivalent"]
        assert row["boundary/drift"] < 1e-5 and row["rollout/logprob_gap"] < 1e-4


@pytest.mark.parametrize(
    ("layout", "zero", "sections"),
    [
        (Layout(pipeline=2), 0, {"grpo": RESAMPLE | {"minibatches": 2}, "rollout": {"in_flight": 3}}),
        (Layout(pipeline=2, data=2), 3, {"grpo": RESAMPLE | {"minibatches": 2}}),
        (Layout(pipeline=2, tensor=2), 1, {"grpo": {"minibatches": 2}}),
    ],
    ids=["resample", "zero3", "tensor"],
)
def test_every_row_finds_its_own(layout: Layout, zero: int, sections: dict[str, Any]) -> None:
    """At learning rate 0 nothing moves, so what serves must be what would cross, wherever sequences went since."""
    sections = sections | {"boundary": REUSE | sections.get("boundary", {}), "optim": {"lr": 0.0}}
    ((rows, _), *_) = run_ranks(run, layout.world_size, layout, 2, zero, sections, timeout_s=150.0)
    assert all(row["boundary/drift"] < 1e-5 for row in rows)
    assert all(row["boundary/bytes_fast_fwd"] == row["boundary/bytes_old_logprob"] == 0 for row in rows)
    if "dead_groups" in sections.get("grpo", {}):
        assert sum(row.get("rollout/resampled_frac", 0.0) for row in rows) > 0


@pytest.mark.slow
def test_rows_that_crossed_coded_serve_as_they_were_decoded() -> None:
    """Trainer and sampler are one policy, whatever the codec does to it, and the forward codec is paid for once."""
    boundary = REUSE | {"codec": "lowrank", "payload": "bfloat16", "rank": 24}
    sections = {"boundary": boundary, "rollout": {"path": "codec"}, "grpo": {"minibatches": 2}}
    ((rows, _), *_) = run_ranks(run, 2, Layout(pipeline=2), 3, 1, sections, timeout_s=150.0)
    for row in rows:
        assert row["boundary/bytes_fast_fwd"] == row["boundary/bytes_old_logprob"] == 0
        assert row["boundary/q_error_fwd"] > 0.01 and "boundary/drift" not in row
        assert row.get("rollout/logprob_gap", 0.0) < 1e-4


def rows_held(rank: int, world: int, layout: Layout, sections: dict[str, Any]) -> tuple[int, float, float]:
    """Rows that this end of the boundary holds after a step; rows of its ticks, of all replicas; what was resampled."""
    cfg = config(TINY, layout, 1, **sections)
    with policy_of(cfg) as policy:
        ticks = runner_of(cfg, policy).run(0)
        held = policy.boundaries.crossings[0].caches[0].state_dict()["rows"]
        rows = sum(row["boundary/bytes_dense_equivalent"] for row in ticks) / (2 * 2 * 96)
        return len(held), rows, ticks[-1]["rollout/resampled_frac"]


def test_what_is_drawn_and_not_trained_on_is_not_held() -> None:
    """Of groups that were replaced, and of those that a replica draws to keep another one company."""
    layout = Layout(pipeline=2, data=2)
    sections = {"boundary": REUSE, "grpo": RESAMPLE, "rollout": {"max_response": 12}, "train": {"micro_batch": 4}}
    results = run_ranks(rows_held, 4, layout, sections, timeout_s=120.0)
    first, second = ([held for held, *_ in results[2 * stage : 2 * stage + 2]] for stage in (0, 1))
    _, rows, resampled = results[0]
    assert resampled > 0
    assert first == second and sum(first) == rows


def test_coded_rows_serve_no_dense_pass() -> None:
    """Anchor, dense ticks and the dense bootstrap send their rows as they do without a cache, and bases learn from
    them; at learning rate 0, so that rows which serve are those that would cross."""
    lowrank = {"codec": "lowrank", "payload": "float32", "rank": 8, "basis": "anchor", "dense_every": 3}
    sections: dict[str, Any] = {
        "anchor": {"enabled": True, "cadence": 2, "delay": 1, "bootstrap": "dense"},
        "grpo": {"minibatches": 2},
        "rollout": {"path": "auto", "gap_limit": 1e9},
        "optim": {"lr": 0.0},
    }
    found = {}
    for mode in ("off", "reuse"):
        boundary = {"boundary": lowrank | {"send_once": mode}}
        ((found[mode], _), *_) = run_ranks(run, 2, Layout(pipeline=2), 4, 1, sections | boundary, timeout_s=120.0)
    assert any(row["boundary/bytes_anchor"] for row in found["reuse"])
    assert any(row["boundary/bytes_old_logprob"] for row in found["reuse"])
    for row, other in zip(found["reuse"], found["off"], strict=True):
        for kind in ("anchor", "old_logprob", "basis", "fast_bwd", "rollout"):
            assert row[f"boundary/bytes_{kind}"] == other[f"boundary/bytes_{kind}"]
        assert row["boundary/q_error_fwd"] == pytest.approx(other["boundary/q_error_fwd"], rel=1e-3, abs=1e-6)
        dense = row["tick"] < 2 or row["tick"] % 3 == 0
        assert row["boundary/bytes_fast_fwd"] == (other["boundary/bytes_fast_fwd"] if dense else 0)
        assert (row["boundary/q_error_fwd"] < 1e-5) == dense
        assert row["policy/clip_frac"] == 0


def test_a_compressed_tensor_link_parts_trainer_and_sampler() -> None:
    """Sampled uncompressed: kept rows serve, old log-probs are the trainer's, and nothing clips where nothing moved."""
    link = REUSE | {"links": ["pipeline", "tensor"], "tensor_rank": 12, "calibration": 16}
    sections = {"boundary": link, "grpo": {"minibatches": 2}, "optim": {"lr": 0.0}}
    layout = Layout(pipeline=2, tensor=2)
    ((rows, _), *_) = run_ranks(run, 4, layout, 1, 1, sections, timeout_s=120.0)
    for row in rows:
        assert row["boundary/bytes_fast_fwd"] == row["boundary/bytes_old_logprob"] == 0
        assert row["policy/clip_frac"] == 0
    assert rows[-1]["rollout/logprob_gap"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_does_not_fit_crosses_again(place: str) -> None:
    """With room for about half: the other sequences cross whole, dense as they did when they were sampled."""
    part = REUSE | {"cache_place": place, "cache_gib": 40_000 / 2**30}
    ((whole, dense), *_) = run_ranks(run, 2, Layout(pipeline=2), 3, 1, {"boundary": REUSE}, timeout_s=120.0)
    ((rows, update), *_) = run_ranks(run, 2, Layout(pipeline=2), 3, 1, {"boundary": part}, timeout_s=120.0)
    assert update_difference(update, dense) < 1e-4
    for row, other in zip(rows, whole, strict=True):
        # float32 rows: twice the bfloat16 of the dense equivalent
        forward = row["boundary/bytes_dense_equivalent"]
        assert forward - 40_000 <= row["boundary/bytes_fast_fwd"] < forward - 40_000 + LONGEST
        assert row["boundary/bytes_fast_fwd"] > 0 and other["boundary/bytes_fast_fwd"] == 0


def test_a_delta_brings_what_has_moved() -> None:
    """Four ticks a step at a high rate: with the difference at full budget, little of the drift is left."""
    found = {}
    for mode in ("reuse", "delta"):
        boundary = OFF | {"send_once": mode}
        if mode == "delta":
            boundary |= {"delta_tolerance": 0.0, "delta_budget": 0.5}
        sections = {"boundary": boundary, "grpo": {"minibatches": 4}, "optim": {"lr": 3e-4, "warmup_ticks": 0}}
        ((found[mode], _), *_) = run_ranks(run, 2, Layout(pipeline=2), 2, 1, sections, timeout_s=120.0)
    reused, moved = (rows[-1] for rows in found.values())
    assert reused["boundary/drift"] == reused["boundary/q_error_fwd"] > 1e-3
    assert reused["boundary/bytes_fast_fwd"] == 0
    assert moved["boundary/q_error_fwd"] < 0.1 * moved["boundary/drift"]
    assert 0 < moved["boundary/bytes_fast_fwd"] <= 0.26 * moved["boundary/bytes_dense_equivalent"]


def test_one_process_is_the_ranks() -> None:
    sections = {"boundary": REUSE, "grpo": {"minibatches": 2}}
    ((rows, update), *_) = run_ranks(run, 2, Layout(pipeline=2), 2, 0, sections, timeout_s=120.0)
    together = sections | {"parallel": {"placement": "one_process"}}
    ((alone, same),) = run_ranks(run, 1, Layout(pipeline=2), 2, 0, together, timeout_s=120.0)
    assert update_difference(same, update) < 1e-4
    for row, other in zip(alone, rows, strict=True):
        assert {k: v for k, v in row.items() if "bytes" in k} == {k: v for k, v in other.items() if "bytes" in k}


ANCHOR_DELAY = 3
ANCHORED = {
    "boundary": REUSE | {"basis": "anchor"},
    "anchor": {"enabled": True, "cadence": 2, "delay": ANCHOR_DELAY},
    "merger": {"kind": "signed_ema", "alpha": 0.5},
    "grpo": {"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
    "rollout": {"max_response": 12, "path": "dense"},
    "data": {"val_size": 5},
}


def steps_3_and_4(policy: Policy, runner: StepRunner) -> tuple[list[Row], Tensors]:
    """Their rows, and what they changed of the weights."""
    before = weights_of(policy)
    rows = timeless([row for step in (2, 3) for row in runner.run(step)])
    return rows, {name: after - before[name] for name, after in weights_of(policy).items()}


def resumed(rank: int, world: int, folder: str) -> tuple[list[Row], list[tuple[list[Row], Tensors]]]:
    """Steps 1 and 2; then the other two, uninterrupted and from a checkpoint before them."""
    cfg = config(TINY, Layout(pipeline=2), 1, **ANCHORED)
    checkpoints, results = CheckpointFolder(Path(folder), 1), []
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        first = [row for step in range(2) for row in runner.run(step)]
        save_checkpoint(cfg, checkpoints, policy, runner, Progress(2, {}))
        results.append(steps_3_and_4(policy, runner))
    (saved,) = (path for path in Path(folder).iterdir() if path.is_dir())
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        load_checkpoint(saved, policy, runner)
        results.append(steps_3_and_4(policy, runner))
    return first, results


def converted(rank: int, world: int, universal: str) -> tuple[list[str], list[Row], Tensors]:
    """What a universal checkpoint lost, and the other two steps from there."""
    cfg = config(TINY, Layout(pipeline=2), 1, **ANCHORED)
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        lost = load_universal(cfg, Path(universal), policy, runner)
        return lost, *steps_3_and_4(policy, runner)


@pytest.mark.slow
def test_an_anchor_sends_gradients_alone_and_resumes(tmp_path: Path) -> None:
    """Exactly from a checkpoint of its own; a universal one has no rows, so those that an anchor replays cross."""
    run_folder, universal = tmp_path / "run", tmp_path / "universal"
    results = run_ranks(resumed, 2, str(run_folder), timeout_s=120.0)
    for _, ((rows, update), (again, same)) in results:
        assert again == rows
        assert all(torch.equal(same[name], update[name]) for name in update)
    first, ((rows, update), _) = results[0]
    dense = {row["tick"]: row["boundary/bytes_dense_equivalent"] for row in [*first, *rows]}
    fired = [row for row in rows if row["anchor/fired"]]
    assert [row["tick"] for row in fired] == [4, 6]
    for row in fired:
        # float32 backward alone is as much as bfloat16 in both directions
        assert row["boundary/bytes_anchor"] == dense[row["tick"] - ANCHOR_DELAY]
        assert row["boundary/bytes_fast_fwd"] == 0

    (checkpoint,) = run_folder.glob("tick*")
    wish = Wish(to="deepspeed-universal")
    convert(checkpoint, universal, wish, note=lambda text: None, progress=lambda done, total: None)
    ((lost, others, near), *_) = run_ranks(converted, 2, str(universal), timeout_s=120.0)
    assert any("rows kept of earlier rollouts are not in it" in sentence for sentence in lost)
    assert [row["reward/mean"] for row in others if "reward/mean" in row] == [
        row["reward/mean"] for row in rows if "reward/mean" in row
    ]
    for row in (row for row in others if row["anchor/fired"]):
        assert row["boundary/bytes_anchor"] == 2 * dense[row["tick"] - ANCHOR_DELAY]
    assert update_difference(near, update) < 1e-1


@pytest.mark.slow
def test_decoding_and_training_agree_in_bfloat16_too() -> None:
    """What they round differently: rows at most by a bit or two of eight, log-probs by hundredths."""
    sections = {"boundary": {"codec": "identity", "send_once": "reuse"}, "model": {"dtype": "bfloat16"}}
    ((rows, _), *_) = run_ranks(run, 2, Layout(pipeline=2), 3, 1, sections, timeout_s=120.0)
    for row in rows:
        assert 0 < row["boundary/drift"] < 2**-7
        assert 0 < row["rollout/logprob_gap"] < 0.03
