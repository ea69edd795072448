"""Gives each rank cores of its own. Memory follows: the kernel takes it from the NUMA node of the core that asks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from zeroengine.errors import LaunchError

KINDS = ("cores", "numa")
NODES = Path("/sys/devices/system/node")


def shares(kind: str, ranks: int) -> str:
    """The cores of each rank on this machine by local rank, as worker.py reads them: `0,1;2,3`.

    Args:
        kind: `cores` for an equal share of the cores each, `numa` for all cores of one NUMA node each.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    allowed = os.sched_getaffinity(0)
    nodes = [sorted(node & allowed) for node in numa_nodes()]
    nodes = [node for node in nodes if node] or [sorted(allowed)]
    if kind == "cores" and len(allowed) < ranks:
        raise LaunchError(f"--bind cores: {ranks} ranks, and only {len(allowed)} cores. Leave --bind out")
    return ";".join(map(write_cores, share_out(kind, nodes, ranks)))


def share_out(kind: str, nodes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Neighbours by rank are neighbours by core. No rank spans NUMA nodes where there are as many ranks as nodes."""
    if len(nodes) > ranks and kind == "cores":
        cores = [core for node in nodes for core in node]
        return [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    homes = [rank * len(nodes) // ranks for rank in range(ranks)]
    if kind == "numa":
        return [list(nodes[home]) for home in homes]
    found = []
    for rank, home in enumerate(homes):
        mates = [r for r in range(ranks) if homes[r] == home]
        node, place = nodes[home], mates.index(rank)
        share = list(node[place * len(node) // len(mates) : (place + 1) * len(node) // len(mates)])
        found.append(share or list(node))  # a node with fewer cores than ranks is shared
    return found


def numa_nodes() -> list[set[int]]:
    """The cores of each NUMA node; nothing where the system does not say."""
    paths = sorted(NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [read_cores(path.read_text()) for path in paths]


def read_cores(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def write_cores(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
