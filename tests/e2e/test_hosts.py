"""Runs across hosts: network namespaces with an address, a host name and a slow link each, as root."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.test_run import ROOT, SMOKE, rows_of
from tools.bench.namespaces import INTERFACE, PACKET_OVERHEAD, Counters, Site, network, why_not

REFUSED = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))]

KINDS = ("fast", "old_logprob", "anchor", "basis", "rollout")
IPV6_MORE = 20
ENDS_WITHIN_S = 20.0

Command = Callable[[Path, int, Site, list[str]], list[str]]


def own_command(hostfile: Path, node: int, first: Site, arguments: list[str]) -> list[str]:
    address = f"[{first.address}]" if ":" in first.address else first.address
    where = ["--hostfile", str(hostfile), "--no-ssh", "--node-rank", str(node), "--master-addr", address]
    return [sys.executable, "-m", "megatron_grpo", *arguments, *where]


def deepspeed_command(hostfile: Path, node: int, first: Site, arguments: list[str]) -> list[str]:
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile)]
    where = ["--no_ssh", "--node_rank", str(node), "--master_addr", first.address]
    return [*launcher, *where, "--module", "megatron_grpo", *arguments]


@dataclass(frozen=True, slots=True)
class Run:
    """A run with one rank a host. ``folder`` has a space in its name, and so have the paths that ranks are given."""

    folder: Path
    sites: list[Site]
    launchers: list[subprocess.Popen[str]]

    def output(self, node: int) -> str:
        return (self.folder / f"host {node}.txt").read_text()

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Until the first host has said so."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(0):
            if time.monotonic() > deadline or self.launchers[0].poll() is not None:
                pytest.fail(f"{text!r} was not said\n" + "\n".join(map(self.output, range(len(self.sites)))))
            time.sleep(0.02)

    def counters(self) -> list[Counters]:
        return [site.counters() for site in self.sites]

    def rank_pid(self, node: int) -> int:
        """The process of the rank on that host: with one rank a host, the last that knows the run directory."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.sites[node].namespace], capture_output=True, text=True, check=True
        ).stdout.split()
        ranks = [pid for pid in listed if b"\nRANK=" in b"\n" + environ(pid).replace(b"\0", b"\n")]
        assert ranks, "no process has a rank"
        return max(map(int, ranks))


def environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended since
        return b""


