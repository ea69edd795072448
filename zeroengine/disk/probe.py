"""How fast a disk is, and how it is best driven: backends, depths and block sizes, each tried for a moment."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import BLOCK_BYTES, DEPTH, DiskQueue, Transfer, aligned_empty
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.ops import _aio_library as _aio

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE, BOTH = (False,), (True,), (False, True)
DEPTHS, BLOCKS = (4, 16, 32), (256 * KIB, MIB, 4 * MIB)
MAX_IN_FLIGHT = 32 * MIB
PIECE = 4 * MIB  # of one transfer
TRY_SECONDS, LONG_SECONDS = 0.06, 15
ALIKE = 0.95  # of the best: tries at least as fast count as equal

_tuned: dict[int, Settings] = {}  # by device number


@dataclass(frozen=True)
class Settings:
    """How a disk is driven: the keys of "aio" in the configuration. The defaults are good ones, and need no probe."""

    backend: str = "auto"
    queue_depth: int = DEPTH  # blocks in flight
    block_size: int = BLOCK_BYTES  # bytes

    def queue(self) -> DiskQueue:
        """A new queue of these settings."""
        return DiskQueue(self.queue_depth, self.block_size, self.backend)


@dataclass(frozen=True)
class Speed:
    """What settings gave, in bytes a second."""

    settings: Settings
    read: float
    write: float
    both: float  # read plus written, while half of each is under way

    @property
    def score(self) -> float:
        return (self.read * self.write * self.both) ** (1 / 3)


@dataclass(frozen=True)
class Disk:
    """What a folder lies on."""

    path: str
    filesystem: str
    device: str
    rotational: bool | None  # as the kernel says, which guesses in virtual machines; None where it does not know
    block_size: int | None  # bytes of a logical block of the device
    direct: bool  # whether direct I/O works
    free_bytes: int


def disk_of(folder: SwapFolder) -> Disk:
    mount = mount_of(folder.path)
    queue = _queue_of(folder.path, mount.device)

    def number(name: str) -> int | None:
        try:
            return int(Path(queue, name).read_text()) if queue else None
        except (OSError, ValueError):
            return None

    rotational = number("rotational")
    return Disk(
        path=folder.path,
        filesystem=mount.filesystem,
        device=mount.device,
        rotational=None if rotational is None else bool(rotational),
        block_size=number("logical_block_size"),
        direct=folder.direct,
        free_bytes=folder.free_bytes(),
    )


def _queue_of(path: str, device: str) -> str | None:
    """The folder of /sys that describes a path's block device."""
    numbers = [os.stat(path).st_dev]
    if device.startswith("/dev/") and os.path.exists(device):
        numbers.append(os.stat(device).st_rdev)
    for number in numbers:
        entry = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        for folder in (entry, os.path.dirname(entry)):  # a partition's queue is its disk's
            if os.path.isdir(os.path.join(folder, "queue")):
                return os.path.join(folder, "queue")
    return None


