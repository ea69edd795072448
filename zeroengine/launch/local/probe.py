"""Measure the speed of each transport's collectives. zero-report runs this on several ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transports.choose import open_transport
from zeroengine.errors import ZeroEngineError

REPEATS = 5


def main() -> None:
    """Print one line per transport on rank 0. Usage: probe BYTES."""
    nbytes = int(sys.argv[1])
    group = Group(None, torch.device("cpu"))
    for kind in ("shm", "gloo"):
        try:
            transport = open_transport(group, kind, 60.0)
        except ZeroEngineError as error:
            line = f"{kind}: {error}"
        else:
            line = f"{kind}: {measure(transport, nbytes)} ({nbytes >> 20} MiB)"
            transport.close()
        if group.rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


def measure(transport: Transport, nbytes: int) -> str:
    """Return the speeds of all-gather and reduce-scatter, in bytes of the full buffer per second."""
    shard = transport.empty(nbytes // 4 // transport.world_size, torch.float32).fill_(1.0)
    full = transport.empty(shard.numel() * transport.world_size, torch.float32).fill_(1.0)
    gather_s = fastest(transport, lambda: transport.gather.all_gather(full, shard, "probe").wait_stream())
    reduce_s = fastest(transport, lambda: transport.reduce.reduce_scatter(shard, full, "probe").wait_stream())
    return f"gather {full.nbytes / gather_s / 1e9:.2f} GB/s, reduce {full.nbytes / reduce_s / 1e9:.2f} GB/s"


def fastest(transport: Transport, operation: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several runs of a collective."""
    seconds = []
    for _ in range(REPEATS):
        # All ranks begin together, so that no rank's time includes waiting for another.
        transport.all_reduce_scalars(torch.ones(1, dtype=torch.float64, device="cpu"), "ready")
        start = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
