"""What a step costs: ``python tools/bench/step.py [CONFIG] [SECTION.KEY=VALUE ...] [--steps N]``.

Trains a few steps as a user would (``megatron-grpo train`` in a temporary run directory), drops the first step and
prints one JSON object on stdout; the run's own output goes to stderr. Exits 1 when a goal is missed. With ``--fit``
it compares the plan's step time with measured steps instead: see ``fit.py``.

The share of codec, ledger and merger is not read off the run, where such short pieces hide in waits for the other
ranks. It is measured here, in one process, by calling the same functions on tensors of the run's sizes; see
``circuit_seconds``. Legend: N rows of a micro-batch, H hidden.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fit import fit_report

from megatron_grpo.anchor.merger import Shards, build_memory, build_merger
from megatron_grpo.backends.huggingface import load_hf_config
from megatron_grpo.boundary.build import DTYPES, BoundaryCodecs, build_codecs
from megatron_grpo.boundary.crossing import Crossing, Pass
from megatron_grpo.config import Config, Direction, layer_split, load_config
from megatron_grpo.conversion.families import model_shape
from megatron_grpo.conversion.files import stage_weights
from megatron_grpo.conversion.reader import HFReader
from megatron_grpo.ops.lowrank import digest
from megatron_grpo.ops.merge import agreement_sums
from megatron_grpo.ops.rows import carrying_rows
from megatron_grpo.parallel.link import BFLOAT16_BYTES, Ledger, byte_metrics

ROOT = Path(__file__).parents[2]
DEFAULT_CONFIG = ROOT / "examples/tiny/k5.yaml"
GOALS = {"seconds_per_tick": 1.0, "peak_memory_gib": 1.2, "circuit_share": 0.05, "cli_import_seconds": 0.3}
"""Upper bounds, for the shipped example on 2 cores."""

PARTS = ("rollout", "train", "anchor", "merge")
REPEATS = 30
STARTS = 5
NEVER = 1_000_000
COLUMNS = 16
"""Of the sequences whose rows cross."""
WAYS: tuple[Direction, Direction] = ("forward", "backward")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the circuit worked on in the run.

    Attributes:
        hidden: H.
        rows: N, the mean over micro-batches of the rows that cross one boundary.
        columns: response columns that the sampler fills, at most.
        shards: parameters of the largest stage, as fp32 tensors.
    """

    hidden: int
    rows: int
    columns: int
    shards: Shards


