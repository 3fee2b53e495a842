"""Hosts that are network namespaces of this machine, joined by real links of a given rate. Needs root.

Two hosts share one veth pair; more of them hang on a bridge, in a namespace of its own, by a pair each. Every host has
an address, a host name and an interface ``eth0``. Every end of a pair sends through ``tc tbf``, so that the rate holds
for each direction of each link, and queues as much as TCP gives it: nothing is dropped.
"""

import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

PACKET_OVERHEAD = 66
"""Bytes of a packet that are not payload: Ethernet 14, IPv4 20, TCP with time stamps 32. IPv6 takes 20 more."""

INTERFACE = "eth0"
QUEUE_BYTES = 64 * 2**20
BURST_BYTES = 16_000


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel counted at a host's interface, each way."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) - getattr(before, name) for name in Counters.__slots__))

    def sent_payload(self, overhead: int = PACKET_OVERHEAD) -> int:
        """Bytes sent, less what each packet adds."""
        return self.sent_bytes - overhead * self.sent_packets


@dataclass(frozen=True, slots=True)
class Site:
    """A host: its namespace, name and address."""

    namespace: str
    name: str
    address: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on this host, in a process group of its own."""
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        return subprocess.Popen([*there, self.name, *command], text=True, start_new_session=True, **options)

    def counters(self) -> Counters:
        command = ["ip", "-n", self.namespace, "-s", "-j", "link", "show", INTERFACE]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sent, received = (json.loads(answer)[0]["stats64"][way] for way in ("tx", "rx"))
        return Counters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])

    def cut(self) -> None:
        """Take the interface down: nobody hears of this host any more, and nothing tells them so."""
        _run(f"ip -n {self.namespace} link set {INTERFACE} down")


def why_not() -> str | None:
    """Why no network can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    try:
        with network(2, rate="1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces with tc tbf are not permitted here: {error.stderr.strip()}"


@contextmanager
def network(count: int, *, rate: str | None, ipv6: bool = False) -> Iterator[list[Site]]:
    """``count`` hosts, each link limited to ``rate`` (as ``tc`` writes it: 10mbit) or, with None, to nothing.

    Errors: CalledProcessError of the command that is not permitted. All that was made is removed at the end, and what
    still runs there is killed.
    """
    mark = secrets.token_hex(3)
    subnet = ipaddress.ip_network("fd42::/64" if ipv6 else "10.42.0.0/24")
    sites = [Site(f"grpo-{mark}-{n}", f"site{n}", str(subnet[n + 1])) for n in range(count)]
    with ExitStack() as stack:
        for site in sites:
            _namespace(site.namespace, stack)
        if count == 2:
            ends = [site.namespace for site in sites]
            _run(f"ip link add {INTERFACE} netns {ends[0]} type veth peer name {INTERFACE} netns {ends[1]}")
        else:
            _bridge(f"grpo-{mark}-bridge", sites, rate, stack)
        for site in sites:
            _limit(site.namespace, INTERFACE, rate)
            within = f"ip -n {site.namespace}"
            _run(f"{within} link set {INTERFACE} addrgenmode none")  # one address: gloo takes the first it finds
            _run(f"{within} addr add {site.address}/{subnet.prefixlen} dev {INTERFACE}{' nodad' if ipv6 else ''}")
            _run(f"{within} link set {INTERFACE} up")
        yield sites


def _namespace(name: str, stack: ExitStack) -> None:
    _run(f"ip netns add {name}")
    stack.callback(_remove, name)
    _run(f"ip -n {name} link set lo up")


def _remove(namespace: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    for pid in listed.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run(f"ip netns del {namespace}")


def _bridge(name: str, sites: Sequence[Site], rate: str | None, stack: ExitStack) -> None:
    """Join the sites by a bridge in a namespace called ``name``."""
    _namespace(name, stack)
    _run(f"ip -n {name} link add hub type bridge")
    _run(f"ip -n {name} link set hub up")
    for number, site in enumerate(sites):
        port = f"port{number}"
        _run(f"ip link add {INTERFACE} netns {site.namespace} type veth peer name {port} netns {name}")
        _run(f"ip -n {name} link set {port} master hub up")
        _limit(name, port, rate)


def _limit(namespace: str, interface: str, rate: str | None) -> None:
    if rate is not None:
        shape = f"tbf rate {rate} burst {BURST_BYTES} limit {QUEUE_BYTES}"
        _run(f"tc -n {namespace} qdisc add dev {interface} root {shape}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