class Probe:
    """A file full of data on the disk in question, and buffers to move it with."""

    def __init__(self, folder: SwapFolder, nbytes: int) -> None:
        """Takes `nbytes` of the disk, at least two pieces.

        Raises:
            OffloadError: there is no room.
        """
        self.num_pieces = max(nbytes // PIECE, 2)
        self._file: SwapFile = folder.file("probe", self.num_pieces * PIECE)
        self._written = 0  # pieces
        self._buffers: dict[bool, list[Tensor]] = {False: [], True: []}

    def fill(self, seconds: float = math.inf) -> Iterator[int]:
        """Writes the file piece by piece, so that there is something to read; gives the bytes of each. After `seconds`
        what is written so far must do."""
        start = time.perf_counter()
        with DiskQueue() as queue:
            while self._written < self.num_pieces and (self._written < 2 or time.perf_counter() - start < seconds):
                queue.write(self._file, self._written * PIECE, self._buffer(True, 0)).wait_host()
                self._written += 1
                yield PIECE

    def speed(self, settings: Settings, kinds: Sequence[bool], seconds: float) -> float:
        """Bytes a second, of reads (False), writes (True) or both at once."""
        moved = 0
        # Enough that the queue is full while one of them is waited for.
        at_once = -(-settings.queue_depth * settings.block_size // PIECE) + 1
        position = {kind: index * self._written // 2 for index, kind in enumerate(kinds)}
        with settings.queue() as queue:

            def begin(kind: bool, buffer: Tensor) -> tuple[bool, Tensor, Transfer]:
                offset = position[kind] % self._written * PIECE
                position[kind] += 1
                return kind, buffer, (queue.write if kind else queue.read)(self._file, offset, buffer)

            buffers = [(kind, self._buffer(kind, index)) for index in range(at_once) for kind in kinds]
            start = time.perf_counter()
            under_way = deque(begin(*one) for one in buffers)
            while under_way:
                kind, buffer, transfer = under_way.popleft()
                transfer.wait_host()
                moved += buffer.nbytes
                if time.perf_counter() - start < seconds:
                    under_way.append(begin(kind, buffer))
            return moved / (time.perf_counter() - start)

    def _buffer(self, kind: bool, index: int) -> Tensor:
        buffers = self._buffers[kind]
        while len(buffers) <= index:
            # No zeros, which disks of virtual machines may leave out.
            buffers.append(aligned_empty(PIECE // 8, torch.int64).random_())
        return buffers[index]

    def close(self) -> None:
        self._file.close()


def candidates() -> list[Settings]:
    """What `zero-io` tries: every backend of this machine with every depth and block size."""
    return [
        Settings(backend, depth, block)
        for backend in _aio.available()
        for block in BLOCKS
        for depth in DEPTHS
        if depth * block <= MAX_IN_FLIGHT
    ]


def measure(probe: Probe, settings: Sequence[Settings], step: Callable[[], None] = lambda: None) -> list[Speed]:
    """Tries all settings in turn, reading, writing and both at once; calls `step` after each. Then once more, so that
    slow and fast moments of the disk fall on all alike, unless that takes long."""
    rounds: list[list[tuple[float, ...]]] = []
    start = time.perf_counter()
    while not rounds or (len(rounds) < 2 and time.perf_counter() - start < LONG_SECONDS):
        rounds.append([])
        for one in settings:
            rounds[-1].append(tuple(probe.speed(one, kinds, TRY_SECONDS) for kinds in (READ, WRITE, BOTH)))
            step()
    means = [[sum(speeds) / len(rounds) for speeds in zip(*tries, strict=True)] for tries in zip(*rounds, strict=True)]
    return [Speed(one, *mean) for one, mean in zip(settings, means, strict=True)]


def best(speeds: Sequence[Speed]) -> Speed:
    """The fastest. Of those about as fast, the one that asks least: by backend, then by bytes in flight."""
    fastest = max(speed.score for speed in speeds)
    rank = list(_aio.BACKENDS).index
    alike = [speed for speed in speeds if speed.score >= ALIKE * fastest]
    return min(alike, key=lambda x: (rank(x.settings.backend), x.settings.queue_depth * x.settings.block_size))


def tune(path: str | os.PathLike[str]) -> Settings:
    """Good settings for the disk that a folder is on, found in less than a second with 64 MiB of it; once a process and
    disk, after which they are remembered.

    Raises:
        OffloadError: the folder cannot be used.
    """
    folder = SwapFolder(path, rank=0)
    device = os.stat(folder.path).st_dev
    if device not in _tuned:
        probe = Probe(folder, 64 * MIB)
        for _ in probe.fill(seconds=0.3):
            pass
        backend = _aio.available()[0]
        tries = [Settings(backend, *numbers) for numbers in ((16, 256 * KIB), (8, MIB), (32, MIB))]
        speeds = {one: probe.speed(one, BOTH, TRY_SECONDS) for one in tries}
        _tuned[device] = next(one for one in tries if speeds[one] >= ALIKE * max(speeds.values()))
        folder.close()
    return _tuned[device]
