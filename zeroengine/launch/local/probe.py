"""Run by zero-report on several ranks: the speed of each transport's collectives."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.errors import ZeroEngineError

REPEATS = 5


def main() -> None:
    size = int(sys.argv[1])
    group = Group(None, torch.device("cpu"))
    for kind in ("shm", "gloo"):
        try:
            transport = group.transport(kind, 60.0)
        except ZeroEngineError as error:
            said = f"{kind}: {error}"
        else:
            said = f"{kind}: {measure(transport, size)} ({size >> 20} MiB)"
            transport.close()
        if group.rank == 0:
            print(said, flush=True)
    dist.destroy_process_group()


def measure(transport: Transport, size: int) -> str:
    """Bytes of the full buffer a second, for either channel."""
    shard = transport.empty(size // 4 // transport.world_size, torch.float32, "gather").fill_(1.0)
    full = transport.empty(shard.numel() * transport.world_size, torch.float32, "reduce").fill_(1.0)
    gather = best(transport, lambda: transport.gather.all_gather(full, shard, "probe").wait())
    reduce = best(transport, lambda: transport.reduce.reduce_scatter(shard, full, "probe").wait())
    return f"gather {full.nbytes / gather / 1e9:.2f} GB/s, reduce {full.nbytes / reduce / 1e9:.2f} GB/s"


def best(transport: Transport, operation: Callable[[], None]) -> float:
    """Seconds of the fastest of several."""
    found = []
    for _ in range(REPEATS):
        transport.all_reduce_scalars(torch.ones(1, dtype=torch.float64, device="cpu"), "ready")
        start = time.perf_counter()
        operation()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main()
