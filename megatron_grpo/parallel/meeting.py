"""How the ranks of a run meet: each notes in the store of rank 0 that it has come, and who waits says who has not.

The host of a rank that has not come is known where DeepSpeed's launcher started this one: it is told all hosts.
"""

import base64
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby

import psutil
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # which __all__ lacks

NOTE_S = 30.0
POLL_S = 0.5
GRACE_S = 4 * POLL_S
"""Rank 0 stays for so long after the meeting has failed, so that all others are told why."""

FAILED = "meeting failed"
WORLD_INFO = "--world_info="


class MeetingError(RuntimeError):
    """Ranks have not come; the text names them."""


def meet(timeout_s: float) -> tuple[Store, int, int]:
    """Wait for the world that the launcher's environment describes: its store, this rank, the number of ranks.

    Every 30 s one rank a host says on stderr who is absent. Collective: every rank.

    Raises:
        MeetingError: some rank has not come within ``timeout_s`` seconds of the first that waited for it.
    """
    os.environ["MASTER_ADDR"] = os.environ["MASTER_ADDR"].strip("[]")  # of an IPv6 address; torch takes it bare
    meeting = Meeting(os.environ, launched_hosts(), timeout_s)
    return meeting.attend(), meeting.rank, meeting.size


def launched_hosts(command: Sequence[str] | None = None) -> list[str]:
    """The host of each rank, as DeepSpeed's node launcher was told; empty where something else started this process.

    Args:
        command: the launcher's command line; that of the parent by default.
    """
    if command is None:
        try:
            parent = psutil.Process().parent()
            command = [] if parent is None else parent.cmdline()
        except psutil.Error:
            command = []
    told = next((word.removeprefix(WORLD_INFO) for word in command if word.startswith(WORLD_INFO)), None)
    if told is None:
        return []
    return [host for host, slots in json.loads(base64.urlsafe_b64decode(told)).items() for _ in slots]


class Meeting:
    """One rank's part in it.

    Args:
        environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        hosts: of each rank, where they are known.
    """

    def __init__(self, environment: Mapping[str, str], hosts: Sequence[str], timeout_s: float) -> None:
        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._address, self._port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, which is there already
        self._serves = self.rank == 0 and not agent
        self._speaks = environment.get("LOCAL_RANK", "0") == "0"
        self._hosts = hosts if len(hosts) == self.size else ()
        self._timeout_s, self._began = timeout_s, time.monotonic()

    def attend(self) -> Store:
        """The store, once all ranks have come. Errors: MeetingError."""
        store = self._connect()
        store.set_timeout(timedelta(seconds=self._timeout_s))
        store.set(self._key(self.rank), socket.gethostname())
        keys = [self._key(rank) for rank in range(self.size)]
        noted = self._began
        try:
            while not store.check(keys):
                if store.check([FAILED]):
                    raise MeetingError(store.get(FAILED).decode())
                if self._left() <= 0:
                    self._give_up(store)
                if time.monotonic() - noted >= NOTE_S:
                    noted = time.monotonic()
                    self._say(self._absent(store))
                time.sleep(POLL_S)
        except DistError as error:
            gone = f"{self._name([0])} at {self._where()} has left before all ranks had met"
            raise MeetingError(f"{gone}; see what its host says") from error
        return store

    def _connect(self) -> TCPStore:
        if not self._serves:
            self._await_server()
        return TCPStore(
            *(self._address, self._port, self.size),
            is_master=self._serves,
            timeout=timedelta(seconds=max(self._left(), POLL_S)),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def _await_server(self) -> None:
        """Until somebody answers at rank 0's address: torch would wait in silence, or with a stack at every try."""
        noted = self._began
        while True:
            try:
                socket.create_connection(
                    (self._address, self._port), timeout=max(min(NOTE_S, self._left()), POLL_S)
                ).close()
                return
            except OSError as error:
                silence = f"nobody answers at {self._where()}, where {self._name([0])} should be ({error})"
                if self._left() <= 0:
                    after = f"after {self._timeout_s:g} s (parallel.timeout_s)"
                    raise MeetingError(f"{silence}, {after}; see what its host says, and --master-addr") from error
            if time.monotonic() - noted >= NOTE_S:
                noted = time.monotonic()
                self._say(silence)
            time.sleep(POLL_S)

    def _give_up(self, store: Store) -> None:
        """Tell the others, and end."""
        after = f"after {self._timeout_s:g} s (parallel.timeout_s)"
        why = f"{self._absent(store)} {after}; see what their hosts say"
        store.set(FAILED, why)
        if self._serves:
            time.sleep(GRACE_S)
        raise MeetingError(why)

    def _absent(self, store: Store) -> str:
        ranks = [rank for rank in range(self.size) if not store.check([self._key(rank)])]
        return f"{len(ranks)} of {self.size} ranks have not come: {self._name(ranks)}"

    def _name(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts, where these are known."""
        named = []
        for host, some in groupby(ranks, key=lambda rank: self._hosts[rank] if self._hosts else ""):
            numbers = list(some)
            word = "rank" if len(numbers) == 1 else "ranks"
            named.append(f"{word} {', '.join(map(str, numbers))}" + f" on host {host}" * bool(host))
        return " and ".join(named)

    def _say(self, what: str) -> None:
        if self._speaks:
            here = f"rank {self.rank} on host {socket.gethostname()} waits"
            sys.stderr.write(f"{here}: {what}; {max(self._left(), 0):.0f} s left\n")
            sys.stderr.flush()

    def _left(self) -> float:
        return self._timeout_s - (time.monotonic() - self._began)

    def _where(self) -> str:
        return f"[{self._address}]:{self._port}" if ":" in self._address else f"{self._address}:{self._port}"

    def _key(self, rank: int) -> str:
        return f"arrived/{rank}"
