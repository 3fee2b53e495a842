"""What both ends of a boundary hold of a rollout: the rows that crossed while it was sampled.

The sampler runs through the same stages as the trainer, so the receiver of a boundary has seen every row that the
trainer would send. The sender keeps what the receiver holds, so that both know without a message what need not cross.
Legend: N rows, H hidden, O sequences of the rollout, L places in a sequence.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_grpo.boundary.store import CachePlace, RowStore
from megatron_grpo.ops.rows import Rows

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where rows are kept, and how many bytes of them; ``None``: any number."""

    place: CachePlace = "device"
    limit: int | None = None


class RowCache:
    """Rows of one rollout at one boundary, by sequence and place in it. Both ends call everything alike.

    Args:
        settings: where, and how much.
        dense: the rollout crossed uncompressed, so what is not held crosses so, too.
    """

    def __init__(self, settings: CacheSettings, *, dense: bool) -> None:
        self._settings, self.dense = settings, dense
        self._store: RowStore | None = None
        self._slot_OL = torch.empty(0, 0, dtype=torch.int64)
        self._lost: set[int] = set()

    def put(self, rows: Rows, x_NH: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep rows that crossed, as ``dtype``, which loses nothing of them.

        Where they do not fit, the last sequences of the micro-batch are given up for good, until the others do.
        """
        x_NH = x_NH.detach().to(dtype)
        if self._settings.limit is not None:
            self._give_up(rows.owners_N[self.holds(rows)], self._settings.limit // (x_NH.shape[1] * x_NH.itemsize))
        held_N = self.holds(rows)
        self._enter(rows.owners_N[held_N], rows.places_N[held_N], x_NH[held_N])

    def _enter(self, owners_N: torch.Tensor, places_N: torch.Tensor, x_NH: torch.Tensor) -> None:
        if not len(x_NH):
            return
        if self._store is None:
            limit = self._settings.limit
            most = None if limit is None else limit // (x_NH.shape[1] * x_NH.itemsize)
            like = x_NH.new_empty(0, x_NH.shape[1], device=owners_N.device)
            self._store = RowStore(self._settings.place, like, most)
        self._reach(int(owners_N.max()) + 1, int(places_N.max()) + 1, owners_N.device)
        self._slot_OL[owners_N, places_N] = self._store.put(x_NH).to(owners_N.device)

    def _reach(self, owners: int, places: int, device: torch.device) -> None:
        """Widen the table to so many sequences and places, with room for those that follow one by one."""
        old_OL = self._slot_OL
        if owners <= len(old_OL) and places <= old_OL.shape[1]:
            return
        owners, places = max(owners, len(old_OL)), max(2 * places, old_OL.shape[1])
        self._slot_OL = torch.full((owners, places), NOWHERE, device=device)
        self._slot_OL[: len(old_OL), : old_OL.shape[1]] = old_OL.to(device)

    def _give_up(self, owners_N: torch.Tensor, most: int) -> None:
        """Lose sequences that rows are coming of, the last ones first, until there is room for the others'."""
        coming, held_O = Counter(owners_N.tolist()), (self._slot_OL != NOWHERE).sum(1).tolist()
        room = most - sum(held_O) - coming.total()
        lost = set()
        for owner in sorted(coming, reverse=True):
            if room >= 0:
                break
            room += coming[owner] + (held_O[owner] if owner < len(held_O) else 0)
            lost.add(owner)
        self._lost |= lost
        self.forget(lost)

    def forget(self, owners: Iterable[int]) -> None:
        """Make room of sequences that nobody will ask for, or that are not to be held."""
        known = [owner for owner in owners if owner < len(self._slot_OL)]
        if self._store is None or not known:
            return
        slots_kL = self._slot_OL[known]
        self._store.free(slots_kL[slots_kL != NOWHERE])
        self._slot_OL[known] = NOWHERE

    def holds(self, rows: Rows) -> torch.Tensor:
        """Bool ``[N]``: rows of sequences that are held whole."""
        if not self._lost:
            return torch.ones(len(rows), dtype=torch.bool, device=rows.index_N.device)
        lost = torch.tensor(sorted(self._lost), device=rows.index_N.device)
        return ~torch.isin(rows.owners_N, lost)

    def get(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """Held rows ``[N, H]`` of ``dtype``, on the device of ``rows``."""
        store, slots_N = self._found(rows)
        return store.get(slots_N, rows.index_N.device).to(dtype)

    def replace(self, rows: Rows, x_NH: torch.Tensor) -> None:
        """Hold other rows in their stead."""
        store, slots_N = self._found(rows)
        store.replace(slots_N, x_NH.detach())

    def _found(self, rows: Rows) -> tuple[RowStore, torch.Tensor]:
        """Where rows of held sequences are."""
        assert self._store is not None, "some rows have crossed"
        slots_N = self._slot_OL[rows.owners_N, rows.places_N]
        assert bool((slots_N != NOWHERE).all()), "every row of a held sequence has crossed"
        return self._store, slots_N

    @property
    def nbytes(self) -> int:
        """Of what rows are kept in."""
        return 0 if self._store is None else self._store.nbytes

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it: rows, whose they are, and whose are not held."""
        owners_N, places_N = (self._slot_OL != NOWHERE).nonzero(as_tuple=True)
        rows = None
        if self._store is not None:
            rows = self._store.get(self._slot_OL[owners_N, places_N], torch.device("cpu"))
        return {
            "dense": self.dense,
            "lost": sorted(self._lost),
            "owners": owners_N,
            "places": places_N,
            "rows": rows,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take over what :meth:`state_dict` gave, into an empty cache; ``device`` is that of the rows to come."""
        self.dense, self._lost = state["dense"], set(state["lost"])
        if state["rows"] is not None:
            self._enter(state["owners"].to(device), state["places"].to(device), state["rows"])
