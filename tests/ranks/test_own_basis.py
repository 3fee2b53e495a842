"""``boundary.basis=self``: what senders fit, how it crosses, when it comes into force; and what else goes by steps.

Dense ticks without an anchor (``boundary.dense_every``) and the sampler's choice of path (``rollout.path=auto``) too.
Legend: N rows, H hidden, r rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_grpo.boundary.basis import Basis
from megatron_grpo.boundary.codec import Encoded
from megatron_grpo.boundary.crossing import Crossing, Pass
from megatron_grpo.config import Config, Direction
from megatron_grpo.ops.rows import Rows
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.parallel.link import DIRECTIONS, Link
from megatron_grpo.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_grpo.training.files import CheckpointFolder
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.resume import Progress
from megatron_grpo.training.step import Row, StepRunner, gap_due, refresh_due
from tests.harness import run_ranks
from tests.ranks.support import TINY, config, policy_of, runner_of, timeless, weights_of
from tests.ranks.test_wire import wiretap

H, R = 96, 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {"pp2": Layout(pipeline=2), "pp4": Layout(pipeline=4), "pp2dp2": Layout(pipeline=2, data=2)}
BASE: dict[str, Any] = {
    "grpo": {"group_size": 4, "prompts_per_step": 4, "minibatches": 2},
    "rollout": {"max_response": 12},
    "train": {"micro_batch": 4},
    "data": {"val_size": 4},
}
SELF: dict[str, Any] = {"codec": "lowrank", "rank": R, "basis": "self", "refresh_steps": 2, "calibration": 32}

Flats = dict[str, torch.Tensor]


def config_of(layout: Layout, **sections: dict[str, Any]) -> Config:
    merged = BASE | {name: BASE.get(name, {}) | values for name, values in sections.items()}
    return config(TINY, layout, 1, **merged)


@dataclass
class Sent:
    """Rows that this rank sent in one pass after another."""

    calls: list[tuple[int, Direction, Pass, torch.Tensor]] = field(default_factory=list)
    flats: list[Flats] = field(default_factory=list)

    def gram(self, name: str, *, both: bool, dtype: torch.dtype) -> torch.Tensor:
        """Sum of X^T X, fp64, of what ``name`` sent, as ``dtype``, where both ends or the sender learned from it."""
        parts = [
            x.to(dtype).double()
            for index, way, plan, x in self.calls
            if f"{index} {way}" == name and (plan.teaches_both(way) if both else plan.observe == "sender")
        ]
        return sum((x.T @ x for x in parts), torch.zeros(H, H, dtype=torch.float64))

    def bytes(self, kind: str, dense: int, coded: int) -> int:
        """rows x bytes of one, of every pass of ``kind``."""
        calls = [(way, plan, x) for _, way, plan, x in self.calls if plan.kind == kind]
        return sum(len(x) * (dense if plan.dense_in(way) else coded) for way, plan, x in calls)


@contextmanager
def recording(policy: Policy) -> Iterator[Sent]:
    """What the senders here put in, and at each moment what is staged or else in use."""
    sent, encode = Sent(), Crossing.encode

    def spied(self: Crossing, direction: Direction, x_NH: torch.Tensor, rows: Rows, plan: Pass) -> Encoded:
        sent.calls.append((self.codecs.index, direction, plan, x_NH.detach().clone()))
        sent.flats.append(flats_of(policy))
        return encode(self, direction, x_NH, rows, plan)

    with mock.patch.object(Crossing, "encode", spied):
        yield sent


def flats_of(policy: Policy) -> Flats:
    return {
        f"{index} {way}": learner.flat().clone()
        for index, crossing in policy.boundaries.crossings.items()
        for way, learner in crossing.codecs.learners()
    }


def in_use(policy: Policy) -> Flats:
    """The Q that codes now, whatever is staged."""
    found = {}
    for index, crossing in policy.boundaries.crossings.items():
        for way, learner in crossing.codecs.learners():
            assert isinstance(learner, Basis)
            found[f"{index} {way}"] = learner.current
    return found


def same(a: Flats, b: Flats) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def basis_bytes(policy: Policy, link: Link) -> int:
    """What the ledger holds as basis, not yet taken."""
    return sum(policy.ledger.sent(link, "basis", way) for way in DIRECTIONS)


@dataclass(frozen=True)
class Fit:
    """One fit as one rank saw it: learners before and after, sums of X^T X that this rank sent, bytes."""

    before: Flats
    after: Flats
    grams: Flats
    wire: int
    ledger: int
    reduced: int
    expected: int
    quiet: bool = True


def calibrated(policy: Policy, runner: StepRunner, dtype: torch.dtype) -> Fit:
    before = flats_of(policy)
    with wiretap() as wire, recording(policy) as sent:
        runner.calibrate()
    ids = sum(tensor.nbytes for _, tensor in wire.messages if tensor.dtype == torch.int32)
    learners = len(before)
    return Fit(
        before=before,
        after=flats_of(policy),
        grams={name: sent.gram(name, both=True, dtype=dtype) for name in before},
        wire=wire.bytes(forward=True) + wire.bytes(forward=False),
        ledger=basis_bytes(policy, "pipeline"),
        reduced=basis_bytes(policy, "data"),
        # each end sends 8 bytes a learner; rows cross as they are but for the measurement of the gap and the forward
        # rows of the pass that brings back gradients
        expected=sent.bytes("basis", H * dtype.itemsize, R * dtype.itemsize) + ids + 8 * learners,
    )


def stepped(policy: Policy, runner: StepRunner, step: int) -> Fit:
    """One step with a refresh at its end. ``quiet``: nothing was staged, nor any Q changed, before its end."""
    refresh, bytes_of, at_the_end = policy.link.refresh_from_sender, dict[str, int](), []

    def tapped(dp_group: Any) -> None:
        at_the_end.append(flats_of(policy))
        policy.ledger.take()
        with wiretap() as wire:
            refresh(dp_group)
        bytes_of["wire"] = wire.bytes(forward=True) + wire.bytes(forward=False)
        bytes_of["ledger"], bytes_of["reduced"] = basis_bytes(policy, "pipeline"), basis_bytes(policy, "data")

    policy.boundaries.commit()
    before = flats_of(policy)
    with recording(policy) as sent, mock.patch.object(policy.link, "refresh_from_sender", tapped):
        runner.run(step)
    sends = {f"{index} {way}" for index, way, _, _ in sent.calls}
    still = all(torch.equal(q, before[name][:H].float()) for name, q in in_use(policy).items())
    return Fit(
        before=before,
        after=flats_of(policy),
        grams={name: sent.gram(name, both=False, dtype=torch.float32) for name in before},
        **bytes_of,
        expected=sum((H + 1) * R * before[name].itemsize for name in sends),
        quiet=still and all(same(flats, before) for flats in sent.flats + at_the_end),
    )


def fits(rank: int, world: int, layout: Layout, payload: str) -> list[Fit]:
    """The calibration, and twice a step that does not end with a refresh and one that does; the former is left out."""
    cfg = config_of(layout, boundary=SELF | {"payload": payload}, rollout={"path": "auto"})
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        found = [calibrated(policy, runner, DTYPES[payload])]
        for step in (0, 2):
            runner.run(step)
            assert same(flats_of(policy), found[-1].after)
            found.append(stepped(policy, runner, step + 1))
        return found


@pytest.fixture(scope="module", params=["pp2 float32", "pp2 bfloat16", "pp4 bfloat16", "pp2dp2 bfloat16"])
def case(request: pytest.FixtureRequest) -> tuple[Layout, str]:
    name, payload = request.param.split()
    return LAYOUTS[name], payload


@pytest.fixture(scope="module")
def layout(case: tuple[Layout, str]) -> Layout:
    return case[0]


@pytest.fixture(scope="module")
def payload(case: tuple[Layout, str]) -> str:
    return case[1]


@pytest.fixture(scope="module")
def ranks(layout: Layout, payload: str) -> list[list[Fit]]:
    return run_ranks(fits, layout.world_size, layout, payload, timeout_s=180.0)


def power_step(gram: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """orth(X^T X Q) in fp64, column by column, and under it the root of each column's energy over the largest."""
    sketch = gram @ q.double()
    columns: list[torch.Tensor] = []
    for column in sketch.unbind(1):
        for _ in range(2):
            for earlier in columns:
                column = column - (earlier @ column) * earlier
        columns.append(column / column.norm())
    basis = torch.stack(columns, 1)
    spread = (basis * sketch).sum(0).sqrt()
    return torch.cat([basis, spread[None] / spread.max()])


