"""A function in a process of its own, with a time limit a call: works from any thread and in any process.

The child kills itself when a call takes too long, even inside a library's C code, and its parent starts another. What
crosses to it is pickled by us; what comes back is JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

START_LIMIT_S = 120.0
"""For the child's imports."""
GRACE_S = 1.0
"""Beyond the limit, after which the parent does not wait for the child to end itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: `value`, or why there is none: `late`; `untried` (its process did not start, or patience
    left it no time, or less than its own limit, in which it did not end); or the text of the function's own error."""

    value: Any = None
    late: bool = False
    untried: bool = False
    error: str | None = None


class Patience:
    """Seconds that calls may take together until the next :meth:`renew`: others wait for what they are for.

    Starts of processes count, and no call is given more than what is left: together they take `GRACE_S` more at most.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self.left = seconds

    def renew(self) -> None:
        """Begin anew, with the next batch."""
        self.left = self._seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What the block takes is spent."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - start


class LimitedFunction:
    """Calls `target` (`module:name`) in a child that is started at the first call. Safe in threads: one at a time.

    Args:
        limit_s: seconds that one call may take, the start of the child apart.
        memory_gib: address space of the child; None: no limit.
        patience: for all calls, and those of others that share it; None: no limit.
    """

    def __init__(
        self, target: str, *, limit_s: float, memory_gib: float | None = None, patience: Patience | None = None
    ) -> None:
        self._target, self._limit_s, self._memory_gib, self._patience = target, limit_s, memory_gib, patience
        self._lock = Lock()
        self._complained = False
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child, if it is not running. Raises ValueError, in words, when `target` cannot be imported, and
        TimeoutError when that takes longer than `START_LIMIT_S` or than the patience."""
        with self._lock:
            self._started(START_LIMIT_S if self._patience is None else min(START_LIMIT_S, self._patience.left))

    def __call__(self, *args: Any) -> Outcome:
        """What `target(*args)` returns, as JSON knows it. Never raises on what the function does."""
        with self._lock:
            if self._patience is None:
                return self._tried(args, None)
            with self._patience.spending():
                return self._tried(args, time.monotonic() + self._patience.left)

    def _tried(self, args: Any, deadline: float | None) -> Outcome:
        """A call that must be over at `deadline`, on the monotonic clock, the start of its process included."""
        start_s = START_LIMIT_S if deadline is None else min(START_LIMIT_S, deadline - time.monotonic())
        if start_s <= 0:
            return Outcome(untried=True)
        try:
            child = self._started(start_s)
        except (OSError, ValueError) as error:  # TimeoutError is one
            if not self._complained:
                sys.stderr.write(f"{self._target}: {error}\n")
                self._complained = True
            return Outcome(untried=True)
        limit_s = self._limit_s if deadline is None else min(self._limit_s, max(0.001, deadline - time.monotonic()))
        outcome = self._called(child, args, limit_s)
        return Outcome(untried=True) if outcome.late and limit_s < self._limit_s else outcome

    def _called(self, child: subprocess.Popen[bytes], args: Any, limit_s: float) -> Outcome:
        assert child.stdin is not None
        message = pickle.dumps((limit_s, args))
        try:
            child.stdin.write(len(message).to_bytes(8, "big") + message)
            child.stdin.flush()
            reply = self._read(child, limit_s + GRACE_S)
        except BrokenPipeError:
            reply = ""
        if reply:
            return Outcome(**json.loads(reply))
        code = self.close(GRACE_S if reply == "" else 0.0)
        if code in (-signal.SIGALRM, -signal.SIGKILL):  # its own clock, or ours
            return Outcome(late=True)
        return Outcome(error=f"its process ended with code {code}")

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the child, unless it ends by itself in ``grace_s`` seconds; its exit code."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
        _end_group(child)
        code = child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not yet flushed has nobody to go to
                pipe.close()
        return code

    def _started(self, seconds: float) -> subprocess.Popen[bytes]:
        """The child, ready. Raises ValueError, in words, when it cannot be, and TimeoutError when that takes longer."""
        if self._child is not None:
            return self._child
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "megatron_grpo.rollout.rewards.child", self._target, str(self._memory_gib or 0.0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a signal to the run's group is not for it: it ends with its stdin
        )
        weakref.finalize(self, _end_group, child)
        ready = self._read(child, seconds)
        if ready == "ready":
            return child
        self.close()
        if ready is None:
            raise TimeoutError(f"its process was not ready after {seconds:.0f} s")
        raise ValueError(json.loads(ready)["error"] if ready else "its process ended before it was ready")

    def _read(self, child: subprocess.Popen[bytes], seconds: float) -> str | None:
        """One line from the child; empty when it ends, None when it says nothing in time."""
        assert child.stdout is not None
        deadline, data = time.monotonic() + seconds, b""
        waiting = select.poll()  # select() knows no file beyond the 1024th
        waiting.register(child.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                return None
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return ""
            data += chunk
        return data.decode().strip()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child, which leads a group of its own, and whatever the function started in it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        return
