"""Which host a rank is on, and which interface it talks through. Imports no torch."""

import os
import socket
from collections.abc import Sequence

from megatron_grpo.config import ConfigError


def check_tensor_hosts(host_of_rank: Sequence[str], tensor: int) -> None:
    """Every stage's tensor ranks must be on one host: they exchange whole activations in every layer.

    Errors: ConfigError naming the first group that is not, its ranks and hosts.
    """
    for first in range(0, len(host_of_rank), tensor):
        hosts = list(dict.fromkeys(host_of_rank[first : first + tensor]))
        if len(hosts) > 1:
            raise ConfigError(
                f"parallel.tensor={tensor}: ranks {first} to {first + tensor - 1} share a stage and would be on hosts "
                f"{' and '.join(hosts)}; give every host a multiple of {tensor} ranks"
            )


def use_interface(name: str | None) -> None:
    """Let gloo and NCCL talk through the network interface ``name``, from now on; None leaves the choice to them.

    Errors: ConfigError when this host has no such interface, with those that it has.
    """
    if name is None:
        return
    present = [interface for _, interface in socket.if_nameindex()]
    if name not in present:
        raise ConfigError(
            f"parallel.interface={name}: {socket.gethostname()} has no such interface; use one of {', '.join(present)}"
        )
    os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=f"={name}")  # NCCL takes a bare name as a prefix