def test_both_ends_of_every_replica_hold_equal_bits(ranks: list[list[Fit]], layout: Layout) -> None:
    for fit in zip(*ranks, strict=True):
        held: dict[str, list[torch.Tensor]] = {}
        for rank in fit:
            for name, flat in rank.after.items():
                held.setdefault(name, []).append(flat)
        assert len(held) == 2 * (layout.pipeline - 1)
        for flats in held.values():
            assert len(flats) == 2 * layout.data
            assert all(torch.equal(flat, flats[0]) for flat in flats)


def test_the_basis_is_one_power_step_on_the_senders_rows_of_all_replicas(ranks: list[list[Fit]], payload: str) -> None:
    """Rounded to the payload's format once, at the end; the first fit starts from a random Q, others from the last."""
    half_unit = {"float32": 0.0, "bfloat16": 2.0**-8}[payload]
    for fit in zip(*ranks, strict=True):
        for name in {name for rank in fit for name in rank.after}:
            holders = [rank for rank in fit if name in rank.after]
            before, after = holders[0].before[name], holders[0].after[name]
            assert after.dtype == DTYPES[payload] and after.shape == (H + 1, R)
            gram = torch.stack([rank.grams[name] for rank in holders]).sum(0)
            assert gram.any()
            torch.testing.assert_close(after.double(), power_step(gram, before[:H]), atol=5e-4, rtol=half_unit)
            assert not torch.allclose(after.float(), before.float(), atol=1e-2)


