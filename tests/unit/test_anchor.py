"""The anchor's calendar, its memory and the mergers, against tables by hand and ten-line references."""

import io
from typing import Any

import pytest
import torch

from megatron_grpo.anchor.gate import Gate, build_gate, cosine
from megatron_grpo.anchor.merger import (
    AnchorMemory,
    DelayedEf,
    Fading,
    SignedEma,
    SignMemory,
    build_memory,
    build_merger,
)
from megatron_grpo.anchor.schedule import AnchorSchedule
from megatron_grpo.anchor.snapshots import Snapshot, Snapshots
from megatron_grpo.config import AnchorConfig, MergerConfig
from megatron_grpo.ops.merge import agreement_sums
from megatron_grpo.ops.signs import PackedSigns

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


def test_fading_by_hand() -> None:
    """Half of the weight goes at every tick, and from the third tick on M is not used."""
    assert [Fading(decay=0.5, hold=3).left(held) for held in range(5)] == [1.0, 0.5, 0.25, 0.0, 0.0]
    assert [Fading(hold=1).left(held) for held in range(3)] == [1.0, 0.0, 0.0]
    # The control: neither set, nothing fades, however long M is held.
    assert {Fading().left(held) for held in range(1000)} == {1.0}


@pytest.mark.parametrize("alpha", [0.25, 0.1, 1 / 3, 0.7])
def test_without_fading_the_source_rule_holds_bit_for_bit(alpha: float) -> None:
    (g,), (m,) = gradients(1, seed=16), gradients(1, seed=17)
    expected = [alpha * x + (1.0 - alpha) * x.abs() * y.sign() for x, y in zip(g, m, strict=True)]
    assert SignedEma(alpha).merge(g, m, fade=Fading().left(37)) == 1.0 - alpha
    assert all(torch.equal(a, b) for a, b in zip(g, expected, strict=True))


@pytest.mark.parametrize("cfg", [{"kind": "signed_ema", "alpha": 0.1}, {"kind": "delayed_ef", "lam": 2.0}])
def test_an_m_that_has_faded_changes_no_bit(cfg: dict[str, Any]) -> None:
    merger = build_merger(MergerConfig.model_validate(cfg))
    (g,), (m,), (then,) = gradients(1, seed=18), gradients(1, seed=19), gradients(1, seed=20)
    g[0][0], before = -0.0, [x.clone() for x in g]
    before[0][0] = -0.0
    merger.arrive(m, then)
    assert merger.merge(g, m, fade=0.0) == 0.0
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(g, before, strict=True))


def test_delayed_ef_fades() -> None:
    """Weight lam * fade = 0.5: g + 0.5 (m - then)."""
    merger = DelayedEf(lam=2.0)
    g = [torch.tensor([1.0, 2.0])]
    merger.arrive([torch.tensor([3.0, -1.0])], [torch.tensor([1.0, 1.0])])
    assert merger.merge(g, [torch.tensor([3.0, -1.0])], fade=0.25) == 0.5
    assert g[0].tolist() == [2.0, 1.0]


GATED = [{"kind": "signed_ema", "alpha": 0.25}, {"kind": "delayed_ef", "lam": 1.0}]


@pytest.mark.parametrize("cfg", GATED)
def test_the_agreement_gate_is_the_plain_merger_where_signs_agree_and_nothing_elsewhere(cfg: dict[str, Any]) -> None:
    plain, gated = (build_merger(MergerConfig.model_validate(cfg)) for _ in range(2))
    (g,), (m,), (mean,), (then,) = (gradients(1, seed=seed) for seed in (21, 22, 23, 24))
    m[0][:2] = 0.0
    mean[0][1] = 0.0
    raw, merged = [x.clone() for x in g], [x.clone() for x in g]
    for merger in (plain, gated):
        merger.arrive(m, then)
    plain.merge(merged, m)
    gated.merge(g, m, mean=mean)
    for shard in range(2):
        for got, own, all_in, a, b in zip(g[shard], raw[shard], merged[shard], m[shard], mean[shard], strict=True):
            assert got == (all_in if float(a) * float(b) > 0 else own)


def run_gate(gate: Gate, fast: list[list[torch.Tensor]]) -> None:
    for tick in fast:
        gate.watch(tick)


