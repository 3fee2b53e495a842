"""Room for rows, on the device, in host memory or on disk.

Legend: N rows, H hidden.
"""

import os
from tempfile import NamedTemporaryFile
from typing import Literal

import torch

CachePlace = Literal["device", "host", "disk"]

BLOCK_BYTES = 2**22
"""Of a block. What is held is at most one block more than its rows."""


class RowStore:
    """Rows in numbered slots of blocks, which are made as rows come: what is there is never copied to make room.

    Args:
        place: device, host (pinned, where rows come from a GPU) or disk, in files that go with the store.
        like: no rows ``[0, H]``, but of the dtype and device of those that will come.
        most: rows at once; ``None``: any number.
    """

    def __init__(self, place: CachePlace, like: torch.Tensor, most: int | None) -> None:
        self._place, self._most = place, most
        self._like = like
        self._block_rows = max(1, BLOCK_BYTES // (like.shape[1] * like.itemsize))
        self._blocks: list[torch.Tensor] = []
        self._free: list[range] = []  # slots, each range in one block

    def put(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Copy rows to free slots: their numbers, int64 ``[N]``, on the CPU.

        Raises:
            OSError: the disk is full.
        """
        slots: list[int] = []
        while len(slots) < len(x_NH):
            if not self._free:
                self._grow()
            free = self._free.pop()
            taken, rest = free[: len(x_NH) - len(slots)], free[len(x_NH) - len(slots) :]
            block, first = divmod(taken.start, self._block_rows)
            self._blocks[block][first : first + len(taken)] = x_NH[len(slots) : len(slots) + len(taken)]
            slots += taken
            if rest:
                self._free.append(rest)
        return torch.tensor(slots, dtype=torch.int64)

    def get(self, slots_N: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The rows ``[N, H]`` there, of the dtype in which they came, on ``device``."""
        x_NH = self._like.new_empty(len(slots_N), self._like.shape[1], device=device)
        for block, mine_N, within_N in self._by_block(slots_N):
            x_NH[mine_N.to(device)] = block[within_N].to(device)
        return x_NH

    def replace(self, slots_N: torch.Tensor, x_NH: torch.Tensor) -> None:
        """Other rows in their stead."""
        for block, mine_N, within_N in self._by_block(slots_N):
            block[within_N] = x_NH[mine_N].to(block)

    def free(self, slots_N: torch.Tensor) -> None:
        """Rows may come there."""
        for slot in sorted(slots_N.tolist()):
            last = self._free[-1] if self._free else range(0)
            if slot == last.stop and slot % self._block_rows:
                self._free[-1] = range(last.start, slot + 1)
            else:
                self._free.append(range(slot, slot + 1))

    @property
    def nbytes(self) -> int:
        """Of all blocks, free slots included."""
        return sum(block.nbytes for block in self._blocks)

    def _by_block(self, slots_N: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each block that slots are in, bool ``[N]`` which these are, and where in it."""
        numbers_N = slots_N.div(self._block_rows, rounding_mode="floor")
        found = []
        for number in torch.unique(numbers_N).tolist():
            mine_N = numbers_N == number
            block = self._blocks[number]
            found.append((block, mine_N, (slots_N[mine_N] % self._block_rows).to(block.device)))
        return found

    def _grow(self) -> None:
        start, rows = len(self._blocks) * self._block_rows, self._block_rows
        if self._most is not None:
            rows = min(rows, self._most - start)
        assert rows > 0, "whoever puts rows has seen that there is room"
        self._blocks.append(self._block(rows))
        self._free.append(range(start, start + rows))

    def _block(self, rows: int) -> torch.Tensor:
        like, hidden = self._like, self._like.shape[1]
        if self._place == "device":
            return like.new_empty(rows, hidden)
        if self._place == "host":
            return torch.empty(rows, hidden, dtype=like.dtype, pin_memory=like.is_cuda)
        size = rows * hidden
        with NamedTemporaryFile(prefix="megatron_grpo_rows_") as file:  # gone from its folder, there as long as x_NH
            os.posix_fallocate(file.fileno(), 0, size * like.itemsize)
            x = torch.from_file(file.name, shared=True, size=size, dtype=like.dtype)
        return x.view(rows, hidden)
