"""Where ranks stand and what joins them: hosts in the hostfile's order, and the rate of every link.

Ranks fill the hosts in their order: rank = (stage x data + replica) x tensor + shard, as ``parallel.groups.Layout``
numbers them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from megatron_grpo.config import Config, ConfigError
from megatron_grpo.launch.hosts import Host, rank_hosts, select
from megatron_grpo.parallel.placement import check_tensor_hosts

FRAME = 1514 / 1448
"""Bytes on an Ethernet wire for each byte of a long TCP message."""


UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_rate(text: str, option: str) -> float:
    """Bits a second of ``100mbit`` and the like, as ``tc`` writes rates. Errors: ConfigError naming ``option``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|tbit)", text.lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option}={text}: is no rate; write a number above 0 and kbit, mbit, gbit or tbit: 100mbit")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Line:
    """What a message between two ranks meets: bits a second, which ``shared`` pairs of ranks use at the same time, and
    seconds until it begins."""

    bit_s: float = inf
    latency_s: float = 0.0
    shared: int = 1

    def seconds(self, payload: float) -> float:
        """Until so many bytes have arrived."""
        return self.latency_s + 8 * FRAME * payload * self.shared / self.bit_s if payload else 0.0

    def ring(self, payload: float, ranks: int) -> float:
        """All-reduce of so many bytes a rank: each hands on 2 (ranks - 1) / ranks of them, in as many messages."""
        return self._around(payload, ranks, 2 * (ranks - 1))

    def gather(self, payload: float, ranks: int) -> float:
        """All-gather, or reduce-scatter, of so many bytes in all: half a ring."""
        return self._around(payload, ranks, ranks - 1)

    def _around(self, payload: float, ranks: int, messages: int) -> float:
        return messages * self.seconds(payload / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """The links as one rank sees them.

    Attributes:
        boundaries: between neighbouring stages, first to last.
        embedding: between the first and the last stage.
    """

    boundaries: tuple[Line, ...]
    tensor: Line = Line()
    data: Line = Line()
    embedding: Line = Line()

    @classmethod
    def perfect(cls, pipeline: int) -> "Network":
        """One on which nothing takes time."""
        return cls((Line(),) * (pipeline - 1))


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the links between hosts, and of those inside one: bits a second, and seconds until a message begins."""

    link_bit_s: float
    latency_s: float = 0.0
    local_bit_s: float = inf
    local_latency_s: float = 0.0

    def line(self, *, between: bool, shared: int = 1) -> Line:
        """A link that ``shared`` pairs of ranks use at the same time, if it is one between hosts."""
        if between:
            return Line(self.link_bit_s, self.latency_s, shared)
        return Line(self.local_bit_s, self.local_latency_s)


@dataclass(frozen=True, slots=True)
class Placement:
    """The policy's ranks on hosts; with no hosts given, stages are taken to be far apart and all else to be near.

    Attributes:
        names: host of each rank; empty where hosts are not known.
    """

    pipeline: int
    data: int
    tensor: int
    names: tuple[str, ...] = ()

    def ranks(self, stage: int) -> range:
        """Of a stage: all replicas, all tensor shards."""
        width = self.data * self.tensor
        return range(stage * width, (stage + 1) * width)

    def boundary_shared(self, lower: int, upper: int) -> int:
        """Replicas whose messages between two stages leave or reach the same host at the same time; 0: none leaves
        one."""
        if not self.names:
            return 1
        starts = [(replica * self.tensor) for replica in range(self.data)]
        low, high = self.ranks(lower), self.ranks(upper)
        pairs = [(self.names[low[i]], self.names[high[i]]) for i in starts]
        apart = [pair for pair in pairs if pair[0] != pair[1]]
        return max(_most(sender for sender, _ in apart), _most(receiver for _, receiver in apart))

    def data_shared(self) -> int:
        """Data-parallel groups with ranks on several hosts that meet on the same one; 0: all are inside hosts."""
        if not self.names or self.data == 1:
            return 0
        groups = [
            {self.names[rank] for rank in self.ranks(stage)[shard :: self.tensor]}
            for stage in range(self.pipeline)
            for shard in range(self.tensor)
        ]
        return _most(host for hosts in groups if len(hosts) > 1 for host in hosts)

    def network(self, rates: Rates) -> Network:
        """Every link at its rate; tensor ranks are on one host."""
        shared = [self.boundary_shared(stage, stage + 1) for stage in range(self.pipeline - 1)]
        ends = self.boundary_shared(0, self.pipeline - 1) if self.pipeline > 1 else 0
        groups = self.data_shared()
        return Network(
            boundaries=tuple(rates.line(between=count > 0, shared=count) for count in shared),
            tensor=rates.line(between=False),
            data=rates.line(between=groups > 0, shared=groups),
            embedding=rates.line(between=ends > 0, shared=ends),
        )


def _most(hosts: Iterable[str]) -> int:
    return max(Counter(hosts).values(), default=0)


def placement_of(config: Config, hosts: Sequence[Host] = ()) -> Placement:
    """Where the ranks of ``config`` come to stand.

    Raises:
        ConfigError: the hosts have too few slots, or a tensor-parallel group would straddle two of them.
    """
    parallel = config.parallel
    names = rank_hosts(select(hosts))
    if hosts and len(names) < config.world_size:
        raise ConfigError(
            f"--hostfile: {len(hosts)} hosts have {len(names)} slots and the config needs {config.world_size} ranks; "
            "add hosts, or change parallel"
        )
    placement = Placement(config.pipeline_ranks, parallel.data, parallel.tensor, tuple(names[: config.world_size]))
    check_tensor_hosts(placement.names, parallel.tensor)
    return placement
