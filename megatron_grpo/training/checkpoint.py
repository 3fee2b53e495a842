"""Run checkpoints: the engine's own files, and beside them what each rank of ours must remember.

``engine/``: DeepSpeed's checkpoint. ``rank00000.pt``: Q, M, merger, snapshots, RNG of one rank (tensors and plain
values only, read with ``weights_only``), and where its shards lie in the parameters. ``run.json``: counters, topology.
``hf/``: config and tokenizer. A run goes on from these at the topology that wrote them, and from their universal form
(``conversion.universal``) at any.
"""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.anchor.snapshots import Snapshot
from megatron_grpo.boundary.build import DTYPES
from megatron_grpo.config import Config
from megatron_grpo.conversion.engine_files import EngineFiles, State
from megatron_grpo.conversion.formats import CARRIED, ENGINE, RUN_FILE
from megatron_grpo.conversion.fragments import Fragment, Kind, plain_fragments
from megatron_grpo.conversion.pickles import check_sums
from megatron_grpo.conversion.run_state import UniversalState, rank_file
from megatron_grpo.conversion.runs import Topology, read_run, stage_weights_of
from megatron_grpo.conversion.shards import slice_of
from megatron_grpo.conversion.universal import UniversalReader
from megatron_grpo.conversion.writer import carry_files
from megatron_grpo.ops.host import stored
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.training.files import CheckpointFolder, write_json_atomic
from megatron_grpo.training.loss import Replay
from megatron_grpo.training.policy import Policy
from megatron_grpo.training.resume import Progress, fixed_settings, refuse_code
from megatron_grpo.training.step import StepRunner


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
        dist.barrier(policy.groups.policy)
        target = folder.temporary(tick)
        with folder.writing(tick):
            policy.engine.save(target, ENGINE)
            torch.save(_rank_state(policy, steps), target / rank_file(policy.groups.rank))
        if leads:
            with folder.writing(tick):
                _carry(cfg, target / CARRIED)
            write_json_atomic(target / RUN_FILE, asdict(progress) | {"settings": fixed_settings(cfg)})
        dist.barrier(policy.groups.policy)
    dist.barrier(policy.groups.policy)


def _carry(cfg: Config, folder: Path) -> None:
    """What a reader of the checkpoint needs to know of the model."""
    folder.mkdir()
    tokenizer = Path(cfg.tokenizer.path or cfg.model.path)
    carry_files(Path(cfg.model.path), folder, dtype=DTYPES[cfg.model.dtype], tokenizer_dir=tokenizer)


def load_checkpoint(checkpoint: Path, policy: Policy, steps: StepRunner) -> None:
    """Restore what :func:`save_checkpoint` wrote. Collective: every rank.

    Raises:
        ConfigError: a file of this rank is damaged, or one of any rank asks to run something.
    """
    refuse_code(checkpoint)
    facts = read_run(checkpoint)
    files = EngineFiles(checkpoint / ENGINE, facts.topology.layout, facts.zero_stage, check=False)
    files.check_rank(policy.groups.at)
    check_sums(checkpoint / rank_file(policy.groups.rank))
    policy.engine.load(checkpoint, ENGINE)
    state = torch.load(checkpoint / rank_file(policy.groups.rank), weights_only=True, map_location="cpu")
    policy.boundaries.load_state_dict(_on(policy.device, state["boundaries"]))
    policy.boundaries.load_caches(state["caches"], steps.cache_settings, policy.device)
    if policy.engine.data_link is not None:
        policy.engine.data_link.load_state_dict(_on(policy.device, state["data_link"]))
    steps.load_state_dict(_with_snapshots(state["steps"], policy.device))
    torch.set_rng_state(state["rng"].cpu())


def load_universal(cfg: Config, checkpoint: Path, policy: Policy, steps: StepRunner) -> list[str]:
    """Restore a universal checkpoint at this run's topology. Collective: every rank.

    Returns:
        What could not be restored, each in a sentence.
    """
    groups, shape = policy.groups, policy.shape
    facts, topology = read_run(checkpoint), Topology(groups.layout, cfg.parallel.pipeline)
    reader = UniversalReader(checkpoint, facts, shape)
    mine = {x.megatron: x for x in stage_weights_of(shape, groups.layout.pipeline, groups.at.pipeline)}

    def slice_(name: str, state: State) -> torch.Tensor:
        return slice_of(reader.tensor(mine[name], state), mine[name], shape, groups.at.tensor, groups.layout.tensor)

    policy.engine.shards.load_masters(slice_, reader.step)
    universal = UniversalState(checkpoint, facts.topology)
    boundaries = universal.boundaries(groups.at, topology)
    if boundaries is None:
        steps.calibrate()
        if policy.boundaries.tensor is not None:
            policy.boundaries.tensor.load_state_dict(_on(policy.device, universal.tensor_link))
    else:
        policy.boundaries.load_state_dict(_on(policy.device, boundaries))
    data_link = universal.data_link(groups.at, topology)
    if policy.engine.data_link is not None and data_link is not None:
        policy.engine.data_link.load_state_dict(_on(policy.device, data_link))
    state = universal.steps(groups.at, topology, shape, _fragments(policy))
    steps.load_state_dict(_with_snapshots(_on(torch.device("cpu"), state), policy.device))
    kept = "rows kept of earlier rollouts are not in it: what an anchor replays of them crosses uncompressed"
    return [*universal.dropped(topology), *([kept] if steps.ticks.rollouts() else [])]


def _on(device: torch.device, value: Any) -> Any:
    """``value`` with every tensor in it on ``device``, unmapped."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return [_on(device, item) for item in value] if isinstance(value, list) else value


def _fragments(policy: Policy) -> dict[Kind, list[Fragment]]:
    return {"gradients": policy.engine.shards.gradient_fragments(), "weights": policy.engine.shards.weight_fragments()}


def _rank_state(policy: Policy, steps: StepRunner) -> dict[str, Any]:
    state = steps.state_dict()
    snapshots = state["ticks"]["snapshots"]
    snapshots["held"] = {tick: _plain(snapshot) for tick, snapshot in snapshots["held"].items()}
    return {
        "boundaries": policy.boundaries.state_dict(),
        "data_link": None if policy.engine.data_link is None else policy.engine.data_link.state_dict(),
        "steps": state,
        "rng": torch.get_rng_state(),
        "caches": policy.boundaries.caches_dict(steps.ticks.rollouts()),
        "fragments": plain_fragments(_fragments(policy)),
    }


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as nested dicts of tensors and numbers."""
    replay = _fields(snapshot.batch)
    return {**_fields(snapshot), "fast": stored(snapshot.fast), "batch": {**replay, "batch": _fields(replay["batch"])}}


def _with_snapshots(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The inverse of what :func:`_rank_state` did to the steps' state; replayed batches go to ``device``."""
    snapshots = state["ticks"]["snapshots"]
    snapshots["held"] = {tick: _snapshot(plain, device) for tick, plain in snapshots["held"].items()}
    return state


def _snapshot(plain: dict[str, Any], device: torch.device) -> Snapshot:
    replay = _on(device, plain["batch"])
    return Snapshot(plain["weights"], Replay(**{**replay, "batch": Batch(**replay["batch"])}), plain["fast"])