def start(sites: list[Site], folder: Path, command: Command, overrides: list[str]) -> Run:
    """Start a run with one rank on each host; the network kills what is left of it."""
    folder = folder / "with space"
    folder.mkdir()
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{site.name} slots=1\n" for site in sites))
    arguments = ["train", SMOKE, f"parallel.interface={INTERFACE}", *overrides, "--run-dir", str(folder / "run")]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launchers = []
    for node, site in enumerate(sites):
        with (folder / f"host {node}.txt").open("w") as log:
            ready = command(hostfile, node, sites[0], arguments)
            launchers.append(site.popen(ready, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    return Run(folder, sites, launchers)


LAST = 31
"""Step to whose end is counted, from that of the first: so many that it hardly matters when a counter is read."""


@pytest.mark.parametrize(
    ("count", "ipv6", "command"),
    [
        pytest.param(2, False, own_command, id="two"),
        pytest.param(2, True, own_command, id="two_ipv6"),
        pytest.param(4, False, deepspeed_command, id="four_deepspeed"),
    ],
)
def test_the_kernel_counts_what_the_ledger_counts(tmp_path: Path, count: int, ipv6: bool, command: Command) -> None:
    """Between two steps the interfaces send, less 66 bytes a packet (IPv6: 86), what the rows say, within 3 %.

    Ids, sums of metrics, beats and gloo's headers cross as well. They depend on the number of tokens, columns and ticks
    alone: 25 kB a step here, and the ranks are chosen so that this is little.
    """
    steps = [
        f"train.steps={LAST + 2}",
        "train.eval_every=100",
        "train.save_every=100",
        "boundary.rank=48",
        "logging.timeline=false",
    ]
    with network(count, rate="100mbit", ipv6=ipv6) as sites:
        run = start(sites, tmp_path, command, [*steps, f"parallel.pipeline={count}"])
        run.wait_for("step 1 ")
        before = run.counters()
        run.wait_for(f"step {LAST} ")
        after = run.counters()
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [0] * count, run.output(0)
    rows = [row for row in rows_of(run.folder / "run") if 1 <= row["step"] < LAST]
    counted = sum(row.get(f"boundary/bytes_{kind}", 0.0) for row in rows for kind in KINDS)
    overhead = PACKET_OVERHEAD + IPV6_MORE * ipv6
    seen = sum((late - early).sent_payload(overhead) for early, late in zip(before, after, strict=True))
    assert len(rows) == 2 * (LAST - 1) and counted > 1e7
    assert seen == pytest.approx(counted, rel=0.03)


def test_a_killed_rank_ends_the_run_on_every_host_and_is_named(tmp_path: Path) -> None:
    """Case G4 over hosts: SIGKILL leaves no traceback, and an address says neither rank nor host."""
    overrides = ["parallel.pipeline=4", "train.steps=400"]
    with network(4, rate="100mbit") as sites:
        run = start(sites, tmp_path, own_command, overrides)
        run.wait_for("step 1 ")
        os.kill(run.rank_pid(2), signal.SIGKILL)
        killed = time.monotonic()
        codes = [launcher.wait(timeout=60) for launcher in run.launchers]
        assert time.monotonic() - killed < ENDS_WITHIN_S
        assert 0 not in codes
        for node in (0, 1, 3):
            assert "rank 2 on host site2 does not answer" in run.output(node), run.output(node)


def test_a_rank_that_fails_is_quoted_on_the_other_host(tmp_path: Path) -> None:
    """Case G4 over hosts, with an exception: its own host has the traceback, the other its last line."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import megatron_grpo.anchor.schedule as schedule\n"
        "    def fires(self, tick):\n"
        "        raise RuntimeError('rank 1 breaks here')\n"
        "    schedule.AnchorSchedule.fires = fires\n"
    )

    def breaking(hostfile: Path, node: int, first: Site, arguments: list[str]) -> list[str]:
        return ["env", f"PYTHONPATH={tmp_path}:{ROOT}", *own_command(hostfile, node, first, arguments)]

    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, breaking, [])
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [1, 1]
        assert "Traceback" in run.output(1) and "rank 1 breaks here" in run.output(1)
        assert "rank 1 on host site1 failed: RuntimeError: rank 1 breaks here" in run.output(0), run.output(0)


def test_a_host_that_falls_silent_ends_the_run(tmp_path: Path) -> None:
    """A link that is cut closes no connection: both sides wait ``parallel.timeout_s`` and then name the other."""
    timeout_s = 8.0
    overrides = [f"parallel.timeout_s={timeout_s}", "train.steps=400"]
    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, own_command, overrides)
        run.wait_for("step 1 ")
        sites[1].cut()
        silent = time.monotonic()
        assert [launcher.wait(timeout=60) for launcher in run.launchers] == [1, 1]
        assert timeout_s - 2 < time.monotonic() - silent < timeout_s + ENDS_WITHIN_S
        assert "rank 1 on host site1 does not answer" in run.output(0), run.output(0)
        assert "rank 0 on host site0 does not answer" in run.output(1), run.output(1)


def test_a_wrong_interface_is_said_before_anything_starts(tmp_path: Path) -> None:
    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, own_command, ["parallel.interface=eth7"])
        assert [launcher.wait(timeout=60) for launcher in run.launchers] == [2, 2]
        assert run.output(1).startswith(
            "config error: parallel.interface=eth7: site1 has no such interface; use one of lo, eth0"
        )
        assert not (run.folder / "run").exists()


def test_rows_are_those_of_the_same_run_on_one_host(tmp_path: Path) -> None:
    """Where the ranks are changes no number."""
    overrides = ["train.eval_every=100", "train.save_every=100"]
    with network(2, rate="1gbit") as sites:
        run = start(sites, tmp_path, own_command, overrides)
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [0, 0], run.output(0)
    local = tmp_path / "local"
    command = [sys.executable, "-m", "megatron_grpo", "train", SMOKE, *overrides, "--run-dir", str(local)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=120)

    def timeless(folder: Path) -> list[dict[str, float]]:
        slow = ("time/", "rollout/tokens")
        return [{key: value for key, value in row.items() if not key.startswith(slow)} for row in rows_of(folder)]

    assert timeless(run.folder / "run") == timeless(local)
    assert json.loads((local / "summary.json").read_text())["status"] == "finished"
