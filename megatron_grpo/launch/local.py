"""Start the ranks of a run on this machine, through DeepSpeed's node launcher.

The node launcher (``deepspeed.launcher.launch``) is what ``deepspeed`` itself starts on each machine: it sets
RANK, WORLD_SIZE and the meeting point, and ends every rank when one fails. It is started directly because the
outer ``deepspeed`` command, run locally, passes on neither signals nor the death of the node launcher.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import psutil

from megatron_grpo.config import ConfigError, ParallelConfig
from megatron_grpo.parallel.placement import use_interface

ENGINES = ("torch", "deepspeed", "megatron.core", "transformers")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_local(arguments: list[str], ranks: int, parallel: ParallelConfig) -> int:
    """Run ``python -m megatron_grpo ARGUMENTS`` on ``ranks`` local ranks; returns their exit code.

    The code is that of the first rank that failed, or 128 + N when signal N ended the run. SIGINT, SIGTERM
    and SIGHUP reach every rank as SIGTERM; a second one kills them.
    Errors: ConfigError when an engine is not installed or the GPUs do not suffice.
    """
    require_engines()
    use_interface(parallel.interface)
    devices = device_ids(ranks, parallel)
    slots = {"localhost": devices or [-1] * ranks}
    command = node_command(arguments, slots, node=0, address="127.0.0.1", port=free_port())
    return supervise(command, rank_environment(dict(os.environ), threads=None if devices else parallel.threads))


def supervise(command: list[str], environment: dict[str, str], *, elsewhere: bool = False) -> int:
    """Run a launcher in a process group of its own until it ends, passing signals on; the exit code of the run.

    Args:
        elsewhere: its ranks are no children of it, and it has its own way to end them.
    """
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    with _forwarding(launcher.pid, to_ranks=not elsewhere) as received:
        code = launcher.wait()
    with suppress(ProcessLookupError):  # what the launcher left behind, if it was killed itself
        os.killpg(launcher.pid, signal.SIGKILL)
    if received:
        return 128 + received[0]
    # A rank that a signal ended: the launcher exits with the signal's number, negative; one byte of that is 256 - N.
    signalled = -code if code < 0 else 256 - code if code > 256 - signal.NSIG else 0
    if signalled:
        sys.stderr.write(f"a rank was ended by signal {signalled}\n")
    return 128 + signalled if signalled else code


def require_engines() -> None:
    """Errors: ConfigError naming the packages that are not installed."""
    missing = [name for name in ENGINES if find_spec(name.partition(".")[0]) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not installed; run `pip install megatron-grpo` in this environment")


def device_ids(ranks: int, parallel: ParallelConfig) -> list[int]:
    """One GPU for each rank; empty when the run belongs on the CPU (no GPU, ``parallel.backend=gloo``, or
    DS_ACCELERATOR=cpu). Errors: ConfigError when there are GPUs but too few."""
    if on_cpu(parallel):
        return []
    visible = visible_gpus()
    if not visible:
        if parallel.backend == "nccl":
            raise ConfigError("parallel.backend=nccl: there is no GPU here; use auto or gloo")
        return []
    if len(visible) < ranks:
        raise ConfigError(
            f"parallel.backend={parallel.backend}: {ranks} ranks need {ranks} GPUs and this machine shows "
            f"{len(visible)}; use parallel.backend=gloo to run on the CPU, or start on several machines"
        )
    return visible[:ranks]


def on_cpu(parallel: ParallelConfig) -> bool:
    """Whether the run was told to stay on the CPU."""
    return parallel.backend == "gloo" or os.environ.get("DS_ACCELERATOR") == "cpu"


def visible_gpus(devices: Path = Path("/dev")) -> list[int]:
    """Indices of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, found by their device files.

    Errors: ConfigError where it names them otherwise, as DeepSpeed's launcher deals out numbers.
    """
    present = sorted(int(file.name[6:]) for file in devices.glob("nvidia*") if file.name[6:].isdigit())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(len(present)))
    if any(item.strip().startswith(("GPU-", "MIG-")) for item in chosen.split(",")):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={chosen}: names devices by identifier, which DeepSpeed's launcher cannot deal out; "
            "name them by number, or use parallel.backend=gloo to run on the CPU"
        )
    wanted = [int(item) for item in chosen.split(",") if item.strip().isdigit()]
    return [index for index in wanted if index < len(present)]


def cpu_threads(parallel: ParallelConfig) -> int | None:
    """CPU threads of a rank on this host; None where ranks run on GPUs."""
    return parallel.threads if on_cpu(parallel) or not visible_gpus() else None


def rank_environment(environment: dict[str, str], *, threads: int | None) -> dict[str, str]:
    """Variables of the ranks: Megatron wants one CUDA connection; on the CPU DeepSpeed must be told so, and
    ``threads`` (None on GPUs) is what each rank may use."""
    environment = environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if threads is not None:
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    return environment


def node_command(
    arguments: list[str], slots: Mapping[str, list[int]], *, node: int, address: str, port: int
) -> list[str]:
    """DeepSpeed's node launcher for host number ``node`` of ``slots``; ranks meet at ``address`` and ``port``.

    A host has one slot a rank, which becomes CUDA_VISIBLE_DEVICES; -1 hides every GPU.
    """
    world = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--quiet"]
    meeting = [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
    return [*launcher, *meeting, "--module", "--no_local_rank", "megatron_grpo", *arguments]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _forwarding(group: int, *, to_ranks: bool) -> Iterator[list[int]]:
    """While inside, pass signals on to the ranks of the launcher that leads ``group``; yields those received.

    With ``to_ranks`` the first one reaches the ranks alone, which end after their step, however long that takes: a
    launcher that was told itself would kill them after 30 s. The second one kills the group.
    """
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if to_ranks and not received:
            _terminate_ranks(group)
        else:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL if received else signal.SIGTERM)
        received.append(number)

    with handling_signals(forward):
        yield received


def _terminate_ranks(launcher: int) -> None:
    """SIGTERM to the children of a launcher, or to itself while it has none."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(launcher)
        for process in parent.children() or [parent]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()


@contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While inside, ``handle`` gets the signals that would end a run; handlers are put back after."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
