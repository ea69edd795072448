"""Which hosts a run is on, and which of each host's slots: the hostfile, --include, --exclude and --nnodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.local.job import MAX_PROCESSES, parse_nproc, suggest
from zeroengine.utils.formats import counted

EXAMPLE = f"Write a host and its processes, from 1 to {MAX_PROCESSES}, such as: node-a slots=4"
# A host's name, perhaps after that of a user, and its slots.
LINE = re.compile(r"((?!-)[\w.%:+\[\]-]+(?:@[\w.%:+\[\]-]+)?)(?:\s+slots=(\d{1,9}))?", re.ASCII)
# The form `host:4` of other launchers' files. An IPv6 address has more colons.
HOST_WITH_COUNT = re.compile(r"[^:]+:\d*")


@dataclass(frozen=True)
class Host:
    """A machine to start ranks on."""

    name: str  # as ssh takes it: an address, a name or an alias, with or without user@
    slots: int | None = None  # the most processes; None if the hostfile does not say
    chosen: tuple[int, ...] | None = None  # the slots that are used; None for the first ones

    @property
    def label(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]

    @property
    def max_processes(self) -> int | None:
        """The most processes in the slots that are used."""
        return self.slots if self.chosen is None else len(self.chosen)

    def __str__(self) -> str:
        slots = "" if self.chosen is None else ":" + ",".join(map(str, self.chosen))
        return self.name + slots


def read_hostfile(path: str | Path) -> list[Host]:
    """Return the hosts of a file with one line `host slots=N` each; `slots=` is optional, `#` begins a comment.

    Raises:
        LaunchError: The file cannot be read, or a line is malformed or repeats a host. The message names the line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: cannot be read ({error.strerror}). {EXAMPLE}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile {path}: not a text file. {EXAMPLE}") from None
    return parse_hosts(text, f"--hostfile {path}")


def parse_hosts(text: str, source: str) -> list[Host]:
    """Return the hosts of a hostfile's text.

    Args:
        text: The text.
        source: The file's name in messages.

    Raises:
        LaunchError: See `read_hostfile`.
    """
    hosts: list[Host] = []
    line_of_host: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where, match = f"{source}, line {number}", LINE.fullmatch(text)
        slots = int(match[2]) if match and match[2] else None
        if match is None or HOST_WITH_COUNT.fullmatch(match[1]) or not (slots is None or 1 <= slots <= MAX_PROCESSES):
            raise LaunchError(f"{where}: {text!r} is not understood. {EXAMPLE}")
        host = Host(match[1], slots)
        if host.label in line_of_host:
            earlier = line_of_host[host.label]
            raise LaunchError(f"{where}: {host.label} is there already, on line {earlier}. Keep one of them")
        line_of_host[host.label] = number
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source}: there are no hosts in it. {EXAMPLE}")
    return hosts


def select_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts and slots that `--include` and `--exclude` leave, in the hostfile's order.

    Raises:
        LaunchError: A filter is malformed, names an unknown host or slot, or leaves nothing.
    """
    selected = list(hosts)
    if include is not None:
        included = _parse_filter("--include", include, hosts)
        selected = [replace(host, chosen=included[host.name]) for host in hosts if host.name in included]
    if exclude is not None:
        excluded = _parse_filter("--exclude", exclude, hosts)
        remaining = []
        for host in selected:
            slots = excluded.get(host.name, ())
            if slots:
                host = replace(host, chosen=tuple(slot for slot in _slots(host) if slot not in slots))
            # None stands for all slots of the host.
            if slots is not None and host.chosen != ():
                remaining.append(host)
        selected = remaining
    if not selected:
        filters = {"--include": include, "--exclude": exclude}
        options = " and ".join(f"{name} {value}" for name, value in filters.items() if value)
        raise LaunchError(f"{options}: no host is left of {', '.join(map(str, hosts))}")
    return selected


def _slots(host: Host) -> Iterable[int]:
    return range(host.slots or 0) if host.chosen is None else host.chosen


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Return the slots by host name, None for all slots, of a filter such as `host:0,2@host2`."""
    by_name = {host.name: host for host in hosts} | {host.label: host for host in hosts}
    example = f"Write {option} host1:0,2@host2 for two slots of host1 and all of host2"
    slots_of: dict[str, tuple[int, ...] | None] = {}
    # A host's own name may contain @, so the longest known name wins.
    names = "|".join(map(re.escape, sorted(by_name, key=len, reverse=True)))
    rest = text
    while rest:
        match = re.match(rf"({names})(?::(\d+(?:,\d+)*))?(?:@(?=.)|$)", rest)
        if match is None:
            unknown = re.split(r"[:@]", rest)[0]
            is_known = unknown in by_name
            problem = f"{rest!r} is not understood" if is_known else f"there is no host {unknown!r}"
            hint = "" if is_known else suggest(unknown, by_name)
            raise LaunchError(f"{option} {text}: {problem}{hint}. {example}")
        rest, name, host = rest[match.end() :], match[1], by_name[match[1]]
        if host.name in slots_of:
            raise LaunchError(f"{option} {text}: {name} is there twice. {example}")
        slots = None if match[2] is None else tuple(sorted(set(map(int, match[2].split(",")))))
        for slot in slots or ():
            if host.slots is None:
                raise LaunchError(f"{option} {text}: the hostfile does not say how many slots {name} has. Add slots=N")
            if slot not in _slots(host):
                raise LaunchError(f"{option} {text}: {name} has no slot {slot}, its {host.slots} slots count from 0")
        slots_of[host.name] = slots
    if not slots_of:
        raise LaunchError(f"{option}: no host is named. {example}")
    return slots_of


def parse_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of `N` or `MIN:MAX`.

    Raises:
        LaunchError: It is neither.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise LaunchError(f"--nnodes {nnodes}: not a number of nodes. Write --nnodes 2, or --nnodes 2:4 for a range")
    return low, high


def limit_hosts(hosts: Sequence[Host], nnodes: str | None) -> tuple[list[Host], int]:
    """Return the hosts that take part, and the fewest with which the run may go on.

    Args:
        hosts: The hosts that could take part.
        nnodes: `N`, or `MIN:MAX`; None for all hosts.

    Raises:
        LaunchError: `nnodes` is malformed, or asks for more hosts than there are.
    """
    if nnodes is None:
        return list(hosts), len(hosts)
    low, high = parse_nnodes(nnodes)
    if low > len(hosts):
        count = "there is 1 host" if len(hosts) == 1 else f"there are {len(hosts)} hosts"
        raise LaunchError(f"--nnodes {nnodes}: {count} ({', '.join(map(str, hosts))}). Name more in the hostfile")
    return list(hosts[:high]), low


def processes_on(host: Host, nproc: str) -> int | None:
    """Return the number of ranks on the host; None if the host must be asked for its GPUs.

    Raises:
        LaunchError: `nproc` is no number, or more than the host's slots.
    """
    count, limit = parse_nproc(nproc), host.max_processes
    if count is None:
        return limit
    if limit is not None and count > limit:
        raise LaunchError(
            f"--nproc {nproc}: {host} has {counted(limit, 'slot')}. "
            f"Write --nproc {limit}, or more slots in the hostfile"
        )
    return count