def test_what_counts_as_basis_is_what_the_transport_was_handed(ranks: list[list[Fit]], layout: Layout) -> None:
    for place, found in enumerate(ranks):
        stage = layout.coordinates(place).pipeline
        ends = [end for end in (stage > 0, stage < layout.pipeline - 1) if end]
        for number, fit in enumerate(found):
            assert fit.ledger == fit.wire == fit.expected > 0
            # fp32 sums over replicas: of both directions where both ends see the rows, else of what is sent from here
            learners = 2 * len(ends) if number == 0 else len(ends)
            assert fit.reduced == (learners * H * R * 4 if layout.data > 1 else 0)


def test_refreshes_are_due_early_and_then_at_every_multiple() -> None:
    def due(every: int) -> list[int]:
        return [steps for steps in range(1, 41) if refresh_due(steps, every)]

    assert due(16) == [2, 4, 8, 16, 32]
    assert due(10) == [2, 4, 8, 10, 20, 30, 40]
    assert due(2) == list(range(2, 41, 2))
    assert due(1) == list(range(1, 41))


def test_nothing_changes_before_the_step_ends(ranks: list[list[Fit]]) -> None:
    assert all(fit.quiet for found in ranks for fit in found)


def resumed(rank: int, world: int, folder: str, sections: dict[str, Any]) -> list[tuple[list[Row], Flats]]:
    """The third and fourth step: uninterrupted, and of another policy that read the checkpoint before them."""
    cfg = config_of(Layout(pipeline=2), boundary=SELF | sections, rollout={"path": "auto", "gap_limit": 5.0})
    checkpoints, results = CheckpointFolder(Path(folder), 1), []
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        for step in range(2):
            runner.run(step)
        save_checkpoint(cfg, checkpoints, policy, runner, Progress(2, {}))
        results.append(two_more(policy, runner))
    (saved,) = (path for path in Path(folder).iterdir() if path.is_dir())
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        load_checkpoint(saved, policy, runner)
        results.append(two_more(policy, runner))
    return results


def two_more(policy: Policy, runner: StepRunner) -> tuple[list[Row], Flats]:
    rows = timeless([row for step in (2, 3) for row in runner.run(step)])
    return rows, weights_of(policy) | flats_of(policy)


