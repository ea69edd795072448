"""The memory that a rank may still take: of its GPU, of its machine, and of a disk."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.comm.group import Group
from zeroengine.comm.watchdog import host_name
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.host_memory import available_memory
from zeroengine.utils.formats import parse_byte_size

# Bytes of each GPU that count as free at most, such as "60GiB", where something else takes the rest.
DEVICE_LIMIT_VARIABLE = "ZEROENGINE_FREE_DEVICE_MEMORY"

# Stands for memory of which nothing is known.
UNKNOWN_BYTES = 2**63 - 1


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that each rank may take, which are those of the rank that has the least.

    Attributes:
        device: Of the device's memory. On CPU the same as ``host``.
        host: Of CPU memory: a machine's free memory over its ranks.
        disk: Of the disks of the configuration's folders, over the machine's ranks; 0 without a folder.
        ranks_per_host: The most ranks on one machine.
        scarcest_rank: The rank that has the least device memory.
    """

    device: int
    host: int
    disk: int
    ranks_per_host: int = 1
    scarcest_rank: int = 0


def measure_free_memory(group: Group, nvme_paths: Collection[str]) -> FreeMemory:
    """Return what every rank may take. A collective: all ranks get the same answer.

    Args:
        group: The ranks.
        nvme_paths: The folders that states may go to.
    """
    own: list[Any] = []
    with group.collective_errors("to measure free memory", own) as rows:
        host = int(min(available_memory(), UNKNOWN_BYTES))
        own += [host_name() or platform.node(), host, free_device_bytes(group.device), _free_disk_bytes(nvme_paths)]
    # The fake backend has no peers, so this process has its machine alone.
    ranks_of = {row[0]: 1 if not group.has_peers else sum(row[0] == other[0] for other in rows) for row in rows}
    hosts = [row[1] // ranks_of[row[0]] for row in rows]
    devices = [host if row[2] is None else row[2] for row, host in zip(rows, hosts, strict=True)]
    return FreeMemory(
        device=min(devices),
        host=min(hosts),
        disk=min(row[3] // ranks_of[row[0]] for row in rows),
        ranks_per_host=max(ranks_of.values()),
        scarcest_rank=devices.index(min(devices)),
    )


def free_device_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process may allocate on a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # The allocator keeps freed memory for this process.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limit = os.environ.get(DEVICE_LIMIT_VARIABLE)
    return free if limit is None else min(free, parse_byte_size(limit, DEVICE_LIMIT_VARIABLE, ZeroEngineError))


def _free_disk_bytes(paths: Collection[str]) -> int:
    """Return the bytes that this process may still write to the disks of some folders."""
    free: dict[int, int] = {}
    for path in paths:
        try:
            stats, device = os.statvfs(path), os.stat(path).st_dev
        except OSError:
            # That the folder cannot be used is another check's error.
            return UNKNOWN_BYTES
        free[device] = stats.f_bavail * stats.f_frsize
    return sum(free.values())
