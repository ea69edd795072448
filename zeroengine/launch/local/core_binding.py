"""Give each rank cores of its own.

Memory follows the cores: the kernel takes it from the NUMA node of the core that touches it first.
"""

from __future__ import annotations

import itertools
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
    return ";".join(",".join(map(str, cores)) for cores in divide_cores(kind, nodes, ranks))


def divide_cores(kind: str, nodes: Sequence[list[int]], ranks: int) -> list[list[int]]:
    """Return each rank's cores; neighboring ranks get neighboring cores.

    No rank spans NUMA nodes if there are at least as many ranks as nodes.

    Args:
        kind: See `cores_by_rank`.
        nodes: The cores of each NUMA node.
        ranks: The number of ranks.
    """
    if kind == "cores" and len(nodes) > ranks:
        nodes = [list(itertools.chain.from_iterable(nodes))]
    shares: list[list[int]] = []
    # Consecutive ranks share a node.
    for index, neighbors in itertools.groupby(range(ranks), lambda rank: rank * len(nodes) // ranks):
        node, count = nodes[index], len(list(neighbors))
        parts = [node[part * len(node) // count : (part + 1) * len(node) // count] for part in range(count)]
        # The ranks of a node that has fewer cores than ranks share them.
        shares += [part if kind == "cores" and part else node for part in parts]
    return shares


def numa_nodes() -> list[set[int]]:
    """Return the cores of each NUMA node; nothing on a system that does not tell."""
    paths = sorted(NUMA_FOLDER.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    # The files hold lists such as 0-3,8.
    ranges = [re.findall(r"(\d+)(?:-(\d+))?", path.read_text()) for path in paths]
    return [
        {core for first, last in of_node for core in range(int(first), int(last or first) + 1)} for of_node in ranges
    ]