@pytest.mark.parametrize("kind", ["cosine", "agreement"])
def test_a_gate_goes_by_the_running_mean_of_the_fast_gradient(kind: str) -> None:
    """mean <- 0.9 mean + 0.1 g from the first g, number by number; the cosine and the share of equal signs from it."""
    fast, (m,) = gradients(6, seed=25), gradients(1, seed=26)
    gate = build_gate(MergerConfig.model_validate({"gate": kind}))
    run_gate(gate, fast)
    mean = torch.cat(fast[0]).tolist()
    for tick in fast[1:]:
        mean = [0.9 * old + 0.1 * new for old, new in zip(mean, torch.cat(tick).tolist(), strict=True)]
    assert gate.mean is not None
    assert torch.cat(gate.mean).tolist() == pytest.approx(mean, rel=1e-5, abs=1e-6)
    flat = torch.cat(m).tolist()
    dot = sum(a * b for a, b in zip(mean, flat, strict=True))
    size = (sum(a * a for a in mean) * sum(b * b for b in flat)) ** 0.5
    sums = torch.stack([agreement_sums(a, b) for a, b in zip(gate.mean, m, strict=True)]).sum(0)
    sums = torch.cat([sums, torch.tensor([19.0])])  # 7 + 12 elements
    assert cosine(sums) == pytest.approx(dot / size, rel=1e-4)
    if kind == "agreement":
        assert gate.share(sums) == pytest.approx(sum(a * b > 0 for a, b in zip(mean, flat, strict=True)) / 19)
    else:
        for offset, share in ((-0.01, 1.0), (0.01, 0.0)):
            threshold = build_gate(MergerConfig(gate="cosine", gate_threshold=dot / size + offset))
            assert threshold.share(sums) == share


@pytest.mark.parametrize("kind", ["cosine", "agreement"])
def test_a_gate_survives_a_checkpoint_and_keeps_its_own_copy(kind: str) -> None:
    fast = gradients(8, seed=27)
    whole, first, second = (build_gate(MergerConfig.model_validate({"gate": kind})) for _ in range(3))
    run_gate(whole, [[x.clone() for x in tick] for tick in fast])
    run_gate(first, fast[:3])
    second.load_state_dict(saved(first.state_dict()))
    for tick in fast[:3]:  # engines reuse their buffers
        for shard in tick:
            shard.zero_()
    run_gate(second, fast[3:])
    assert whole.mean is not None and second.mean is not None
    assert all(torch.equal(a, b) for a, b in zip(whole.mean, second.mean, strict=True))


def test_no_gate_is_open_and_keeps_nothing() -> None:
    gate = build_gate(MergerConfig())
    assert not gate.watches and gate.mean is None and gate.share(torch.zeros(6)) == 1.0


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def test_packed_signs_merge_bit_for_bit_what_m_does_zeros_included() -> None:
    (g,), (m,), (mean,) = (gradients(1, seed=seed) for seed in (28, 29, 30))
    m[1] = m[1].view(3, 4)
    m[1][1] = 0.0
    g[1], mean[1] = g[1].view(3, 4), mean[1].view(3, 4)
    memory, plain = build_memory(AnchorConfig(beta=0.0), MergerConfig(packed_signs=True)), AnchorMemory(beta=0.0)
    assert isinstance(memory, SignMemory) and not memory.has_size
    packed = memory.arrive(m)
    whole = plain.arrive(m)
    assert [shard.tolist() for shard in packed] == [shard.sign().tolist() for shard in m]
    for fade, guide in ((1.0, None), (0.3, None), (1.0, mean)):
        mine, theirs = [x.clone() for x in g], [x.clone() for x in g]
        SignedEma(0.25).merge(mine, packed, fade=fade, mean=guide)
        SignedEma(0.25).merge(theirs, whole, fade=fade, mean=guide)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert guide is not None or not torch.equal(mine[0], g[0])


def test_packed_signs_take_a_thirty_second_of_fp32() -> None:
    """A second bit only for the shard with a zero in it."""
    shards = [torch.randn(4096), torch.randn(64, 128)]
    shards[1][5, 7] = 0.0

    def size(signs: PackedSigns) -> list[int]:
        state = signs.state_dict()
        bits = zip(state["above"], state["nonzero"], strict=True)
        return [above.nbytes + (0 if nonzero is None else nonzero.nbytes) for above, nonzero in bits]

    assert size(PackedSigns(shards)) == [4096 * 4 // 32, 2 * 8192 * 4 // 32]


def test_packed_signs_survive_a_checkpoint() -> None:
    (m,) = gradients(1, seed=31)
    m[0][3] = 0.0
    memory, again = SignMemory(), SignMemory()
    again.load_state_dict(saved(memory.state_dict()))
    assert again.m is None
    memory.arrive(m)
    again.load_state_dict(saved(memory.state_dict()))
    assert again.m is not None and len(again.m) == 2
    assert [shard.tolist() for shard in again.m] == [shard.sign().tolist() for shard in m]