@pytest.mark.parametrize(
    "sections",
    [
        # half of the numbers: fewer, and no sample through the codec would be right, nor any gradient other than zero
        {"payload": "bfloat16", "error_feedback": True, "rank": H // 2},
        # the sender's metric, which does not cross, and what it was fitted on
        {"codec": None, "payload": None, "forward_budget": 0.5, "backward_budget": 0.3},
    ],
    ids=["lowrank", "default"],
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, sections: dict[str, Any]) -> None:
    """With a basis staged and not yet in force, lost remainders, and a gap that decides how the next step samples."""
    for (rows, state), (again, same_state) in run_ranks(resumed, 2, str(tmp_path), sections, timeout_s=120.0):
        # the refresh of step 1 is counted with the first row after it, which the resumed run has not sent
        for row in (rows[0], again[0]):
            del row["boundary/bytes_basis"]
        assert again == rows
        assert same(same_state, state)
        assert all(row["policy/grad_norm"] > 0 for row in rows)


def measured(rank: int, world: int) -> tuple[bool, float]:
    """Groups of 6 in micro-batches of 4: whether calibrating left nothing, and by how much step 2 moved the gap."""
    cfg = config_of(
        Layout(pipeline=2),
        boundary={"codec": None, "payload": None, "forward_budget": 0.5, "backward_budget": 0.3, "calibration": 8},
        grpo={"group_size": 6, "prompts_per_step": 4, "minibatches": 2},
        train={"micro_batch": 4},
        rollout={"path": "auto", "gap_limit": 5.0},
    )
    with policy_of(cfg) as policy:
        runner = runner_of(cfg, policy)
        runner.calibrate()
        lost = [crossing.codecs.backward.state_dict()["lost"] for crossing in policy.boundaries.crossings.values()]
        for step in (0, 1):
            runner.run(step)
        gap = runner.state_dict()["gap"]
        runner.run(2)
        return lost == [None], abs(runner.state_dict()["gap"] - gap)


def test_gap_is_measured_in_whole_groups_and_micro_batches() -> None:
    """And calibrating leaves no remainder of gradients that are never stepped."""
    for nothing_left, moved in run_ranks(measured, 2, timeout_s=120.0):
        assert nothing_left and moved > 0


def test_gap_is_due_once_a_basis_has_been_refreshed() -> None:
    assert [step for step in range(40) if gap_due(step, 16)] == [2, 16, 32]
    assert [step for step in range(5) if gap_due(step, 1)] == [1, 2, 3, 4]


@dataclass(frozen=True)
class Densely:
    """Three steps of two ticks, every third tick dense.

    What is staged and what codes: before the first step and after each. ``grams``: X^T X of the rows of tick 0.
    """

    rows: list[Row]
    staged: list[Flats]
    coding: list[Flats]
    grams: Flats


def densely(rank: int, world: int, boundary: dict[str, Any]) -> Densely:
    cfg = config_of(Layout(pipeline=2), boundary={"codec": "lowrank", "rank": R, "dense_every": 3} | boundary)
    with policy_of(cfg) as policy:
        runner, rows = runner_of(cfg, policy), []
        staged, coding = [flats_of(policy)], [in_use(policy)]
        for step in range(3):
            with recording(policy) as sent:
                rows += runner.run(step)
            staged.append(flats_of(policy))
            coding.append(in_use(policy))
            if step == 0:
                grams = {name: sent.gram(name, both=True, dtype=torch.bfloat16) for name in staged[0]}
        return Densely(rows, staged, coding, grams)


def test_dense_ticks_without_an_anchor_teach_the_basis() -> None:
    """Ticks 0 and 3 cross uncompressed, forward, backward and in their old log-probs; both ends learn from them."""
    first, last = run_ranks(densely, 2, {"payload": "bfloat16", "basis": "anchor"}, timeout_s=120.0)
    for row in first.rows:
        dense, old = row["tick"] % 3 == 0, row["boundary/bytes_old_logprob"]
        whole = row["boundary/bytes_dense_equivalent"]
        assert row["boundary/bytes_fast"] == (whole if dense else whole * R / H)
        assert row["boundary/bytes_basis"] == (2 * 2 * 8 if dense else 0)
        assert (row["boundary/q_error_fwd"] < 5e-3) == dense
        if row["tick"] % 2 == 0:  # a step's first tick needs no old log-probs: what crossed before it is the second's
            second = first.rows[int(row["tick"]) + 1]
            assert old == second["boundary/bytes_dense_equivalent"] / 2 * (1 if second["tick"] == 3 else R / H)
    for name, way in (("0 forward", 0), ("0 backward", 1)):
        for mine, theirs in zip(first.staged + first.coding, last.staged + last.coding, strict=True):
            assert torch.equal(mine[name], theirs[name])
        random, learned, again, kept = (flats[name] for flats in first.staged)
        expected = power_step((first, last)[way].grams[name], random[:H])
        torch.testing.assert_close(learned.double(), expected, atol=5e-4, rtol=0)
        assert not torch.equal(again, learned) and torch.equal(kept, again)
        # in force from the next step on
        for staged, coding in zip((random, random, learned, again), first.coding, strict=True):
            assert torch.equal(coding[name], staged[:H])


def test_dense_ticks_leave_a_random_basis_alone() -> None:
    found = run_ranks(densely, 2, {"payload": "bfloat16", "basis": "random"}, timeout_s=120.0)[0]
    assert all(same(flats, found.staged[0]) for flats in found.staged)
    assert [row["boundary/bytes_basis"] for row in found.rows] == [0] * 6
    assert [row["boundary/q_error_fwd"] < 5e-3 for row in found.rows] == [True, False, False, True, False, False]


def paths(rank: int, world: int, layout: Layout, arms: list[dict[str, Any]]) -> list[tuple[set[bool], Any, float]]:
    """Of each arm: whether the second step sampled dense, the gap measured in it, and the metric of its samples."""
    found = []
    for arm in arms:
        boundary = {"payload": "float32", "basis": "random", "refresh_steps": 1, "calibration": 8} | arm["boundary"]
        cfg = config_of(
            layout,
            boundary=boundary,
            # one group on each replica: all of a step is what the gap is measured on
            grpo={"minibatches": 1, "prompts_per_step": layout.data},
            train={"micro_batch": 4},
            rollout={"path": "auto"} | arm.get("rollout", {}),
        )
        with policy_of(cfg) as policy:
            runner = runner_of(cfg, policy)
            runner.calibrate()
            runner.run(0)
            with recording(policy) as sent:
                (row,) = runner.run(1)
            dense = {plan.dense for _, _, plan, _ in sent.calls if plan.kind == "rollout"}
            found.append((dense, runner.state_dict()["gap"], row["rollout/logprob_gap"]))
    return found


@pytest.mark.parametrize("name", ["pp2", pytest.param("pp2dp2", marks=pytest.mark.slow)])
def test_auto_samples_through_the_codec_where_the_gap_is_small(name: str) -> None:
    layout = LAYOUTS[name]
    arms: list[dict[str, Any]] = [
        {"boundary": {"codec": "identity"}},
        {"boundary": {"codec": "lowrank", "rank": H}},
        {"boundary": {"codec": "lowrank", "rank": R}},
        {"boundary": {"codec": "lowrank", "rank": R, "basis": "self"}, "rollout": {"gap_limit": 50.0}},
    ]
    results = run_ranks(paths, layout.world_size, layout, arms, timeout_s=180.0)
    senders = [result for rank, result in enumerate(results) if layout.coordinates(rank).pipeline == 0]
    for identity, full, poor, allowed in senders:
        assert full[0] == allowed[0] == {False}
        assert poor[0] == {True}
        assert identity[0] == {True} and identity[1] is None  # nothing is coded: no gap, and nothing to measure
        assert full[1] < 1e-4
        assert poor[1] > 0.1 and 0.0 < allowed[1] < 50.0
        # a step sampled dense and trained through the codec measures the same thing, on the same samples
        assert poor[1] == pytest.approx(poor[2], rel=1e-5)
        # one policy samples and trains, the gap to the other path remains
        assert identity[2] < 1e-5 and full[2] < 1e-4 and allowed[2] < 1e-4
    assert all(result[arm][1] == results[0][arm][1] for result in results for arm in range(len(arms)))
