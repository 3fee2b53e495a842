"""How the ranks of a run are started: on this machine (``local``), or on several (``hosts``, ``cluster``)."""

from .local import (
    cpu_threads,
    device_ids,
    handling_signals,
    rank_environment,
    require_engines,
    start_local,
    visible_gpus,
)

__all__ = [
    "cpu_threads",
    "device_ids",
    "handling_signals",
    "rank_environment",
    "require_engines",
    "start_local",
    "visible_gpus",
]
