"""Rows that both ends of a boundary hold: found again, in bounded room, wherever they are kept."""

from pathlib import Path

import pytest
import torch

from megatron_grpo.boundary.cache import CacheSettings, RowCache
from megatron_grpo.boundary.crossing import Pass, build_boundaries
from megatron_grpo.boundary.store import BLOCK_BYTES, CachePlace
from megatron_grpo.config import BoundaryConfig
from megatron_grpo.ops.rows import Origin, Rows, carrying_rows

HIDDEN = 4
PLACES: tuple[CachePlace, ...] = ("device", "host", "disk")


def column(owners: list[int], place: int) -> Rows:
    """One row of each of some sequences."""
    origin = Origin(torch.tensor(owners), torch.zeros(len(owners), dtype=torch.int64))
    return carrying_rows(torch.ones(len(owners), 1, dtype=torch.bool), start=place, origin=origin)


def row(owner: int, place: int) -> list[float]:
    """A row that no other is like."""
    return [100.0 * owner + place + 0.25 * number for number in range(HIDDEN)]


def values(rows: Rows) -> torch.Tensor:
    pairs = zip(rows.owners_N.tolist(), rows.places_N.tolist(), strict=True)
    return torch.tensor([row(owner, place) for owner, place in pairs])


def filled(cache: RowCache, owners: list[int], length: int) -> RowCache:
    for place in range(length):
        rows = column(owners, place)
        cache.put(rows, values(rows), torch.float32)
    return cache


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a block."""
    monkeypatch.setattr("megatron_grpo.boundary.store.BLOCK_BYTES", 3 * HIDDEN * 4 + 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("place", PLACES)
def test_rows_are_found_in_any_order_and_can_be_replaced(place: CachePlace) -> None:
    cache = filled(RowCache(CacheSettings(place), dense=True), [0, 1, 2, 3], 5)
    asked = [column([3, 1], 4), column([0, 1, 2, 3], 0), column([2], 2)]
    for rows in asked:
        assert torch.equal(cache.get(rows, torch.float32), values(rows))
    cache.replace(column([3, 1], 4), torch.tensor([[7.0] * HIDDEN, [8.0] * HIDDEN]))
    assert torch.equal(cache.get(column([1, 2, 3], 4), torch.float32)[:, 0], torch.tensor([8.0, 204.0, 7.0]))
    assert cache.nbytes == 7 * 3 * HIDDEN * 4  # 20 rows

    again = RowCache(CacheSettings(place), dense=False)
    again.load_state_dict(cache.state_dict(), torch.device("cpu"))
    rows = column([3, 0], 3)
    assert again.dense and torch.equal(again.get(rows, torch.float32), values(rows))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("place", PLACES)
def test_what_is_forgotten_makes_room(place: CachePlace) -> None:
    """A limit of eight rows: two sequences of four. Only where the first two are forgotten do two others fit."""
    settings = CacheSettings(place, limit=8 * HIDDEN * 4)
    kept = filled(filled(RowCache(settings, dense=True), [0, 1], 4), [2, 3], 4)
    assert kept.holds(column([0, 1, 2, 3], 0)).tolist() == [True, True, False, False]

    cache = filled(RowCache(settings, dense=True), [0, 1], 4)
    cache.forget([0, 1, 9])
    filled(cache, [2, 3], 4)
    assert cache.holds(column([2, 3], 0)).tolist() == [True, True]
    rows = column([3, 2], 3)
    assert torch.equal(cache.get(rows, torch.float32), values(rows))
    assert cache.nbytes == 8 * HIDDEN * 4


@pytest.mark.usefixtures("small_blocks")
def test_the_last_sequences_are_given_up_until_the_others_fit() -> None:
    """Seven rows' room for three sequences: at the third column the last one goes, and what it had."""
    cache = filled(RowCache(CacheSettings(limit=7 * HIDDEN * 4), dense=True), [0, 1, 2], 3)
    assert cache.holds(column([0, 1, 2], 0)).tolist() == [True, True, False]
    assert cache.nbytes == 6 * HIDDEN * 4


def mapped() -> int:
    """Bytes of this process's memory that lie in the files of stores."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "megatron_grpo_rows_" in line]
    ends = [line.split()[0].split("-") for line in lines]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends)


def test_disk_takes_rows_as_they_come_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anyone has read one, all are in files, at most a block more than they are; reading makes no more."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    width = BLOCK_BYTES // 4 // 8  # eight rows a block
    cache = RowCache(CacheSettings("disk"), dense=True)
    for place in range(5):
        cache.put(column([0, 1, 2, 3], place), torch.full((4, width), float(place)), torch.float32)
    assert mapped() == cache.nbytes == 3 * BLOCK_BYTES  # 20 rows
    assert float(cache.get(column([2], 3), torch.float32).mean()) == 3.0
    assert mapped() == 3 * BLOCK_BYTES
    assert list(tmp_path.iterdir()) == []
    del cache
    assert mapped() == 0


def test_a_difference_crosses_whole_in_a_dense_pass() -> None:
    """``delta`` codes what rows have moved, but not where a tick is to be uncompressed; both ends then hold it."""
    cfg = BoundaryConfig(codec="identity", payload="float32", send_once="delta", delta_budget=0.25)
    ends = [build_boundaries(cfg, stages=2, stage=stage, hidden=HIDDEN, seed=0) for stage in (0, 1)]
    rows = column([0, 1, 2], 0)
    moved_NH = values(rows) + torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for end in ends:
        end.open_caches(0, CacheSettings(), dense=True)
        end.crossings[0].caches[0].put(rows, values(rows), torch.float32)
    sender, receiver = (end.crossings[0] for end in ends)
    for dense, least, most in ((False, 1e-3, 1.0), (True, 0.0, 1e-6)):
        plan = Pass(rows=[rows], dense=dense, reuses=0, delta=True)
        sent = sender.encode("forward", moved_NH, rows, plan)
        assert sent.payload.nbytes == receiver.blank("forward", rows, plan).nbytes
        assert (sent.payload.nbytes == moved_NH.nbytes) == dense
        got_NH = receiver.decode("forward", sent.payload, rows, plan, torch.float32)
        assert least <= float((got_NH - moved_NH).norm() / moved_NH.norm()) < most
        assert sent.decoded_NH is not None and torch.equal(sent.decoded_NH, got_NH)
        for crossing in (sender, receiver):
            assert torch.equal(crossing.caches[0].get(rows, torch.float32), got_NH)
