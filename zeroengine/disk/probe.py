"""Measure a disk, and find the backend, depth and block size that drive it best, by short trials."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.disk.mounts import mount_of
from zeroengine.disk.queue import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH, DiskQueue, Transfer
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.ops import _aio_library as _aio

KIB, MIB = 1 << 10, 1 << 20
DEPTHS, BLOCK_SIZES = (4, 16, 32), (256 * KIB, MIB, 4 * MIB)
MAX_BYTES_IN_FLIGHT = 32 * MIB
TRANSFER_BYTES = 4 * MIB
TRIAL_SECONDS, MAX_FIRST_ROUND_SECONDS = 0.06, 15
TUNING_FILE_BYTES, TUNING_FILL_SECONDS = 64 * MIB, 0.3
# Settings within this factor of the fastest count as equally fast. Repeated trials differ by about as much.
EQUAL_SPEED = 0.95

# The kinds of transfers in a trial: reads (False), writes (True), or both at once.
READ, WRITE, READ_AND_WRITE = (False,), (True,), (False, True)

_tuned_by_device: dict[int, DiskSettings] = {}


@dataclass(frozen=True)
class DiskSettings:
    """The settings that drive a disk, "aio" in the configuration. The defaults are good without a measurement.

    Attributes:
        backend: As for ``DiskQueue``.
        queue_depth: Blocks in flight.
        block_size: The size of a block in bytes.
    """

    backend: str = "auto"
    queue_depth: int = DEFAULT_DEPTH
    block_size: int = DEFAULT_BLOCK_BYTES

    def queue(self) -> DiskQueue:
        """Return a new queue with these settings."""
        return DiskQueue(self.queue_depth, self.block_size, self.backend)


@dataclass(frozen=True)
class DiskSpeed:
    """The speeds of a disk with some settings, in bytes per second.

    Attributes:
        settings: The settings.
        read: The speed of reads alone.
        write: The speed of writes alone.
        both: Bytes read plus bytes written per second, while half of each is under way.
    """

    settings: DiskSettings
    read: float
    write: float
    both: float

    @property
    def score(self) -> float:
        """The geometric mean of the three speeds."""
        return float((self.read * self.write * self.both) ** (1 / 3))


@dataclass(frozen=True)
class DiskInfo:
    """The disk that a folder lies on.

    Attributes:
        path: The folder.
        filesystem: The type of its file system.
        device: The device that is mounted there.
        direct: Whether direct I/O works.
        free_bytes: Bytes that this process may still write.
    """

    path: str
    filesystem: str
    device: str
    direct: bool
    free_bytes: int


def describe_disk(folder: SwapFolder) -> DiskInfo:
    """Return the kernel's facts about the disk that a folder lies on."""
    mount = mount_of(folder.path)
    return DiskInfo(folder.path, mount.filesystem, mount.device, folder.direct, folder.free_bytes())


