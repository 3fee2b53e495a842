"""The anchor's calendar, its memory and the mergers, against tables by hand and ten-line references."""

import pytest
import torch

from megatron_grpo.anchor.merger import AnchorMemory, DelayedEf, SignedEma, build_merger
from megatron_grpo.anchor.schedule import AnchorSchedule
from megatron_grpo.anchor.snapshots import Snapshot, Snapshots
from megatron_grpo.config import MergerConfig

BY_HAND = {  # (C, K): fires up to tick 44, ticks remembered for them, {tick: age of M}
    (5, 5): ([5, 10, 15, 20, 25, 30, 35, 40], [0, 5, 10, 15, 20, 25, 30, 35], {4: None, 5: 5, 9: 9, 10: 5}),
    (20, 20): ([20, 40], [0, 20], {0: None, 19: None, 20: 20, 39: 39, 40: 20}),
    (5, 20): ([20, 25, 30, 35, 40], [0, 5, 10, 15, 20], {19: None, 20: 20, 24: 24, 25: 20}),
    (20, 5): ([20, 40], [15, 35], {5: None, 19: None, 20: 5, 39: 24, 40: 5}),
    (1, 0): (list(range(1, 45)), list(range(1, 45)), {0: None, 1: 0, 2: 0, 44: 0}),
    (5, 0): ([5, 10, 15, 20, 25, 30, 35, 40], [5, 10, 15, 20, 25, 30, 35, 40], {4: None, 5: 0, 9: 4, 10: 0}),
    (3, 7): (list(range(9, 45, 3)), list(range(2, 38, 3)), {7: None, 8: None, 9: 7, 11: 9, 12: 7}),
}
TICKS = range(45)


@pytest.mark.parametrize("cadence, delay", BY_HAND)
def test_schedule_is_the_table(cadence: int, delay: int) -> None:
    fires, remembered, ages = BY_HAND[cadence, delay]
    schedule = AnchorSchedule(cadence, delay)
    assert [tick for tick in TICKS if schedule.fires(tick)] == fires
    assert [tick for tick in TICKS if schedule.remembers(tick) and tick + delay in TICKS] == remembered
    assert {tick: schedule.age(tick, max((f for f in fires if f <= tick), default=None)) for tick in ages} == ages


@pytest.mark.parametrize("cadence, delay", [*BY_HAND, (2, 9), (7, 1), (4, 4), (1, 1), (6, 13)])
def test_every_fire_finds_its_tick_and_nothing_is_left_behind(cadence: int, delay: int) -> None:
    schedule, snapshots = AnchorSchedule(cadence, delay), Snapshots()
    fired = 0
    for tick in range(200):
        if schedule.remembers(tick):
            snapshots.put(tick, Snapshot([torch.tensor(float(tick))], batch=tick))
        if schedule.fires(tick):
            fired += 1
            assert snapshots.get(tick - delay).batch == tick - delay
            assert schedule.age(tick, tick) == delay
            snapshots.forget(tick - delay)
        # never more than the fires still to come within K ticks
        assert len(snapshots) <= delay // cadence + 1
    assert fired == len([tick for tick in range(max(delay, 1), 200) if tick % cadence == 0])


def test_a_tick_that_was_not_remembered_is_an_error() -> None:
    snapshots = Snapshots()
    snapshots.put(3, Snapshot([], batch=None))
    with pytest.raises(KeyError):
        snapshots.get(4)
    snapshots.forget(3)
    with pytest.raises(KeyError):
        snapshots.get(3)


def test_snapshots_survive_a_checkpoint() -> None:
    first, second = Snapshots(), Snapshots()
    first.put(7, Snapshot([torch.arange(3.0)], batch="batch", fast=[torch.ones(2)]))
    second.load_state_dict(first.state_dict())
    first.forget(7)
    held = second.get(7)
    assert torch.equal(held.weights[0], torch.arange(3.0)) and held.batch == "batch"


