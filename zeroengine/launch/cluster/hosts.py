"""Which hosts a run is on, and which of each host's slots: the hostfile, --include, --exclude and --nnodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.local.job import MOST, suggest

EXAMPLE = "Write a host and its processes, such as: node-a slots=4"
NAME = re.compile(r"[A-Za-z0-9_.%:+\[\]-]+(@[A-Za-z0-9_.%:+\[\]-]+)?")
WITH_COUNT = re.compile(r"[^:]+:\d*")  # as in other launchers' files; an IPv6 address has more colons


@dataclass(frozen=True)
class Host:
    """A machine to start ranks on."""

    name: str  # as ssh takes it: an address, a name, an alias, with or without user@
    slots: int | None = None  # processes that it may have; None where nobody said
    chosen: tuple[int, ...] | None = None  # the slots that are used; None for the first ones

    @property
    def label(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]

    @property
    def count(self) -> int | None:
        """Processes that it may have."""
        return self.slots if self.chosen is None else len(self.chosen)

    def __str__(self) -> str:
        slots = "" if self.chosen is None else ":" + ",".join(map(str, self.chosen))
        return self.name + slots


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file with a line `host slots=N` for each; `slots=` may be left out, `#` begins a comment.

    Raises:
        LaunchError: the file cannot be read, or a line of it is malformed or a host's second; names the line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: cannot be read ({error.strerror}). {EXAMPLE}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile {path}: not a text file. {EXAMPLE}") from None
    return parse_hosts(text, f"--hostfile {path}")


def parse_hosts(text: str, source: str) -> list[Host]:
    """The hosts of a hostfile's text. `source` names it in messages."""
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source}, line {number}"
        name, *options = words
        if name.startswith("-") or not NAME.fullmatch(name) or WITH_COUNT.fullmatch(name):
            raise LaunchError(f"{where}: {name!r} is no host's name. {EXAMPLE}")
        slots = None
        for option in options:
            key, _, value = option.partition("=")
            if key != "slots":
                raise LaunchError(f"{where}: {option!r} is not understood. {EXAMPLE}")
            if slots is not None or not re.fullmatch(r"\d{1,9}", value) or not 1 <= int(value) <= MOST:
                raise LaunchError(f"{where}: {option!r} should be slots= and one number from 1 to {MOST}. {EXAMPLE}")
            slots = int(value)
        host = Host(name, slots)
        if host.label in lines:
            raise LaunchError(f"{where}: {host.label} is there already, on line {lines[host.label]}. Keep one of them")
        lines[host.label] = number
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source}: there are no hosts in it. {EXAMPLE}")
    return hosts


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts and slots that are left, in the hostfile's order.

    Raises:
        LaunchError: a filter is malformed, names what is not there, or leaves nothing.
    """
    found = list(hosts)
    if include is not None:
        wanted = _parse_filter("--include", include, found)
        found = [_choose(host, slots) for host in found for name, slots in wanted.items() if host.name == name]
    if exclude is not None:
        unwanted = _parse_filter("--exclude", exclude, hosts)
        kept = []
        for host in found:
            slots = unwanted.get(host.name, ())
            if slots is None:
                continue
            if slots:
                host = _choose(host, [slot for slot in _slots(host) if slot not in slots])
            if host.chosen is None or host.chosen:
                kept.append(host)
        found = kept
    if not found:
        said = " and ".join(
            f"{name} {value}" for name, value in (("--include", include), ("--exclude", exclude)) if value
        )
        raise LaunchError(f"{said}: no host is left of {', '.join(map(str, hosts))}")
    return found


def _slots(host: Host) -> Iterable[int]:
    return range(host.slots or 0) if host.chosen is None else host.chosen


def _choose(host: Host, slots: Sequence[int] | None) -> Host:
    return host if slots is None else replace(host, chosen=tuple(slots))


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Host to slots, None for all of them, from `host:0,2@host2`."""
    named = {host.name: host for host in hosts} | {host.label: host for host in hosts}
    example = f"Write {option} host1:0,2@host2 for two slots of host1 and all of host2"
    found: dict[str, tuple[int, ...] | None] = {}
    rest = text
    while rest:
        # A host's own name may hold an @: the longest that is known is meant.
        name = max((n for n in named if re.match(re.escape(n) + r"(?=[:@]|$)", rest)), key=len, default=None)
        if name is None:
            unknown = re.split(r"[:@]", rest)[0]
            raise LaunchError(f"{option} {text}: there is no host {unknown!r}{suggest(unknown, named)}. {example}")
        match = re.match(r"(?::(\d+(?:,\d+)*))?(?:@(?=.)|$)", rest[len(name) :])
        if match is None:
            raise LaunchError(f"{option} {text}: {rest[len(name) :]!r} after {name} is not understood. {example}")
        rest = rest[len(name) + match.end() :]
        host = named[name]
        if host.name in found:
            raise LaunchError(f"{option} {text}: {name} is there twice. {example}")
        slots = None if match[1] is None else tuple(sorted(set(map(int, match[1].split(",")))))
        for slot in slots or ():
            if host.slots is None:
                raise LaunchError(f"{option} {text}: the hostfile does not say how many slots {name} has. Add slots=N")
            if slot not in _slots(host):
                raise LaunchError(f"{option} {text}: {name} has no slot {slot}, its {host.slots} slots count from 0")
        found[host.name] = slots
    if not found:
        raise LaunchError(f"{option}: no host is named. {example}")
    return found


def limit(hosts: Sequence[Host], nnodes: str | None) -> tuple[list[Host], int]:
    """The hosts that take part, and the fewest with which the run may go on: `N`, or `MIN:MAX`.

    Raises:
        LaunchError: `nnodes` is malformed, or asks for more hosts than there are.
    """
    if nnodes is None:
        return list(hosts), len(hosts)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise LaunchError(f"--nnodes {nnodes}: not a number of nodes. Write --nnodes 2, or --nnodes 2:4 for a range")
    if low > len(hosts):
        there = "there is 1 host" if len(hosts) == 1 else f"there are {len(hosts)} hosts"
        raise LaunchError(f"--nnodes {nnodes}: {there} ({', '.join(map(str, hosts))}). Name more in the hostfile")
    return list(hosts[:high]), low


def processes(host: Host, nproc: str) -> int | None:
    """The ranks on the host, where it need not be asked for its GPUs.

    Raises:
        LaunchError: `nproc` is no number, or more than the host's slots.
    """
    if nproc == "auto":
        return host.count
    count = int(nproc) if re.fullmatch(r"\d{1,9}", nproc) else 0
    if not 1 <= count <= MOST:
        raise LaunchError(f"--nproc {nproc}: not a number from 1 to {MOST}. Write --nproc 2, or --nproc auto")
    if host.count is not None and count > host.count:
        raise LaunchError(
            f"--nproc {nproc}: {host} has {host.count} slot{'s' * (host.count > 1)}. "
            f"Write --nproc {host.count}, or more slots in the hostfile"
        )
    return count
