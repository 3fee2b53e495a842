"""Runs across hosts: network namespaces with an address, a host name and a slow link each, as root."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.test_run import ROOT, SMOKE, rows_of
from tools.bench.namespaces import INTERFACE, PACKET_OVERHEAD, Counters, Site, network, why_not

pytestmark = pytest.mark.slow

KINDS = ("fast", "old_logprob", "anchor", "basis", "rollout")
IPV6_MORE = 20
ENDS_WITHIN_S = 20.0

Command = Callable[[Path, int, Site, list[str]], list[str]]


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    """Network namespaces can be made here."""
    refused = why_not()
    if refused is not None:
        pytest.skip(refused)


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
    """A run on some hosts. ``folder`` has a space in its name, and so have the paths that ranks are given."""

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


def start(
    sites: list[Site],
    folder: Path,
    command: Command,
    overrides: list[str],
    *,
    slots: int = 1,
    absent: Container[int] = (),
) -> Run:
    """Start a run with so many ranks on each host that is not ``absent``; the network kills what is left of it."""
    folder = folder / "with space"
    folder.mkdir()
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{site.name} slots={slots}\n" for site in sites))
    arguments = ["train", SMOKE, f"parallel.interface={INTERFACE}", *overrides, "--run-dir", str(folder / "run")]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launchers = []
    for node, site in enumerate(sites):
        with (folder / f"host {node}.txt").open("w") as log:
            ready = command(hostfile, node, sites[0], arguments)
            if node not in absent:
                launchers.append(site.popen(ready, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    return Run(folder, sites, launchers)


LAST = 31
"""Step to whose end is counted, from that of the first: so many that it hardly matters when a counter is read."""


@pytest.mark.parametrize(
    ("count", "tensor", "ipv6", "command"),
    [
        pytest.param(2, 1, False, own_command, id="two"),
        pytest.param(2, 1, True, own_command, id="two_ipv6"),
        pytest.param(2, 2, False, own_command, id="two_of_two"),
        pytest.param(4, 1, False, deepspeed_command, id="four_deepspeed"),
    ],
)
def test_the_kernel_counts_what_the_ledger_counts(
    tmp_path: Path, count: int, tensor: int, ipv6: bool, command: Command
) -> None:
    """Between two steps the interfaces send, less 66 bytes a packet (IPv6: 86), what the rows say, within 3 %.

    Ids, sums of metrics, beats and gloo's headers cross as well. They depend on the number of tokens, columns and ticks
    alone: 25 kB a step here and pair of ranks, and the bases' ranks are chosen so that this is little. Tensor ranks
    exchange what they do inside a host.
    """
    steps = [
        f"train.steps={LAST + 2}",
        "train.eval_every=100",
        "train.save_every=100",
        f"boundary.rank={48 * tensor}",
        "logging.timeline=false",
    ]
    stages = [f"parallel.pipeline={count}", f"parallel.tensor={tensor}"]
    with network(count, rate="100mbit", ipv6=ipv6) as sites:
        run = start(sites, tmp_path, command, [*steps, *stages], slots=tensor)
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


def with_rank_1(folder: Path, *lines: str) -> Command:
    """The command of a run whose rank 1 has run these lines first."""
    body = "\n    ".join(["if os.environ.get('RANK') == '1':", *lines])
    (folder / "sitecustomize.py").write_text(f"import os\n{body}\n")

    def command(hostfile: Path, node: int, first: Site, arguments: list[str]) -> list[str]:
        return ["env", f"PYTHONPATH={folder}:{ROOT}", *own_command(hostfile, node, first, arguments)]

    return command


def test_a_rank_that_fails_is_quoted_on_the_other_host(tmp_path: Path) -> None:
    """Case G4 over hosts, with an exception: its own host has the traceback, the other its last line."""
    breaking = with_rank_1(
        tmp_path,
        "import megatron_grpo.anchor.schedule as schedule",
        "def fires(self, tick):",
        "    raise RuntimeError('rank 1 breaks here')",
        "schedule.AnchorSchedule.fires = fires",
    )
    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, breaking, [])
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [1, 1]
        assert "Traceback" in run.output(1) and "rank 1 breaks here" in run.output(1)
        assert "rank 1 on host site1 failed: RuntimeError: rank 1 breaks here" in run.output(0), run.output(0)


def test_a_config_error_of_one_host_is_one_of_all(tmp_path: Path) -> None:
    """A tokenizer that is another one there, say: found when all have met, and said everywhere, with exit code 2."""
    refusing = with_rank_1(
        tmp_path,
        "import megatron_grpo.backends.reward_models as models",
        "from megatron_grpo.config import ConfigError",
        "def check(cfg):",
        "    raise ConfigError('data.chat=true: the tokenizer here has no chat template')",
        "models.check_reward_models = check",
    )
    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, refusing, [])
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [2, 2], run.output(0)
        said = "data.chat=true: the tokenizer here has no chat template"
        assert f"rank 1 on host site1: {said}" in run.output(0), run.output(0)
        assert said in run.output(1) and "does not answer" not in run.output(1), run.output(1)


@pytest.mark.parametrize(("absent", "command"), [(0, own_command), (1, deepspeed_command)])
def test_a_host_that_never_comes_is_named(tmp_path: Path, absent: int, command: Command) -> None:
    """By its name, though nobody has heard of it; and the first one, which all are to meet at, by its address, too."""
    with network(2, rate="100mbit") as sites:
        run = start(sites, tmp_path, command, ["parallel.timeout_s=5", "parallel.data=2"], slots=2, absent=[absent])
        assert [launcher.wait(timeout=120) for launcher in run.launchers] == [1], run.output(1 - absent)
    said = run.output(1 - absent)
    if absent:
        assert "2 of 4 ranks have not come: ranks 2, 3 on host site1 after 5 s (parallel.timeout_s)" in said, said
    else:
        assert f"nobody answers at {sites[0].address}:29500, where rank 0 on host site0 should be" in said, said


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


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_over_hosts_is_that_on_one(tmp_path: Path, tensor: int) -> None:
    """Where the ranks are changes no number: tensor ranks share a host, the pipeline's boundary lies between two."""
    overrides = ["train.eval_every=100", "train.save_every=100", f"parallel.tensor={tensor}"]
    with network(2, rate="1gbit") as sites:
        run = start(sites, tmp_path, own_command, overrides, slots=tensor)
        assert [launcher.wait(timeout=240) for launcher in run.launchers] == [0, 0], run.output(0)
    local = tmp_path / "local"
    command = [sys.executable, "-m", "megatron_grpo", "train", SMOKE, *overrides, "--run-dir", str(local)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=240)

    def timeless(folder: Path) -> list[dict[str, float]]:
        slow = ("time/", "rollout/tokens")
        return [{key: value for key, value in row.items() if not key.startswith(slow)} for row in rows_of(folder)]

    assert timeless(run.folder / "run") == timeless(local)
    assert json.loads((local / "summary.json").read_text())["status"] == "finished"
    weights = [(folder / "policy/model.safetensors").read_bytes() for folder in (run.folder / "run", local)]
    assert weights[0] == weights[1]
