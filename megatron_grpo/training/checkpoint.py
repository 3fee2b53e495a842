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
from megatron_grpo.config import Config, ConfigError
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.files import CheckpointFolder, write_json_atomic
from megatron_grpo.training.loss import Replay
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.step import StepRunner

ENGINE = "engine"
RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done (the data position follows from it), and what a resumed summary still needs."""

    steps: int
    validation_start: dict[str, float]


def fixed_settings(cfg: Config) -> dict[str, Any]:
    """What a checkpoint's state means only under: a run that goes on must have the same."""
    whole = cfg.dump()
    del whole["anchor"]["alarm"]  # a run that the alarm stopped may go on under another
    return {
        **{key: whole[key] for key in ("boundary", "anchor", "merger")},
        "parallel": {key: whole["parallel"][key] for key in ("tensor", "pipeline", "data", "placement")},
        "deepspeed": {"zero_stage": cfg.zero_stage},
        "model": {"dtype": cfg.model.dtype},
        "grpo": {"minibatches": cfg.grpo.minibatches},
        "train": {"seed": cfg.train.seed},
    }


def save_checkpoint(
    cfg: Config, folder: CheckpointFolder, policy: Policy, steps: StepRunner, progress: Progress
) -> None:
    """Write a checkpoint after the steps of ``progress``. Collective: every rank; rank 0 makes and renames the folder.

    Raises:
        CheckpointError: with a full disk; the earlier checkpoints stay.
    """
    tick = progress.steps * cfg.grpo.minibatches
    leads = policy.groups.rank == 0
    with folder.saving(tick) if leads else nullcontext():
        dist.barrier()
        target = folder.temporary(tick)
        with folder.writing(tick):
            policy.engine.save(target, ENGINE)
            torch.save(_rank_state(policy, steps), target / _rank_file(policy.groups.rank))
        if leads:
            write_json_atomic(target / RUN_FILE, asdict(progress) | {"settings": fixed_settings(cfg)})
        dist.barrier()
    dist.barrier()


def read_progress(checkpoint: Path, cfg: Config) -> Progress:
    """Where the run of ``checkpoint`` stood.

    Raises:
        ConfigError: it was written under settings that its state does not fit, each named.
    """
    state = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    written = state["settings"]
    differing = [
        f"{section}.{key}={value!r}: {checkpoint} was written with {written[section].get(key)!r}; resume with the same"
        for section, values in fixed_settings(cfg).items()
        for key, value in values.items()
        if written[section].get(key) != value
    ]
    if differing:
        raise ConfigError("\n".join(differing))
    return Progress(state["steps"], state["validation_start"])


def load_checkpoint(checkpoint: Path, policy: Policy, steps: StepRunner) -> None:
    """Restore what :func:`save_checkpoint` wrote. Collective: every rank."""
    policy.engine.load(checkpoint, ENGINE)
    state = torch.load(checkpoint / _rank_file(policy.groups.rank), weights_only=True, map_location=policy.device)
    policy.boundaries.load_state_dict(state["boundaries"])
    snapshots = state["steps"]["ticks"]["snapshots"]
    snapshots["held"] = {tick: _snapshot(plain) for tick, plain in snapshots["held"].items()}
    steps.load_state_dict(state["steps"])
    torch.set_rng_state(state["rng"].cpu())


def _rank_file(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def _rank_state(policy: Policy, steps: StepRunner) -> dict[str, Any]:
    state = steps.state_dict()
    held = state["ticks"]["snapshots"]["held"]
    state["ticks"]["snapshots"] = {"held": {tick: _plain(snapshot) for tick, snapshot in held.items()}}
    return {
        "boundaries": policy.boundaries.state_dict(),
        "steps": state,
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
