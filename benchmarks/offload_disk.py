"""Measures how fast the disk layer reads and writes tensors, beside fio on the same file in the same run.

    python benchmarks/offload_disk.py PATH [--size 2GiB] [--block 1MiB] [--depth 32] [--rounds 3]

Both move the same file sequentially and past the page cache (direct=1), with the same block size and depth: they read
all of it, write all of it, and read one half while writing the other. They take turns, and the table has medians over
the rounds. The disk layer moves tensors of 128 MiB, two at a time; fio reuses the memory of its blocks. Install fio
with `apt install fio`; without it there is no ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import Descriptors, DiskQueue, Transfer
from zeroengine.ops import _aio_library as _aio
from zeroengine.utils.formats import parse_byte_size

PIECE = 128 << 20
KINDS = {"read": (False,), "write": (True,), "both": (False, True)}
FIO_KINDS = {"read": "read", "write": "write", "both": "rw"}


class File:
    """A swap file with a name, so that fio finds it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = str(path), nbytes
        flags = os.O_RDWR | os.O_CREAT
        self.descriptors = Descriptors(os.open(path, flags), os.open(path, flags | os.O_DIRECT))
        os.posix_fallocate(self.descriptors.buffered, 0, nbytes)


class Ours:
    def __init__(self, file: File) -> None:
        self.file = file
        self.buffers = {kind: [self.buffer() for _ in range(2)] for kind in (False, True)}
        with DiskQueue() as queue:
            for offset in range(0, file.nbytes, PIECE):
                queue.write(file, offset, self.buffers[True][0]).wait_host()
        os.fsync(file.descriptors.buffered)

    @staticmethod
    def buffer() -> Tensor:
        return aligned_zeros(PIECE // 8, torch.int64).random_()

    def seconds(self, queue: DiskQueue, kind: str) -> float:
        kinds = KINDS[kind]
        share = self.file.nbytes // len(kinds)
        free = {write: deque(self.buffers[write]) for write in kinds}
        under_way: deque[tuple[bool, Tensor, Transfer]] = deque()

        def finish() -> None:
            write, buffer, transfer = under_way.popleft()
            transfer.wait_host()
            free[write].append(buffer)

        start = time.perf_counter()
        for offset in range(0, share, PIECE):
            for index, write in enumerate(kinds):
                while not free[write]:
                    finish()
                buffer = free[write].popleft()
                begin = queue.write if write else queue.read
                under_way.append((write, buffer, begin(self.file, index * share + offset, buffer)))
        while under_way:
            finish()
        return time.perf_counter() - start


def fio_seconds(file: File, engine: str, kind: str, block: int, depth: int) -> float:
    command = [
        "fio", "--name=x", f"--filename={file.path}", f"--size={file.nbytes}", f"--rw={FIO_KINDS[kind]}",
        f"--ioengine={engine}", f"--bs={block}", f"--iodepth={depth}", "--direct=1", "--fallocate=none",
        "--overwrite=1", "--refill_buffers=0", "--randrepeat=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    moved = sum(job[direction]["io_bytes"] for direction in ("read", "write"))
    assert abs(moved - file.nbytes) < file.nbytes / 100, moved
    return max(job[direction]["runtime"] for direction in ("read", "write")) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=parse_byte_size, default=2 << 30)
    parser.add_argument("--block", type=parse_byte_size, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    nbytes = -(-options.size // (2 * PIECE)) * 2 * PIECE
    path = options.path / f"offload-disk-{os.getpid()}"
    fio = shutil.which("fio")
    try:
        file = File(path, nbytes)
        ours = Ours(file)
        times: dict[tuple[str, str, str], list[float]] = {}
        for _ in range(options.rounds):
            for backend in _aio.available():
                with DiskQueue(options.depth, options.block, backend) as queue:
                    for kind in KINDS:
                        times.setdefault((backend, kind, "ours"), []).append(ours.seconds(queue, kind))
                        if fio and backend != "threads":
                            seconds = fio_seconds(file, backend, kind, options.block, options.depth)
                            times.setdefault((backend, kind, "fio"), []).append(seconds)
    finally:
        path.unlink(missing_ok=True)

    mount = mount_of(options.path)
    version = subprocess.run([fio, "--version"], capture_output=True, text=True).stdout.strip() if fio else "no fio"
    print(
        f"{mount.filesystem} on {mount.device}, {nbytes >> 20} MiB, blocks of {options.block >> 10} KiB, depth "
        f"{options.depth}; medians of {options.rounds}\n{os.cpu_count()} CPUs, Linux {platform.release()}, torch "
        f"{torch.__version__}, {version}, Python {sys.version.split()[0]}\n"
    )
    print(f"{'backend':10} {'':6} {'GB/s':>7} {'fio':>7} {'ratio':>6}   each round, GB/s")
    for backend in _aio.available():
        for kind in KINDS:
            rates = {who: [nbytes / t / 1e9 for t in times.get((backend, kind, who), [])] for who in ("ours", "fio")}
            own = statistics.median(rates["ours"])
            other = statistics.median(rates["fio"]) if rates["fio"] else None
            beside = f"{other:7.2f} {own / other:6.2f}" if other else " " * 14
            rounds = " | ".join(" ".join(f"{rate:.2f}" for rate in rates[who]) for who in ("ours", "fio"))
            print(f"{backend:10} {kind:6} {own:7.2f} {beside}   {rounds}")


if __name__ == "__main__":
    main()
