"""Writing on a thread of its own, while the next bytes are made."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor; they are not copied if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class Behind:
    """Does one piece of work at a time on a thread of its own, in order. Leaving the block waits for it.

    What fails is raised by the next call, or at the end, unless another exception leaves the block.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._worker.shutdown()

    def do(self, work: Callable[[], None]) -> None:
        """Start ``work`` when what was given before is done."""
        self.wait()
        self._running = self._worker.submit(work)

    def wait(self) -> None:
        """Return when everything is done, so that what was written from may be overwritten."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