def gradients(ticks: int, *, seed: int) -> list[list[torch.Tensor]]:
    """Two random shards a tick, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator) for size in (7, 12)] for _ in range(ticks)]


def test_memory_is_the_running_mean_of_fires() -> None:
    """M <- beta M + (1 - beta) g, number by number in Python floats, starting from the first g."""
    memory = AnchorMemory(beta=0.5)
    assert memory.m is None
    expected: list[list[float]] | None = None
    for g in gradients(4, seed=1):
        m = memory.arrive(g)
        if expected is None:
            expected = [shard.tolist() for shard in g]
        else:
            expected = [
                [0.5 * a + 0.5 * b for a, b in zip(old, new.tolist(), strict=True)]
                for old, new in zip(expected, g, strict=True)
            ]
        for shard, values in zip(m, expected, strict=True):
            assert shard.tolist() == pytest.approx(values, rel=1e-6)


def test_memory_keeps_its_own_copy() -> None:
    """Engines reuse their gradient buffers: what they write later must not reach M."""
    memory = AnchorMemory(beta=0.5)
    buffer = torch.tensor([1.0, -2.0])
    memory.arrive([buffer])
    buffer.zero_()
    assert memory.m is not None and memory.m[0].tolist() == [1.0, -2.0]


def test_beta_zero_keeps_the_last_gradient_alone() -> None:
    memory = AnchorMemory(beta=0.0)
    for g in gradients(3, seed=2):
        m = memory.arrive(g)
        assert all(torch.equal(a, b) for a, b in zip(m, g, strict=True))


def test_signed_ema_over_ticks() -> None:
    """C = 3, K = 2, alpha = 0.25, beta = 0.5: the first fire is tick 3, M is held between fires."""
    fast, anchor = gradients(12, seed=3), gradients(12, seed=4)
    memory, merger = AnchorMemory(beta=0.5), build_merger(MergerConfig(kind="signed_ema", alpha=0.25))
    schedule = AnchorSchedule(3, 2)
    m_reference: list[float] | None = None
    for tick in range(12):
        raw = [g.tolist() for g in fast[tick]]
        if schedule.fires(tick):
            merger.arrive(memory.arrive(anchor[tick]), None)
            new = [x for shard in anchor[tick] for x in shard.tolist()]
            held = new if m_reference is None else [0.5 * a + 0.5 * b for a, b in zip(m_reference, new, strict=True)]
            m_reference = held
        if memory.m is None or m_reference is None:
            assert tick < 3
            continue
        assert merger.merge(fast[tick], memory.m) == 0.75
        flat = [x for shard in raw for x in shard]
        expected = [0.25 * g + 0.75 * abs(g) * (1 if m > 0 else -1) for g, m in zip(flat, m_reference, strict=True)]
        assert torch.cat(fast[tick]).tolist() == pytest.approx(expected, rel=1e-5)


def test_signed_ema_without_an_anchor_is_the_fast_gradient() -> None:
    """The control arm alpha = 1."""
    (g,), (m,) = gradients(1, seed=5), gradients(1, seed=6)
    before = [x.clone() for x in g]
    assert SignedEma(alpha=1.0).merge(g, m) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(g, before, strict=True))


def test_delayed_ef_over_ticks_holds_the_excess_between_fires() -> None:
    """C = 4, K = 3, lam = 0.5, beta = 0: G = G_comp + 0.5 (g_anchor - G_comp[t - 3]), with the last fire's excess."""
    fast, anchor = gradients(14, seed=7), gradients(14, seed=8)
    memory, merger = AnchorMemory(beta=0.0), build_merger(MergerConfig(kind="delayed_ef", lam=0.5))
    assert merger.needs_fast
    schedule, remembered = AnchorSchedule(4, 3), {}
    raw = [torch.cat(g).tolist() for g in fast]
    excess: list[float] | None = None
    for tick in range(14):
        if schedule.remembers(tick):
            remembered[tick] = [g.clone() for g in fast[tick]]
        if schedule.fires(tick):
            merger.arrive(memory.arrive(anchor[tick]), remembered.pop(tick - 3))
            excess = [a - b for a, b in zip(torch.cat(anchor[tick]).tolist(), raw[tick - 3], strict=True)]
        if memory.m is None or excess is None:
            assert tick < 4
            continue
        assert merger.merge(fast[tick], memory.m) == 0.5
        expected = [g + 0.5 * e for g, e in zip(raw[tick], excess, strict=True)]
        assert torch.cat(fast[tick]).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_delayed_ef_without_delay_is_the_dense_gradient() -> None:
    """K = 0, lam = 1, beta = 0 on a fire tick: G_comp + (g_dense - G_comp) = g_dense, to rounding."""
    (fast,), (dense,) = gradients(1, seed=9), gradients(1, seed=10)
    memory, merger = AnchorMemory(beta=0.0), DelayedEf(lam=1.0)
    merger.arrive(memory.arrive(dense), [g.clone() for g in fast])
    assert memory.m is not None
    merger.merge(fast, memory.m)
    for merged, wanted in zip(fast, dense, strict=True):
        torch.testing.assert_close(merged, wanted, rtol=0, atol=1e-6)


def test_no_merger_changes_nothing() -> None:
    merger = build_merger(MergerConfig(kind="none"))
    (g,), (m,) = gradients(1, seed=11), gradients(1, seed=12)
    before = [x.clone() for x in g]
    merger.arrive(m, None)
    assert merger.merge(g, m) == 0.0 and not merger.needs_fast
    assert all(torch.equal(a, b) for a, b in zip(g, before, strict=True))


def test_merger_and_memory_survive_a_checkpoint() -> None:
    """Between two fires: the restored pair merges what the first one would have merged."""
    (m,), (then,), (now,) = gradients(1, seed=13), gradients(1, seed=14), gradients(1, seed=15)
    memory, merger = AnchorMemory(beta=0.0), DelayedEf(lam=1.0)
    merger.arrive(memory.arrive(m), then)
    memory_again, merger_again = AnchorMemory(beta=0.0), DelayedEf(lam=1.0)
    memory_again.load_state_dict(memory.state_dict())
    merger_again.load_state_dict(merger.state_dict())
    mine, theirs = [g.clone() for g in now], [g.clone() for g in now]
    assert memory.m is not None and memory_again.m is not None
    merger.merge(mine, memory.m)
    merger_again.merge(theirs, memory_again.m)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[0], now[0])
