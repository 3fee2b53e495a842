"""Who is named as absent: ranks that are threads of one process and meet in torch's own store."""

import base64
import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_grpo.launch.local import free_port, node_command
from megatron_grpo.parallel import meeting
from megatron_grpo.parallel.meeting import Meeting, MeetingError, launched_hosts

HERE = socket.gethostname()
HOSTS = ["a", "a", "b", "b"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "POLL_S", 0.05)
    monkeypatch.setattr(meeting, "GRACE_S", 0.5)
    monkeypatch.setattr(meeting, "NOTE_S", 0.4)


def outcomes(ranks: Sequence[int], port: int, timeouts: Sequence[float], hosts: Sequence[str] = HOSTS) -> list[str]:
    """What each of these ranks of a world of four ends with: that it met the others, or why not."""

    def attend(rank: int, timeout_s: float) -> str:
        environment = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment["LOCAL_RANK"] = str(rank % 2)
        try:
            store = Meeting(environment, hosts, timeout_s).attend()
        except MeetingError as error:
            return str(error)
        store.set(f"{rank} was here", "")
        store.wait([f"{other} was here" for other in ranks])
        if store.add("left", 1) == len(ranks):
            store.set("all left", "")
        elif rank == 0:  # whose store it is
            store.wait(["all left"])
        return "met"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attend, ranks, timeouts))


def test_all_meet_in_the_store_of_rank_0() -> None:
    assert outcomes([3, 1, 0, 2], free_port(), [20.0] * 4) == ["met"] * 4


def test_whoever_is_absent_is_named_with_its_host(capfd: pytest.CaptureFixture[str]) -> None:
    """While the others wait, by one rank a host; and in the end, by all at the moment when the first gives up."""
    why = "2 of 4 ranks have not come: rank 1 on host a and rank 3 on host b after 1.5 s (parallel.timeout_s)"
    assert outcomes([0, 2], free_port(), [60.0, 1.5]) == [f"{why}; see what their hosts say"] * 2
    lines = capfd.readouterr().err.splitlines()
    waits = [line for line in lines if line.startswith(f"rank 0 on host {HERE} waits: 2 of 4 ranks have not come: ")]
    assert waits and all("rank 1 on host a and rank 3 on host b; " in line for line in waits)
    assert any(line.startswith(f"rank 2 on host {HERE} waits: ") for line in lines)


def test_ranks_of_unknown_hosts_are_named_and_those_of_one_host_together() -> None:
    port = free_port()
    assert "have not come: ranks 1, 2, 3 after" in outcomes([0], port, [0.5], hosts=[])[0]
    assert "have not come: rank 1 on host a and ranks 2, 3 on host b after" in outcomes([0], free_port(), [0.5])[0]


def test_where_rank_0_is_absent_its_address_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    (why,) = outcomes([2], port, [1.5])
    silence = f"nobody answers at 127.0.0.1:{port}, where rank 0 on host a should be ([Errno 111] Connection refused)"
    assert why == f"{silence}, after 1.5 s (parallel.timeout_s); see what its host says, and --master-addr"
    assert f"rank 2 on host {HERE} waits: {silence}; 1 s left\n" in capfd.readouterr().err


def test_hosts_are_those_that_the_launcher_was_told() -> None:
    command = node_command(["train", "x.yaml"], {"b": [0, 1], "fd00::7": [3]}, node=1, address="b", port=1)
    assert launched_hosts(command) == ["b", "b", "fd00::7"]
    world = base64.urlsafe_b64encode(json.dumps({"x": [0]}).encode()).decode()
    assert launched_hosts(["python", "-m", "launch", f"--world_info={world}"]) == ["x"]
    assert launched_hosts(["bash", "run.sh"]) == [] == launched_hosts([])
