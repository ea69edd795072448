"""Give each rank cores of its own.

Memory follows the cores: the kernel takes it from the NUMA node of the core that touches it first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from zeroengine.errors import LaunchError

BIND_KINDS = ("cores", "numa")
NUMA_FOLDER = Path("/sys/devices/system/node")


def cores_by_rank(kind: str, ranks: int) -> str:
    """Return the cores of each local rank on this machine, as worker.py reads them: `0,1;2,3`.

    Args:
        kind: `cores` for an equal share of the cores each, `numa` for all cores of one NUMA node each.
        ranks: The number of ranks on this machine.

    Raises:
        LaunchError: There are fewer cores than ranks.
    """
    allowed = os.sched_getaffinity(0)
    nodes = [sorted(node & allowed) for node in numa_nodes()]
    nodes = [node for node in nodes if node] or [sorted(allowed)]
    if kind == "cores" and len(allowed) < ranks:
        raise LaunchError(f"--bind cores: {ranks} ranks, and only {len(allowed)} cores. Leave --bind out")
    return ";".join(map(format_cores, divide_cores(kind, nodes, ranks)))


def divide_cores(kind: str, nodes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Return each rank's cores; neighbouring ranks get neighbouring cores.

    No rank spans NUMA nodes if there are at least as many ranks as nodes.

    Args:
        kind: See `cores_by_rank`.
        nodes: The cores of each NUMA node.
        ranks: The number of ranks.
    """
    if len(nodes) > ranks and kind == "cores":
        cores = [core for node in nodes for core in node]
        return [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    node_of_rank = [rank * len(nodes) // ranks for rank in range(ranks)]
    if kind == "numa":
        return [list(nodes[index]) for index in node_of_rank]
    shares = []
    for rank, index in enumerate(node_of_rank):
        neighbours = [other for other in range(ranks) if node_of_rank[other] == index]
        node, position = nodes[index], neighbours.index(rank)
        share = list(node[position * len(node) // len(neighbours) : (position + 1) * len(node) // len(neighbours)])
        # The ranks of a node that has fewer cores than ranks share them.
        shares.append(share or list(node))
    return shares


def numa_nodes() -> list[set[int]]:
    """Return the cores of each NUMA node; nothing on a system that does not tell."""
    paths = sorted(NUMA_FOLDER.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [parse_cores(path.read_text()) for path in paths]


def parse_cores(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def format_cores(cores: Sequence[int]) -> str:
    """Return the numbers as `0,1`."""
    return ",".join(map(str, cores))
