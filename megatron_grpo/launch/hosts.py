"""Host files and the choice of slots, in DeepSpeed's format and grammar; mistakes are found before anything starts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config import ConfigError

LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")

Slots = dict[str, list[int]]
"""Slot numbers (device indices) by host, in the order of the host file: ranks are dealt in that order."""


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a host file: where ``slots`` ranks can run."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file of ``NAME slots=N`` lines, in order; ``#`` begins a comment.

    Errors: ConfigError naming file and line: no such file, not such a line, no slots, a host twice, no host at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile={path}: cannot be read ({error}); give a file of NAME slots=N lines") from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if match is None or int(match["slots"]) == 0:
            raise ConfigError(f"{path} line {number}: {text!r} is not a host; write NAME slots=N, with N at least 1")
        if match["name"] in hosts:
            raise ConfigError(f"{path} line {number}: {match['name']} is there twice; give it one line with all slots")
        hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if not hosts:
        raise ConfigError(f"{path}: names no host; write NAME slots=N lines")
    return list(hosts.values())


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> Slots:
    """The slots that ``--include`` keeps or ``--exclude`` leaves: ``NAME[:SLOT,...]``, joined by ``@``; a name alone
    means all of its slots. Hosts without any are left out.

    Errors: ConfigError when both are given, a host or slot does not exist, or nothing is left.
    """
    if include and exclude:
        raise ConfigError(f"--include={include}: excludes --exclude={exclude}; give one of them")
    everything = {host.name: list(range(host.slots)) for host in hosts}
    if not include and not exclude:
        return everything
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, slots = _node(part, everything, f"{option}={text}")
        named.setdefault(name, set()).update(slots)
    chosen = {
        name: [slot for slot in slots if (slot in named.get(name, ())) == bool(include)]
        for name, slots in everything.items()
    }
    chosen = {name: slots for name, slots in chosen.items() if slots}
    if not chosen:
        raise ConfigError(f"{option}={text}: leaves no slot; name fewer")
    return chosen


def _node(part: str, everything: Mapping[str, list[int]], option: str) -> tuple[str, list[int]]:
    """Host and slots of one ``NAME[:SLOT,...]``; the name itself may hold colons, as an IPv6 address does."""
    name, _, numbers = (part, "", "") if part in everything else part.rpartition(":")
    if name not in everything:
        raise ConfigError(f"{option}: {name or part!r} is not in the host file; use {', '.join(everything)}")
    if name == part:
        return name, everything[name]
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ConfigError(f"{option}: {numbers!r} are not slots of {name}; write {name}:0,1")
    slots = [int(number) for number in numbers.split(",")]
    unknown = [slot for slot in slots if slot not in everything[name]]
    if unknown:
        raise ConfigError(
            f"{option}: {name} has {len(everything[name])} slots, numbered from 0, and no slot {unknown[0]}; "
            "use those, or give it more in the host file"
        )
    return name, slots


def rank_hosts(chosen: Mapping[str, Sequence[int]]) -> list[str]:
    """The host of each rank: hosts fill up in their order."""
    return [name for name, slots in chosen.items() for _ in slots]
