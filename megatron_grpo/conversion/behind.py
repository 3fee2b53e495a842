"""Writing on a thread of its own, while the next bytes are read and checked."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

PENDING = 2
"""Pieces of work that may wait or run; each holds what it writes in memory."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor; they are not copied if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class Behind:
    """Does what it is given on one thread, in order. Leaving the block waits for all of it.

    What fails is raised by a later call, or at the end; an exception that leaves the block drops what still waits.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._worker.shutdown(cancel_futures=True)

    def do(self, work: Callable[[], None]) -> None:
        """Have ``work`` done after all that was given before; waits where much is pending."""
        while len(self._waiting) >= PENDING:
            self._waiting.popleft().result()
        self._waiting.append(self._worker.submit(work))

    def wait(self) -> None:
        """Return when everything is done, and what it held may be overwritten."""
        while self._waiting:
            self._waiting.popleft().result()
