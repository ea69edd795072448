"""Measure what a machine achieves, on real ranks, in under two minutes.

``measure`` starts the ranks of this machine. On several nodes start them yourself, each with the same command:

    zero-launch --hostfile hosts -m zeroengine.plan.measure machine.json

All ranks measure at the same time, so that they share memory, caches and links as in training.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from zeroengine import ops
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.launched_ranks import join_launched_ranks
from zeroengine.comm.transports.choose import open_transport
from zeroengine.disk.probe import READ, READ_AND_WRITE, WRITE, Probe, tune
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError, ZeroEngineError
from zeroengine.offload.host_memory import available_memory
from zeroengine.plan.seconds.compute_rates import measure_compute
from zeroengine.plan.seconds.machine import Machine, Rates, read_machine, save_machine
from zeroengine.plan.seconds.timing import median_seconds
from zeroengine.utils.formats import counted

MIB = 1 << 20
# The bytes of each trial on a CPU and on a GPU. They exceed the caches.
UPDATE_NUMEL = {"cpu": 1 << 23, "cuda": 1 << 27}
UNIT_BYTES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
COPY_BYTES = 256 * MIB
DISK_FILE_BYTES, DISK_SECONDS = 256 * MIB, 1.0
TIMEOUT_SECONDS = 60.0
K = TypeVar("K")
# The bytes that a fused Adam step and the norm before it read and write for each element, in fp32.
UPDATE_BYTES = 28 + 4


def measure(
    progress: Callable[[str], None] | None = None,
    *,
    ranks: int | None = None,
    threads: int | None = None,
    folder: str | Path | None = None,
) -> Machine:
    """Measure this machine with so many ranks at once.

    Args:
        progress: Called with what is being measured.
        ranks: The ranks; None: the GPUs, or one on a machine without.
        threads: The threads of each rank on a CPU; None: its share of the cores.
        folder: A folder on the disk to measure; None: the current one.

    Raises:
        ZeroEngineError: ``folder`` is none, or the ranks cannot run. The message has their output.
    """
    folder = Path(folder or os.getcwd())
    if not folder.is_dir():
        raise ZeroEngineError(f"{folder} is no folder: write one on the disk that is to be measured")
    ranks = ranks or max(torch.cuda.device_count(), 1)
    threads = threads or max(len(os.sched_getaffinity(0)) // ranks, 1)
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "machine.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "zeroengine.plan.measure", str(output), "--folder", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if progress is not None and line.startswith(PROGRESS):
                    progress(line.removeprefix(PROGRESS).strip())
        if process.returncode or not output.is_file():
            raise ZeroEngineError(f"measuring this machine failed:\n{''.join(lines[-20:])}")
        return read_machine(output)


PROGRESS = "zeroengine measures "


def _report(group: Group, what: str) -> None:
    if group.rank == 0:
        print(f"{PROGRESS}{what}", flush=True)


def measure_on_ranks(folder: str | Path) -> Machine:
    """Measure on the ranks that this process is one of. A collective; every rank gets the same machine.

    Args:
        folder: A folder on the disk of each node.
    """
    join_launched_ranks()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    group = Group(None, device)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if group.world_size % ranks_per_node:
        raise ZeroEngineError(f"{group.world_size} ranks on nodes of {ranks_per_node}: start equally many on each node")
    nodes = group.world_size // ranks_per_node
    _report(group, "matrix products and other operations of a model")
    compute = measure_compute(device, lambda: _meet(group))
    _report(group, "memory")
    memory = _update_rate(group, device)
    host_memory = _update_rate(group, torch.device("cpu")) if device.type == "cuda" else memory
    _report(group, "collectives")
    links = link_rates(group, ranks_per_node)
    host_link = _host_link_rate(group) if device.type == "cuda" else 0.0
    _report(group, "the disk")
    disk_rates = _disk_rates(folder) if local_rank == 0 else (0.0, 0.0, 0.0)
    rows = group.all_gather_object((compute, memory, host_memory, host_link, disk_rates), "of rates")
    first_ranks = rows[::ranks_per_node]
    host_bytes = int(available_memory())
    is_gpu = device.type == "cuda"
    return Machine(
        name=torch.cuda.get_device_name() if is_gpu else platform.node() or "cpu",
        device="cuda" if is_gpu else "cpu",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else host_bytes // ranks_per_node,
        host_bytes=host_bytes,
        disk_bytes=shutil.disk_usage(folder).free,
        rates=Rates(
            matmul=_slowest([row[0].matmul for row in rows]),
            elementwise=_slowest([row[0].elementwise for row in rows]),
            dispatch=max(row[0].dispatch for row in rows),
            new_memory=min(row[0].new_memory for row in rows),
            memory=min(row[1] for row in rows),
            host_memory=min(row[2] for row in rows) * ranks_per_node,
            **links,
            host_link=min(row[3] for row in rows),
            disk_read=min(row[4][0] for row in first_ranks),
            disk_write=min(row[4][1] for row in first_ranks),
            disk_both=min(row[4][2] for row in first_ranks),
            attention={dtype: _slowest([row[0].attention[dtype] for row in rows]) for dtype in compute.attention},
        ),
        sources=dict.fromkeys(Rates.__dataclass_fields__, _source(group, ranks_per_node)),
    )


def _source(group: Group, ranks_per_node: int) -> str:
    ranks = f"{counted(group.world_size, 'rank')}, {ranks_per_node} a node"
    threads = counted(torch.get_num_threads(), "thread")
    return f"measured {time.strftime('%Y-%m-%d')}: {ranks}, {threads} each, torch {torch.__version__}"


def _slowest(rates: Sequence[dict[K, float]]) -> dict[K, float]:
    return {key: min(row[key] for row in rates) for key in rates[0]}


def _meet(group: Group) -> None:
    """Let all ranks begin together."""
    group.all_gather_object(None, "to measure together")


def _update_rate(group: Group, device: torch.device) -> float:
    """Return the bytes per second of the norm and the fused update of Adam."""
    numel = UPDATE_NUMEL[device.type]
    param, grad, *moments = (torch.zeros(numel, device=device) for _ in range(4))
    arrays = ops.UpdateArrays(param, grad, tuple(moments))

    def update() -> None:
        ops.squared_norm(grad)
        ops.update_step("adamw", arrays, step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

    _meet(group)
    return UPDATE_BYTES * numel / median_seconds(update, device)


def link_rates(group: Group, ranks_per_node: int) -> dict[str, float]:
    """Return the rates of links by the names of the attributes of ``Rates``, equal on all ranks.

    Args:
        group: All ranks.
        ranks_per_node: The ranks of each node.
    """
    world_size, size = group.world_size, ranks_per_node
    nodes = [list(range(first, first + size)) for first in range(0, world_size, size)]
    counterparts = [list(range(local, world_size, size)) for local in range(size)]
    within = _rates_between(group, nodes) if size > 1 else None
    between = _rates_between(group, counterparts) if world_size > size else None
    link, reduce_link, latency = within or between or (0.0, 0.0, 0.0)
    # The ranks of a node use its network at once.
    node_link = size * min(between[:2]) if between is not None else 0.0
    return {"link": link, "reduce_link": reduce_link, "node_link": node_link, "latency": latency}


def _rates_between(group: Group, parts: list[list[int]]) -> tuple[float, float, float]:
    """Time collectives within all parts of ``group`` at once.

    Returns:
        The bytes per second that the slowest rank receives in all-gathers and in reduce-scatters, and the seconds of a
        collective of no size.
    """
    part = Group(torch.distributed.new_subgroups_by_enumeration(parts)[0], group.device)
    transport = open_transport(part, "auto", TIMEOUT_SECONDS)
    try:
        numel = UNIT_BYTES[group.device.type] // 4 // part.world_size
        trials = [
            trial(transport, n, group.device) for n in (numel, 1024) for trial in (_gather_seconds, _reduce_seconds)
        ]
        gather, reduce, *small = (
            max(times) for times in zip(*group.all_gather_object(trials, "of times"), strict=True)
        )
        received = 4 * numel * (part.world_size - 1)
        return received / max(gather - min(small), 1e-9), received / max(reduce - min(small), 1e-9), min(small)
    finally:
        transport.close()


def _gather_seconds(transport: Transport, shard_numel: int, device: torch.device) -> float:
    """Return the seconds of a gather into a buffer that is released between uses, and of its first read."""
    shard = transport.empty(shard_numel, torch.float32).zero_()
    full = transport.buffer(shard_numel * transport.world_size, torch.float32)
    private = torch.zeros(shard_numel * transport.world_size, device=device)

    def gather() -> None:
        full.allocate()
        transport.gather.all_gather(full.tensor, shard, "measure").wait_stream()
        # Where pages are mapped, the first read takes as long as the gather.
        full.tensor.sum()
        transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64, device=device), "measure")
        full.free()

    def without_gather() -> None:
        private.sum()
        transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64, device=device), "measure")

    return max(median_seconds(gather, device) - median_seconds(without_gather, device), 1e-7)


def _reduce_seconds(transport: Transport, shard_numel: int, device: torch.device) -> float:
    """Return the seconds of a reduce-scatter."""
    full = transport.empty(shard_numel * transport.world_size, torch.float32).zero_()
    shard = transport.empty(shard_numel, torch.float32, sent=False)

    def reduce() -> None:
        transport.reduce.reduce_scatter(shard, full, "measure").wait_stream()

    seconds = median_seconds(reduce, device)
    transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64, device=device), "measure")
    return seconds


def _host_link_rate(group: Group) -> float:
    """Return the bytes per second between this GPU and page-locked memory, while all ranks copy both ways."""
    host = [torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=group.device) for _ in range(2)]
    side = torch.cuda.Stream()

    def copy() -> None:
        device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(side):
            host[1].copy_(device[1], non_blocking=True)

    _meet(group)
    return COPY_BYTES / median_seconds(copy, group.device)


def _disk_rates(path: str | Path) -> tuple[float, float, float]:
    """Return the bytes per second of reads, of writes and of both at once; 0 where the disk cannot be used."""
    try:
        folder = SwapFolder(path)
        try:
            probe = Probe(folder, min(DISK_FILE_BYTES, folder.free_bytes() // 2))
            for _ in probe.fill(DISK_SECONDS):
                pass
            settings = tune(path)
            read, write, both = (probe.speed(settings, kinds, DISK_SECONDS) for kinds in (READ, WRITE, READ_AND_WRITE))
        finally:
            folder.close()
    except OffloadError:
        return 0.0, 0.0, 0.0
    return read, write, both


def main() -> None:
    """Measure on the ranks that a launcher started, and write the machine file on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m zeroengine.plan.measure", description=__doc__)
    parser.add_argument("output", help="the machine file to write")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    options = parser.parse_args()
    machine = measure_on_ranks(options.folder)
    if int(os.environ.get("RANK", "0")) == 0:
        save_machine(machine, options.output)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
