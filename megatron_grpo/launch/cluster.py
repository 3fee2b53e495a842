"""Start the ranks of a run on several hosts: checks first, then DeepSpeed's own launcher.

With ``no_ssh`` the node launcher of this host is started, as ``deepspeed --no_ssh`` would; otherwise DeepSpeed's
runner, which reaches the hosts by pdsh, MPI or Slurm.
"""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config import Config, ConfigError
from megatron_grpo.launch.hosts import Slots, rank_hosts, read_hostfile, select
from megatron_grpo.launch.local import cpu_threads, node_command, rank_environment, require_engines, supervise
from megatron_grpo.parallel.placement import check_tensor_hosts, use_interface

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")

WHOLE_HOSTS_ONLY = ("openmpi", "mpich", "impi", "mvapich")
"""DeepSpeed's launchers that take no --include and no --exclude."""

TASKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""What Open MPI, MVAPICH and Slurm call rank, number of ranks and rank on this host."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where to start, as the options of ``train`` say it.

    Attributes:
        node: this host's place among the chosen ones, to start its ranks only; None: start all of them from here.
        address: of rank 0; IPv6 with or without brackets. None: the launcher finds it out.
    """

    hostfile: Path
    include: str = ""
    exclude: str = ""
    node: int | None = None
    launcher: str = "pdsh"
    launcher_args: str = ""
    address: str | None = None
    port: int = 29500


def node_of(hostfile: Path | None, *, no_ssh: bool, node_rank: int | None) -> int | None:
    """The host that ``--no-ssh --node-rank`` means. Errors: ConfigError when these options come without each other."""
    if hostfile is None and (no_ssh or node_rank is not None):
        raise ConfigError("--no-ssh: starts one of several hosts; add --hostfile")
    if no_ssh != (node_rank is not None):
        raise ConfigError("--no-ssh: and --node-rank=N belong together; give both")
    return node_rank


def start_on_hosts(arguments: list[str], cluster: Cluster, config: Config) -> int:
    """Run ``python -m megatron_grpo ARGUMENTS`` on every slot that ``cluster`` chooses; returns the exit code.

    Errors: ConfigError about hosts, slots, their number, tensor groups that would straddle hosts, or a launcher that
    cannot do what is asked.
    """
    require_engines()
    slots = choose(cluster, config)
    here = cluster.node
    if here is None and len(slots) == 1 and next(iter(slots)) in own_names():
        here = 0
    environment = rank_environment(dict(os.environ), threads=cpu_threads(config.parallel))
    if here is not None:
        use_interface(config.parallel.interface)
        return supervise(
            node_command(arguments, slots, node=here, address=meeting(cluster, slots), port=cluster.port), environment
        )
    if cluster.launcher != "pdsh":
        environment |= {"MASTER_ADDR": meeting(cluster, slots), "MASTER_PORT": str(cluster.port)}
    return supervise(runner_command(arguments, cluster, slots, config), environment, elsewhere=True)


def choose(cluster: Cluster, config: Config) -> Slots:
    """The slots of the run, one a rank. Errors: ConfigError as :func:`start_on_hosts` says."""
    slots = select(read_hostfile(cluster.hostfile), cluster.include, cluster.exclude)
    hosts = rank_hosts(slots)
    if len(hosts) != config.world_size:
        counts = ", ".join(f"{name} {len(numbers)}" for name, numbers in slots.items())
        raise ConfigError(
            f"--hostfile={cluster.hostfile}: has {len(hosts)} slots ({counts}) and the config needs "
            f"{config.world_size} ranks; every slot becomes a rank: choose with --include, or change parallel"
        )
    check_tensor_hosts(hosts, config.parallel.tensor)
    if cluster.node is not None and not 0 <= cluster.node < len(slots):
        raise ConfigError(
            f"--node-rank={cluster.node}: there are {len(slots)} hosts ({', '.join(slots)}); use 0 to {len(slots) - 1}"
        )
    if cluster.launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher={cluster.launcher}: is not known; use one of {', '.join(LAUNCHERS)}")
    numeric = next((name for name in slots if ":" in name), None)
    if numeric is not None and cluster.node is None and (cluster.include or cluster.exclude):
        raise ConfigError(
            f"--hostfile={cluster.hostfile}: DeepSpeed's runner takes the colon of {numeric} in --include for "
            "the beginning of slots; write a host file of those hosts, or name them"
        )
    if cluster.launcher in WHOLE_HOSTS_ONLY and (cluster.include or cluster.exclude):
        raise ConfigError(
            f"--launcher={cluster.launcher}: knows neither --include nor --exclude; write a host file of those hosts"
        )
    return slots


def own_names() -> tuple[str, ...]:
    """What a host file may call this host."""
    return ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def meeting(cluster: Cluster, slots: Mapping[str, list[int]]) -> str:
    """The address of rank 0, by default its host's name. torch takes IPv6 addresses without brackets."""
    return (cluster.address or next(iter(slots))).strip("[]")


def runner_command(arguments: list[str], cluster: Cluster, slots: Slots, config: Config) -> list[str]:
    """DeepSpeed's runner for all hosts; each launcher gets the arguments as it will leave them whole."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={cluster.hostfile}", "--force_multi"]
    command += [f"--launcher={cluster.launcher}", f"--master_port={cluster.port}", "--no_local_rank", "--quiet"]
    command += [f"--include={cluster.include}"] * bool(cluster.include)
    command += [f"--exclude={cluster.exclude}"] * bool(cluster.exclude)
    extra = cluster.launcher_args
    if cluster.launcher == "pdsh":
        if cluster.address:  # DeepSpeed asks the first host otherwise
            command.append(f"--master_addr={meeting(cluster, slots)}")
        arguments = [shell_word(argument) for argument in arguments]
    else:
        command += [f"--master_addr={meeting(cluster, slots)}", "--no_ssh_check"]
    if cluster.launcher == "openmpi":
        extra += " -x MASTER_ADDR -x MASTER_PORT"
        if config.parallel.interface:
            extra += f" --mca btl_tcp_if_include {shlex.quote(config.parallel.interface)}"
    command += [f"--launcher_args={extra.strip()}"] * bool(extra.strip())
    if cluster.launcher == "slurm":  # DeepSpeed's Slurm runner forgets --module
        return [*command, "--", "-m", "megatron_grpo", *arguments]
    return [*command, "--module", "megatron_grpo", *arguments]


def shell_word(argument: str) -> str:
    """``argument`` so that it survives pdsh and the shell at its other end.

    pdsh joins what it is given with spaces and replaces %h, %u and %n. DeepSpeed puts words with a space into double
    quotes and escapes those within, so that only the rest is left to do for them.
    """
    argument = argument.replace("%", "%%")
    if " " not in argument:
        return shlex.quote(argument)
    for special in ("\\", "$", "`"):
        argument = argument.replace(special, f"\\{special}")
    return argument


def adopt_rank(environment: MutableMapping[str, str]) -> None:
    """Where MPI or Slurm has started this process as one of several and the ranks' meeting point is named, give it
    the variables of a rank. A batch script without MASTER_ADDR is no rank."""
    if "RANK" in environment or not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return
    for rank, size, local in TASKS:
        if {rank, size, local} <= environment.keys():
            environment.update(RANK=environment[rank], WORLD_SIZE=environment[size], LOCAL_RANK=environment[local])
            return
