"""What both ends of a boundary hold of a rollout: the rows that crossed while it was sampled.

The sampler runs through the same stages as the trainer, so the receiver of a boundary has seen every row that the
trainer would send. The sender keeps what the receiver holds, so that both know without a message what need not cross.
Legend: N rows, B sequences of a micro-batch, H hidden.
"""

from collections import Counter
from dataclasses import dataclass, field
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import torch

from megatron_grpo.ops.rows import Rows

CachePlace = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where rows are kept, and how many bytes of them; ``None``: any number."""

    place: CachePlace = "device"
    limit: int | None = None


@dataclass(slots=True)
class _Chunk:
    """Rows as they came, and whose they are."""

    owners_N: torch.Tensor
    places_N: torch.Tensor
    x_NH: torch.Tensor

    def without(self, lost: set[int]) -> "_Chunk":
        """The same but for the sequences ``lost``."""
        gone_N = torch.isin(self.owners_N, torch.tensor(sorted(lost), device=self.owners_N.device))
        if not bool(gone_N.any()):
            return self
        return _Chunk(self.owners_N[~gone_N], self.places_N[~gone_N], self.x_NH[~gone_N.to(self.x_NH.device)])

    def kept(self, place: CachePlace) -> "_Chunk":
        """The same with rows of its own: the sender goes on with those that came, and a view keeps all they lie in."""
        own = self.x_NH.to("cpu").pin_memory() if place != "device" and self.x_NH.is_cuda else self.x_NH.clone()
        return _Chunk(self.owners_N, self.places_N, own)


@dataclass(slots=True)
class _Table:
    """All rows in one tensor; ``slot_OL`` says where the row of a sequence's place lies, -1 for nowhere."""

    x_MH: torch.Tensor
    slot_OL: torch.Tensor
    file: Any = field(default=None, repr=False)  # behind x_MH, with it to live and to go


class RowCache:
    """Rows of one rollout at one boundary, by sequence and place in it. Both ends call everything alike.

    Args:
        settings: where, and how much.
        dense: the rollout crossed uncompressed, so what is not held crosses so, too.
    """

    def __init__(self, settings: CacheSettings, *, dense: bool) -> None:
        self._settings, self.dense = settings, dense
        self._chunks: list[_Chunk] = []
        self._table: _Table | None = None
        self._lost: set[int] = set()
        self._held: Counter[int] = Counter()
        self._row_bytes = 0

    def put(self, rows: Rows, x_NH: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep rows that crossed, as ``dtype``, which loses nothing of them.

        Where they do not fit, the last sequences of the micro-batch are given up for good, until the others do.
        """
        x_NH = x_NH.detach().to(dtype)
        chunk = _Chunk(rows.owners_N, rows.places_N, x_NH).without(self._lost)
        if self._settings.limit is not None:
            self._give_up(chunk, x_NH.shape[1] * dtype.itemsize)
            chunk = chunk.without(self._lost)
        self._held.update(chunk.owners_N.tolist())
        self._row_bytes = x_NH.shape[1] * dtype.itemsize
        self._chunks.append(chunk.kept(self._settings.place))

    def _give_up(self, chunk: _Chunk, row_bytes: int) -> None:
        """Lose sequences of ``chunk``, the last ones first, until what is held and the chunk fit the limit."""
        assert self._settings.limit is not None
        coming = Counter(chunk.owners_N.tolist())
        room = self._settings.limit // row_bytes - self._held.total() - coming.total()
        lost = set()
        for owner in sorted(coming, reverse=True):
            if room >= 0:
                break
            room += coming[owner] + self._held.pop(owner, 0)
            lost.add(owner)
        if lost:
            self._lost |= lost
            self._chunks = [chunk.without(lost) for chunk in self._chunks]

    def holds(self, rows: Rows) -> torch.Tensor:
        """Bool ``[N]``: rows of sequences that are held whole."""
        if not self._lost:
            return torch.ones(len(rows), dtype=torch.bool, device=rows.index_N.device)
        lost = torch.tensor(sorted(self._lost), device=rows.index_N.device)
        return ~torch.isin(rows.owners_N, lost)

    def get(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """Held rows ``[N, H]`` of ``dtype``, on the device of ``rows``."""
        table = self._whole()
        slots_N = table.slot_OL[rows.owners_N, rows.places_N]
        assert bool((slots_N >= 0).all()), "every row of a held sequence has crossed"
        return table.x_MH[slots_N.to(table.x_MH.device)].to(rows.index_N.device, dtype)

    def replace(self, rows: Rows, x_NH: torch.Tensor) -> None:
        """Hold other rows in their stead."""
        table = self._whole()
        slots_N = table.slot_OL[rows.owners_N, rows.places_N].to(table.x_MH.device)
        table.x_MH[slots_N] = x_NH.detach().to(table.x_MH)

    @property
    def nbytes(self) -> int:
        """Of the rows that are held."""
        return self._held.total() * self._row_bytes

    def _whole(self) -> _Table:
        """The table, with what has come since it was last asked for."""
        chunks = self._chunks
        if self._table is not None and not chunks:
            return self._table
        owners = torch.cat([chunk.owners_N for chunk in chunks])
        places = torch.cat([chunk.places_N for chunk in chunks])
        rows = [chunk.x_NH for chunk in chunks]
        first = 0
        slot_OL = owners.new_full((int(owners.max()) + 1, int(places.max()) + 1), -1)
        if self._table is not None:
            old = self._table.slot_OL
            size = (max(len(old), len(slot_OL)), max(old.shape[1], slot_OL.shape[1]))
            slot_OL = owners.new_full(size, -1)
            slot_OL[: len(old), : old.shape[1]] = old
            rows, first = [self._table.x_MH, *rows], len(self._table.x_MH)
        slot_OL[owners, places] = torch.arange(first, first + len(owners), device=owners.device)
        self._table = self._stored(rows, slot_OL)
        self._chunks = []
        return self._table

    def _stored(self, rows: list[torch.Tensor], slot_OL: torch.Tensor) -> _Table:
        if self._settings.place != "disk":
            return _Table(torch.cat(rows), slot_OL)
        hidden, count, dtype = rows[0].shape[1], sum(map(len, rows)), rows[0].dtype
        file = NamedTemporaryFile(prefix="megatron_grpo_rows_")  # noqa: SIM115  # it lives as long as the table
        for part in rows:
            file.write(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        x_MH = torch.from_file(file.name, shared=True, size=count * hidden, dtype=dtype).view(count, hidden)
        return _Table(x_MH, slot_OL, file)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it: rows and whose they are."""
        table = self._whole() if self._table is not None or self._chunks else None
        return {
            "dense": self.dense,
            "lost": sorted(self._lost),
            "held": dict(self._held),
            "row_bytes": self._row_bytes,
            "rows": None if table is None else table.x_MH.clone(),
            "slots": None if table is None else table.slot_OL,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take over what :meth:`state_dict` gave; ``device`` is that of the rows to come."""
        self.dense, self._lost = state["dense"], set(state["lost"])
        self._held, self._row_bytes = Counter(state["held"]), state["row_bytes"]
        self._chunks = []
        self._table = None
        if state["rows"] is not None:
            rows = state["rows"].to(device if self._settings.place == "device" else "cpu")
            self._table = self._stored([rows], state["slots"].to(device))
