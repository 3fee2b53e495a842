"""The process behind `LimitedFunction`: `python -m megatron_grpo.rollout.rewards.child MODULE:NAME GIB`."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from importlib import import_module
from typing import Any, BinaryIO

TRACEBACKS = 3
"""Shown of a function that fails, on stderr."""


def load_target(target: str) -> Callable[..., Any]:
    """The callable that `module:name` or `module:name.attribute` names. Raises ValueError in words."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target} cannot be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"{target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # callable() has looked


def main(target: str, memory_gib: float) -> None:
    """Answer calls until stdin ends. The two pipes are its alone: what the function prints goes to stderr, and what it
    starts reads nothing."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    calls = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        function = load_target(target)
    except ValueError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    if memory_gib > 0:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30),) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is in the middle of
    answers.write("ready\n")
    failures = 0
    while (call := _next(calls)) is not None:
        limit_s, args = call
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = json.dumps({"value": function(*args)}, default=_plain)
        except Exception as error:  # the function is not ours, and one bad sample must not end a run
            failures += 1
            if failures <= TRACEBACKS:
                traceback.print_exc()
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(reply + "\n")


def _plain(value: Any) -> Any:
    """What JSON does not know: records as mappings, other libraries' numbers as floats."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return float(value)


def _next(stream: BinaryIO) -> Any:
    """The next call, (seconds it may take, arguments); None at the end of the stream."""
    size = stream.read(8)
    return pickle.loads(stream.read(int.from_bytes(size, "big"))) if len(size) == 8 else None


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