class Probe:
    """A file full of data on the measured disk, and the buffers for its transfers.

    Args:
        folder: A folder on the disk.
        nbytes: The size of the file in bytes; at least two transfers are taken.

    Attributes:
        num_transfers: The size of the file in transfers of ``TRANSFER_BYTES``.

    Raises:
        OffloadError: There is no room.
    """

    def __init__(self, folder: SwapFolder, nbytes: int) -> None:
        self.num_transfers = max(nbytes // TRANSFER_BYTES, 2)
        self._file: SwapFile = folder.file("probe", self.num_transfers * TRANSFER_BYTES)
        self._num_filled = 0
        self._buffers: defaultdict[bool, list[Tensor]] = defaultdict(list)

    def fill(self, seconds: float = math.inf) -> Iterator[int]:
        """Write the file transfer by transfer, so that there is something to read, and yield the bytes of each.

        Args:
            seconds: The time after which to stop. Trials use the part that is written.
        """
        start = time.perf_counter()
        with DiskQueue() as queue:
            while self._num_filled < 2 or time.perf_counter() - start < seconds:
                if self._num_filled == self.num_transfers:
                    return
                queue.write(self._file, self._num_filled * TRANSFER_BYTES, self._buffer(True, 0)).wait_host()
                self._num_filled += 1
                yield TRANSFER_BYTES

    def speed(self, settings: DiskSettings, kinds: Sequence[bool], seconds: float) -> float:
        """Return the bytes per second of one trial.

        Args:
            settings: The settings to try.
            kinds: ``READ``, ``WRITE`` or ``READ_AND_WRITE``.
            seconds: The length of the trial.
        """
        moved_bytes = 0
        # One transfer more than fills the queue, so that it stays full while the oldest is awaited.
        num_buffers = -(-settings.queue_depth * settings.block_size // TRANSFER_BYTES) + 1
        # Reads and writes at once begin half a file apart, so that they do not meet.
        position = {kind: index * self._num_filled // 2 for index, kind in enumerate(kinds)}
        with settings.queue() as queue:

            def start_transfer(kind: bool, buffer: Tensor) -> tuple[bool, Tensor, Transfer]:
                offset = position[kind] % self._num_filled * TRANSFER_BYTES
                position[kind] += 1
                return kind, buffer, (queue.write if kind else queue.read)(self._file, offset, buffer)

            buffers = [(kind, self._buffer(kind, index)) for index in range(num_buffers) for kind in kinds]
            start = time.perf_counter()
            under_way = deque(start_transfer(kind, buffer) for kind, buffer in buffers)
            while under_way:
                kind, buffer, transfer = under_way.popleft()
                transfer.wait_host()
                moved_bytes += buffer.nbytes
                # Transfers under way at the end are awaited, and their bytes and time count.
                if time.perf_counter() - start < seconds:
                    under_way.append(start_transfer(kind, buffer))
            return moved_bytes / (time.perf_counter() - start)

    def _buffer(self, write: bool, index: int) -> Tensor:
        buffers = self._buffers[write]
        while len(buffers) <= index:
            # The bytes are random, because disks of virtual machines may not store zeros.
            buffers.append(aligned_zeros(TRANSFER_BYTES // 8, torch.int64).random_())
        return buffers[index]


def candidate_settings() -> list[DiskSettings]:
    """Return the settings that ``zero-io`` tries: every backend of this machine with every depth and block size."""
    return [
        DiskSettings(backend, depth, block_size)
        for backend in _aio.available()
        for block_size in BLOCK_SIZES
        for depth in DEPTHS
        if depth * block_size <= MAX_BYTES_IN_FLIGHT
    ]


def measure(
    probe: Probe, candidates: Sequence[DiskSettings], report_progress: Callable[[], None] = lambda: None
) -> list[DiskSpeed]:
    """Try all candidates in turn, reading, writing and both at once, and return the mean speeds of each.

    There are two rounds, unless the first took long, so that slow phases of the disk affect all candidates alike.

    Args:
        probe: A filled probe.
        candidates: The settings to try.
        report_progress: Called after each trial.
    """
    rounds: list[list[tuple[float, ...]]] = []
    start = time.perf_counter()
    while not rounds or (len(rounds) < 2 and time.perf_counter() - start < MAX_FIRST_ROUND_SECONDS):
        rounds.append([])
        for settings in candidates:
            speeds = tuple(probe.speed(settings, kinds, TRIAL_SECONDS) for kinds in (READ, WRITE, READ_AND_WRITE))
            rounds[-1].append(speeds)
            report_progress()
    trials_by_candidate = zip(*rounds, strict=True)
    means = [[sum(speeds) / len(rounds) for speeds in zip(*trials, strict=True)] for trials in trials_by_candidate]
    return [DiskSpeed(settings, *mean) for settings, mean in zip(candidates, means, strict=True)]


def fastest(speeds: Sequence[DiskSpeed]) -> DiskSpeed:
    """Return the fastest. Among about equal ones prefer the better backend, then fewer bytes in flight."""
    top_score = max(speed.score for speed in speeds)
    # The backends are listed best first.
    rank = list(_aio.BACKENDS).index
    equals = [speed for speed in speeds if speed.score >= EQUAL_SPEED * top_score]
    return min(equals, key=lambda x: (rank(x.settings.backend), x.settings.queue_depth * x.settings.block_size))


def tune(path: str | os.PathLike[str]) -> DiskSettings:
    """Return good settings for the disk that a folder is on, found in less than a second with 64 MiB of it.

    The result is remembered for each disk as long as the process lives.

    Raises:
        OffloadError: The folder cannot be used.
    """
    folder = SwapFolder(path)
    device = os.stat(folder.path).st_dev
    if device not in _tuned_by_device:
        probe = Probe(folder, TUNING_FILE_BYTES)
        for _ in probe.fill(seconds=TUNING_FILL_SECONDS):
            pass
        backend = _aio.available()[0]
        # They ascend by bytes in flight, so the first that is fast enough needs the fewest.
        candidates = [DiskSettings(backend, *numbers) for numbers in ((16, 256 * KIB), (8, MIB), (32, MIB))]
        speeds = {settings: probe.speed(settings, READ_AND_WRITE, TRIAL_SECONDS) for settings in candidates}
        enough = EQUAL_SPEED * max(speeds.values())
        _tuned_by_device[device] = next(settings for settings in candidates if speeds[settings] >= enough)
        folder.close()
    return _tuned_by_device[device]