def run_training(config: Path, overrides: Sequence[str], steps: int, run_dir: Path) -> tuple[list[Row], Row]:
    """Train as a user would; rows of every step but the first, and the summary."""
    few = [f"train.steps={steps}", f"train.eval_every={NEVER}", f"train.save_every={NEVER}"]
    command = [sys.executable, "-m", "megatron_grpo", "train", str(config), *few, *overrides]
    subprocess.run([*command, "--run-dir", str(run_dir)], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return [row for row in rows if row["step"] > 0], summary


def step_times(rows: Sequence[Row], minibatches: int) -> dict[str, dict[str, float]]:
    """Mean seconds of a step and of a tick, whole and by part, as rank 0 saw them."""
    steps = len(rows) // minibatches
    seconds = {part: sum(row.get(f"time/{part}", 0.0) for row in rows) / steps for part in PARTS}
    whole = sum(row.get("time/step", 0.0) for row in rows) / steps
    seconds = {"whole": whole, **seconds, "rest": whole - sum(seconds.values())}
    return {"step": seconds, "tick": {part: value / minibatches for part, value in seconds.items()}}


def throughput(rows: Sequence[Row], config: Config) -> dict[str, float]:
    """Response tokens a second: over whole steps, and while sampling."""
    ends = [row for row in rows if "time/step" in row]
    tokens = [row["rollout/response_length"] * config.sequences_per_step for row in ends]
    return {
        "step": sum(tokens) / sum(row["time/step"] for row in ends),
        "rollout": sum(tokens) / sum(row["time/rollout"] for row in ends),
    }


def run_sizes(rows: Sequence[Row], config: Config) -> Sizes:
    """Sizes of the circuit's tensors, from the bytes that the run counted and from the model's files."""
    shape = model_shape(load_hf_config(Path(config.model.path)))
    parallel = config.parallel
    dense = statistics.mean(row["boundary/bytes_dense_equivalent"] for row in rows)
    crossings = max(1, (parallel.pipeline - 1) * parallel.data * len(WAYS)) * config.micro_batches
    return Sizes(
        hidden=shape.hidden,
        rows=max(1, round(dense / (BFLOAT16_BYTES * shape.hidden * crossings))),
        columns=config.rollout.max_response,
        shards=largest_stage(config),
    )


def largest_stage(config: Config) -> Shards:
    """Random fp32 tensors of the shapes that the stage with the most parameters has on one tensor rank."""
    shape, stages = model_shape(load_hf_config(Path(config.model.path))), []
    split = layer_split(shape.layers, config.parallel.pipeline)
    with HFReader(Path(config.model.path)) as reader:
        for stage, count in enumerate(split):
            start = sum(split[:stage])
            weights = stage_weights(
                reader,
                shape,
                range(start, start + count),
                first=stage == 0,
                last=stage == len(split) - 1,
                tensor_rank=0,
                tensor_size=config.parallel.tensor,
                dtype=torch.float32,
            )
            stages.append([torch.randn_like(weight) for _, weight in weights])
    return max(stages, key=lambda shards: sum(shard.numel() for shard in shards))


def median_seconds(work: Callable[[], object]) -> float:
    """Median time of ``work`` over REPEATS calls, after one that is not counted."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Ends:
    """One micro-batch at one boundary, each end by itself, as the pipeline's communicator does it.

    A rank sends one way and receives the other at each of its boundaries, so a pair of ``send`` and ``receive`` is
    what one boundary costs one rank.
    """

    def __init__(self, codecs: BoundaryCodecs, rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._crossing, self._dtype, self._ledger = Crossing(codecs), dtype, Ledger()
        columns = min(rows, COLUMNS)
        tokens_BS = torch.zeros(rows // columns, columns, dtype=torch.int64)
        self._rows = carrying_rows(torch.ones_like(tokens_BS, dtype=torch.bool), tokens_BS)
        self._x_NH = torch.randn(len(self._rows), hidden, dtype=dtype)

    def send(self, way: Direction, plan: Pass) -> float:
        """Seconds to encode and count, and to measure or learn where the pass does."""

        def work() -> None:
            encoded = self._crossing.encode(way, self._x_NH, self._rows, plan)
            size = self._x_NH.numel() * BFLOAT16_BYTES
            self._ledger.add("pipeline", plan.kind, way, sent=encoded.payload.nbytes, dense=size)

        return median_seconds(work)

    def receive(self, way: Direction, plan: Pass) -> float:
        """Seconds to make room and decode, and to learn where the pass does."""
        arrived = self._crossing.encode(way, self._x_NH, self._rows, plan).payload

        def work() -> None:
            self._crossing.blank(way, self._rows, plan)
            self._crossing.decode(way, arrived, self._rows, plan, self._dtype)

        return median_seconds(work)

    def pair(self, plan: Pass) -> float:
        """Forward one way, backward the other, for the end of the boundary that pays more."""
        return max(self.send(out, plan) + self.receive(back, plan) for out, back in (WAYS, WAYS[::-1]))

    def refresh(self) -> float:
        """Seconds to stage what was learned and to hash it, over both directions."""

        def work() -> None:
            for _, learner in self._crossing.codecs.learners():
                learner.stage()
                digest(learner.flat())

        for _, learner in self._crossing.codecs.learners():
            learner.observe(self._x_NH, self._rows)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def circuit_seconds(config: Config, sizes: Sizes) -> dict[str, float]:
    """Seconds that codec, ledger and merger take of one step, on the rank with the most to do, by part.

    codec_train: fast passes of every tick, with the Q error, and the old-log-prob passes of all but the first tick
        (of all under ``boundary.commit: tick``). codec_anchor: the anchor's crossings with their sketches, and the QR
        and hash of each refresh, by cadence. codec_rollout: prompts and, as if no response ended early, every column.
        ledger: a tick's counts made into metrics. merger: M at fires, agreement and merge at ticks.
    """
    ticks, micros = config.grpo.minibatches, config.micro_batches
    boundaries = min(2, config.parallel.pipeline - 1)
    fires = ticks / config.anchor.cadence if config.anchor.enabled else 0.0
    dtype = DTYPES[config.model.dtype]
    embedding_VH = torch.randn(1, sizes.hidden)
    codecs = build_codecs(config.boundary, hidden=sizes.hidden, index=0, seed=0, embedding_VH=embedding_VH)
    whole = Ends(codecs, sizes.rows, sizes.hidden, dtype)
    old_passes = ticks if config.boundary.commit == "tick" else ticks - 1
    read = Pass("old_logprob")
    old = max(whole.send("forward", read), whole.receive("forward", read))
    anchor = micros * whole.pair(Pass("anchor", dense=True, observe="both")) + whole.refresh()
    live = config.sequences_per_step // (config.parallel.data * config.in_flight)
    column = Ends(codecs, max(1, live), sizes.hidden, dtype)
    sampled = Pass("rollout", dense=config.rollout.path == "dense")
    columns = sizes.columns * max(column.send("forward", sampled), column.receive("forward", sampled))
    sampling = config.in_flight * columns + ticks * micros * old
    return {
        "codec_train": boundaries * micros * (ticks * whole.pair(Pass("fast")) + old_passes * old),
        "codec_anchor": boundaries * fires * anchor,
        "codec_rollout": boundaries * sampling,
        "ledger": ticks * median_seconds(lambda: byte_metrics(Ledger().take())),
        "merger": merger_seconds(config, sizes.shards, fires=fires, ticks=ticks),
    }


def merger_seconds(config: Config, shards: Shards, *, fires: float, ticks: int) -> float:
    """Seconds of the merge in one step: M and the merger's own state at fires, agreement and merge at every tick."""
    if not config.anchor.enabled:
        return 0.0
    memory, merger = build_memory(config.anchor, config.merger), build_merger(config.merger)
    fast = [torch.randn_like(shard) for shard in shards]

    def arrive() -> None:
        merger.arrive(memory.arrive(shards), fast)

    def merge() -> None:
        for gradient, anchor in zip(fast, shards, strict=True):
            agreement_sums(gradient, anchor)
        merger.merge(fast, shards, fade=1.0, mean=None)

    return fires * median_seconds(arrive) + ticks * median_seconds(merge)


def start_seconds(code: str) -> float:
    """Best time of STARTS fresh interpreters that run ``code``."""
    times = []
    for _ in range(STARTS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        times.append(time.perf_counter() - start)
    return min(times)


def judged(values: dict[str, float]) -> dict[str, dict[str, float | bool]]:
    """Each value beside its goal."""
    return {key: {"value": value, "goal": GOALS[key], "met": value <= GOALS[key]} for key, value in values.items()}


def measure(config_path: Path, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """The whole report."""
    config = load_config(config_path, list(overrides))
    with tempfile.TemporaryDirectory() as folder:
        rows, summary = run_training(config_path, overrides, steps, Path(folder) / "run")
    torch.set_num_threads(config.parallel.threads)
    seconds = step_times(rows, config.grpo.minibatches)
    circuit = circuit_seconds(config, run_sizes(rows, config))
    share = sum(circuit.values()) / seconds["step"]["whole"]
    cli = start_seconds("import megatron_grpo.cli") - start_seconds("pass")
    peaks = summary["peak_memory_mb"]
    goals = judged(
        {
            "seconds_per_tick": seconds["tick"]["whole"],
            "peak_memory_gib": max(peaks) / 1024,
            "circuit_share": share,
            "cli_import_seconds": cli,
        }
    )
    return {
        "config": str(config_path),
        "overrides": list(overrides),
        "ranks": config.world_size,
        "steps_measured": steps - 1,
        "seconds_per_step": seconds["step"],
        "seconds_per_tick": seconds["tick"],
        "response_tokens_per_second": throughput(rows, config),
        "peak_memory_mb": peaks,
        "circuit_seconds_per_step": circuit,
        "circuit_measured_by": "the same functions on tensors of the run's sizes, in one process, median times",
        "goals": goals,
    }


def main() -> int:
    """Print the report; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG)
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=6, help="steps to train, the dropped first one included")
    parser.add_argument("--fit", action="store_true", help="how far the plan's step time is from measured steps")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 2:
        parser.error("--steps: the first step is dropped; give at least 2")
    report = (
        fit_report(run_training, arguments.config)
        if arguments.fit
        else measure(arguments.config, arguments.overrides, arguments.steps)
    )
    print(json.dumps(report, indent=2))
    return 0 if all(goal["met"] for goal in report["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
