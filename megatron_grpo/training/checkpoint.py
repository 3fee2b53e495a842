"""Run checkpoints: the engine's own files, and beside them what each rank of ours must remember.

``engine/``: DeepSpeed's checkpoint. ``rank00000.pt``: Q, M, merger, snapshots, RNG of one rank (tensors and plain
values only, read with ``weights_only``). ``run.json``: counters and topology.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.anchor.snapshots import Snapshot
from megatron_grpo.config import ConfigError
from megatron_grpo.parallel.groups import Layout
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.files import CheckpointFolder, tick_of, write_json_atomic
from megatron_grpo.training.loss import Replay
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.tick import TickRunner

ENGINE = "engine"
RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done (the data position follows from it), and what a resumed summary still needs."""

    steps: int
    validation_start: dict[str, float]
    seconds: float


def save_checkpoint(folder: CheckpointFolder, tick: int, policy: Policy, ticks: TickRunner, progress: Progress) -> None:
    """Write a checkpoint after ``tick`` ticks. Collective: every rank; rank 0 makes and renames the folder.

    Raises:
        CheckpointError: with a full disk; the earlier checkpoints stay.
    """
    leads = policy.groups.rank == 0
    with folder.saving(tick) if leads else nullcontext():
        dist.barrier()
        target = folder.temporary(tick)
        with folder.writing(tick):
            policy.engine.save(target, ENGINE)
            torch.save(_rank_state(policy, ticks), target / _rank_file(policy.groups.rank))
        if leads:
            topology = {"layout": asdict(policy.groups.layout), "zero_stage": policy.engine.zero_stage}
            write_json_atomic(target / RUN_FILE, asdict(progress) | topology)
        dist.barrier()
    dist.barrier()


def read_progress(checkpoint: Path, layout: Layout, zero_stage: int) -> Progress:
    """Where the run of ``checkpoint`` stood.

    Raises:
        ConfigError: it was written at another topology.
    """
    state = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    written = (state["layout"], state["zero_stage"])
    if written != (asdict(layout), zero_stage):
        raise ConfigError(
            f"--resume={checkpoint}: written with {written[0]} at ZeRO {written[1]}, this run has {asdict(layout)} at "
            f"ZeRO {zero_stage}; resume with the same parallel.* and deepspeed.config"
        )
    return Progress(state["steps"], state["validation_start"], state["seconds"])


def load_checkpoint(checkpoint: Path, policy: Policy, ticks: TickRunner) -> None:
    """Restore what :func:`save_checkpoint` wrote. Collective: every rank."""
    policy.engine.load(checkpoint, ENGINE)
    state = torch.load(checkpoint / _rank_file(policy.groups.rank), weights_only=True, map_location=policy.device)
    for key, boundary in _boundaries(policy):
        for codec, saved in zip(boundary.learners(), state["codecs"][key], strict=True):
            codec.load_state_dict(saved)
    held = state["ticks"]["snapshots"]["held"]
    state["ticks"]["snapshots"]["held"] = {tick: _snapshot(plain) for tick, plain in held.items()}
    ticks.load_state_dict(state["ticks"])
    torch.set_rng_state(state["rng"].cpu())


def completed_ticks(checkpoint: Path) -> int:
    """Ticks done before ``checkpoint`` was written."""
    return tick_of(checkpoint)


def _rank_file(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def _boundaries(policy: Policy) -> list[tuple[str, Any]]:
    sides = (("previous", policy.link.previous), ("following", policy.link.following))
    return [(key, boundary) for key, boundary in sides if boundary is not None]


def _rank_state(policy: Policy, ticks: TickRunner) -> dict[str, Any]:
    state = ticks.state_dict()
    held = state["snapshots"]["held"]
    state["snapshots"] = {"held": {tick: _plain(snapshot) for tick, snapshot in held.items()}}
    return {
        "codecs": {key: [codec.state_dict() for codec in side.learners()] for key, side in _boundaries(policy)},
        "ticks": state,
        "rng": torch.get_rng_state(),
    }


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as nested dicts of tensors and numbers."""
    replay = _fields(snapshot.batch)
    return {**_fields(snapshot), "batch": {**replay, "batch": _fields(replay["batch"])}}


def _snapshot(plain: dict[str, Any]) -> Snapshot:
    replay = plain["batch"]
    return Snapshot(plain["weights"], Replay(**{**replay, "batch": Batch(**replay["batch"])}), plain["fast"])
