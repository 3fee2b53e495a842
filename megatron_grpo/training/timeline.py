"""When each rank sampled and scored, as JSON lines: ``timeline/rank00000.jsonl`` in the run directory.

A line is an interval of one rank's own work, waiting left out: ``{"what", "start", "end", ...}``, in seconds of that
machine's clock. ``sample`` is a column of a micro-batch in its place in flight, ``score`` a finished micro-batch;
``round`` is the moment before a batch is sampled.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

from megatron_grpo.ops.rows import Rows
from megatron_grpo.rollout.sampler import DecodeStage


class Timeline:
    """Writes line by line, so that what was noted is there whatever ends the run.

    Args:
        run_dir: of the run.
        rank: of this process.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        folder = run_dir / "timeline"
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / f"rank{rank:05d}.jsonl").open("a", encoding="utf-8", buffering=1)

    @contextmanager
    def during(self, what: str, **details: int) -> Iterator[None]:
        """Note the length of the block."""
        start = time.time()
        yield
        self._file.write(json.dumps({"what": what, "start": start, "end": time.time(), **details}) + "\n")

    def mark(self, what: str, **details: int) -> None:
        """Note the moment."""
        with self.during(what, **details):
            pass


class TimedStage:
    """A sampler's stage whose work is noted."""

    def __init__(self, stage: DecodeStage, timeline: Timeline) -> None:
        self._stage, self._timeline = stage, timeline

    def open(self, place: int, padding_BP: torch.Tensor, columns: int) -> None:
        self._stage.open(place, padding_BP, columns)

    def forward(self, place: int, x: torch.Tensor, start: int, rows: Rows) -> torch.Tensor:
        with self._timeline.during("sample", place=place, column=start):
            return self._stage.forward(place, x, start, rows)
