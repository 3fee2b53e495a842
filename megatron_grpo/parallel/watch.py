"""Who is still there: every rank tells the others that it lives, so that one that is gone is named, with its host.

A rank that is killed, or whose host is cut off, leaves the others with a closed link or a silent one, and with an
address at best. Here each rank writes a number into the store where the ranks met, once a second, and reads the
others': about 100 bytes a rank and second. Nothing of it is a collective, so it goes on whatever the ranks wait for.
"""

import os
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Protocol, Self

from megatron_grpo.config import ConfigError

BEAT_S = 1.0

PATIENCE_S = 4.0
"""Silence that is enough to name a rank once a link to somebody has failed."""

GRACE_S = 2.0
"""The launcher looks once a second, and ends a run with the code of the first dead rank it sees."""

FAILED = "failed: "
REFUSED = "refused: "
"""What a rank writes in place of a number: before an error's text, and before that of a mistake in the config."""

LOST_LINK = ("by peer", "imed out", "timeout", "roken pipe", "pair closure", "pair is closed")
"""What gloo and the store say of a link that is gone."""


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class LostPeerError(RuntimeError):
    """Other ranks are gone; the text names them and their hosts."""


class Watch:
    """Tells the others that this rank lives, and finds out who does not.

    While inside the block, a rank that nobody has heard of for ``silence_s`` seconds, or that failed, ends this process
    with code 1 and a sentence. An error that a lost link causes becomes a LostPeerError that says whose; any other
    error is told to the others, who then end, too. A ConfigError, which one host alone may find, ends them with its
    sentence and code 2.

    Args:
        store: a connection to it of one's own: somebody else's wait would hold the beats up.
        size: ranks in the world.
        silence_s: seconds, as for any other link.
    """

    def __init__(self, store: Store, rank: int, size: int, *, silence_s: float) -> None:
        self._store, self._rank, self._size, self._silence_s = store, rank, size, silence_s
        self._store.set(f"host/{rank}", socket.gethostname())
        self._store.set(f"beat/{rank}", "0")
        self.hosts = [name.decode() for name in self._store.multi_get([f"host/{peer}" for peer in range(size)])]
        self._beats = [b""] * size
        self._heard = [time.monotonic()] * size
        self._answered = time.monotonic()
        self._failure = ""
        self._wake, self._told, self._closed = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        for work in (self._beat, self._judge):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, ConfigError):
                self._tell(f"{REFUSED}{error}")
            elif isinstance(error, Exception):
                self._explain(error)
        finally:
            self._closed.set()

    def _explain(self, error: Exception) -> None:
        if any(words in str(error) for words in LOST_LINK):
            lost = self._name_lost()
            refusal = self.refusal()
            if refusal is not None:
                raise ConfigError(refusal) from error
            if lost is not None:
                raise LostPeerError(lost) from error
        self._tell(f"{FAILED}{type(error).__name__}: {error}")

    def _tell(self, why: str) -> None:
        self._failure = why
        self._wake.set()
        self._told.wait(GRACE_S)
        if self._rank == 0 and len(set(self.hosts)) > 1:
            time.sleep(GRACE_S)  # the store ends with this process, and other hosts have no launcher that saw why

    def refusal(self) -> str | None:
        """What a rank says of a mistake in the config that it found, and who it is; None while none did."""
        for peer, beat in enumerate(self._beats):
            if beat.startswith(REFUSED.encode()):
                return f"rank {peer} on host {self.hosts[peer]}: {beat.decode().removeprefix(REFUSED)}"
        return None

    def missing(self, silence_s: float) -> str | None:
        """A sentence about the ranks that failed or have been silent for so long; None while there are none."""
        for peer, beat in enumerate(self._beats):
            if beat.startswith(FAILED.encode()):
                return f"rank {peer} on host {self.hosts[peer]} {beat.decode()}"
        now = time.monotonic()
        silent = [peer for peer, heard in enumerate(self._heard) if now - heard > silence_s]
        if now - self._answered > silence_s:  # the store is rank 0's: of the others nothing is known
            silent = [0]
        names = [f"rank {peer} on host {self.hosts[peer]}" for peer in silent]
        if not names:
            return None
        return f"{' and '.join(names)} {'does' if len(names) == 1 else 'do'} not answer"

    def _beat(self) -> None:
        count, keys = 0, [f"beat/{peer}" for peer in range(self._size)]
        while not self._closed.is_set():
            self._wake.wait(BEAT_S)
            count, told = count + 1, bool(self._failure)
            try:
                self._store.set(f"beat/{self._rank}", self._failure or str(count))
                beats = self._store.multi_get(keys)
            except RuntimeError:  # rank 0 has gone, and the store with it
                self._closed.wait(BEAT_S)
                continue
            if told:
                self._told.set()
                return
            now = self._answered = time.monotonic()
            for peer, beat in enumerate(beats):
                if beat != self._beats[peer]:
                    self._beats[peer], self._heard[peer] = beat, now

    def _judge(self) -> None:
        """Apart from the beats: a store that is cut off lets nobody go who asks it something."""
        while not self._closed.wait(BEAT_S):
            refusal = self.refusal()
            lost = refusal or self.missing(self._silence_s)
            if lost is not None and not self._closed.wait(GRACE_S):
                sys.stderr.write(f"rank {self._rank} stops: {lost}\n")
                sys.stderr.flush()
                os._exit(1 if refusal is None else 2)

    def _name_lost(self) -> str | None:
        """Wait until the missing are known, or nobody seems to be."""
        deadline = time.monotonic() + PATIENCE_S + 2 * BEAT_S
        while time.monotonic() < deadline:
            lost = self.refusal() or self.missing(PATIENCE_S)
            if lost is not None:
                return lost
            time.sleep(BEAT_S / 4)
        return None
