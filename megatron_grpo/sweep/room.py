"""Which runs fit beside those under way, and on which GPUs."""

import os
from collections import Counter
from collections.abc import Sequence

from megatron_grpo.config import Config
from megatron_grpo.launch import device_ids, visible_gpus

Gpus = Sequence[int]


def place(cfg: Config, running: Sequence[tuple[Config, Gpus]], jobs: int | None) -> Gpus | None:
    """The GPUs for one more run (none on the CPU), or None while there is no room for it.

    Args:
        running: the runs under way, with their GPUs.
        jobs: runs at once. None: a GPU for every rank, or a core for every thread of every rank; one run always fits.
    """
    if jobs is not None and len(running) >= jobs:
        return None
    load = Counter(gpu for _, gpus in running for gpu in gpus)
    on_gpus = bool(device_ids(cfg.world_size, cfg.parallel))
    gpus = sorted(visible_gpus(), key=lambda gpu: load[gpu])[: cfg.world_size] if on_gpus else []
    if jobs is None and running:
        on_cpu = [other for other, theirs in running if not theirs]
        full = any(load[gpu] for gpu in gpus) if on_gpus else sum(map(threads_of, [*on_cpu, cfg])) > cores()
        if full:
            return None
    return gpus


def threads_of(cfg: Config) -> int:
    """CPU threads of all ranks of a run."""
    return cfg.world_size * cfg.parallel.threads


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
