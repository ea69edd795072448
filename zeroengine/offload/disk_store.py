"""Where states live that are not on the device: what all such places can do, and files on a disk, one set a rank.

Partitioning has no part in this.

[Note: Two ways to the disk]
The loops that read or write whole states (the update, gathers, gradients) move blocks between the files and
buffers of theirs, past the page cache and beside the computation. Everything rare (checkpoints, inspection,
surgery) uses the tensor that ``empty`` gave, which is part of a file, mapped. It calls ``populate`` first, so that a
disk that fails is an error and not a signal. The kernel keeps both ways coherent as long as they do not touch one place
at one time: what is under way is awaited before a mapped tensor is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from zeroengine.disk.aligned_memory import aligned_empty, round_up
from zeroengine.disk.mapped_memory import populate, release_mapped
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.device_copies import Direction
from zeroengine.utils.work import Completed, Work

FILE = 1 << 26  # bytes of a further file, at least
CHUNK = 1 << 22  # bytes of a mapped state that are in memory at once, while it is filled
T = TypeVar("T")
Medium = Literal["cpu", "nvme"]


class Poisonable(Protocol):
    """What can lose states."""

    def poison(self, error: BaseException) -> None:
        """An update or a gradient was lost on its way: nobody may use these states."""


class StateStore(Poisonable, Protocol):
    """Where states live, for one who works on them elsewhere."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a state that lives here, or part of one."""

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Starts to read a state, or a part of one that begins at a block, into memory of as many bytes."""

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Starts to write memory, as of ``read``, over a state or a part of one."""


class OffloadStore(StateStore, Protocol):
    """Where states live, if not in the memory of the device that computes with them.

    Attributes:
        stream_ordered: whether the device's streams order transfers, so that nobody need look if they are through.
    """

    medium: Medium
    stream_ordered: bool

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new state, 1-D, zeros until written, for the CPU to use where it is."""

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """``values`` become those of a state. For rare use: a write is faster."""

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        """New bytes on the device, for states on their way: what ``read`` and ``write`` take."""

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        """As of ``Copies``; nothing where transfers are in no stream."""

    def record_event(self) -> Work:
        """As of ``Copies``, where streams order transfers."""

    def evict(self, *states: torch.Tensor) -> None:
        """Gives back what was taken to use states in place."""


@contextmanager
def poison_on_error(*homes: Poisonable) -> Iterator[None]:
    """What fails inside has lost part of their states, and they know it."""
    try:
        yield
    except BaseException as error:
        for home in homes:
            home.poison(error)
        raise


class AddressMap(Generic[T]):
    """What is known of runs of memory, by address."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, T]] = []  # first address, the one behind the last, and what is known

    def add(self, address: int, nbytes: int, known: T) -> None:
        at = bisect_right(self._found, address, key=lambda extent: extent[0])
        self._found.insert(at, (address, address + nbytes, known))

    def at(self, tensor: torch.Tensor) -> T | None:
        """What is known of the run that ``tensor`` begins in."""
        address = tensor.data_ptr()
        index = bisect_right(self._found, address, key=lambda extent: extent[0])
        if not index or address >= self._found[index - 1][1]:
            return None
        return self._found[index - 1][2]

    def all(self) -> list[T]:
        return [known for _, _, known in self._found]


@dataclass(frozen=True)
class _Place:
    """Where a state is on disk."""

    address: int
    file: SwapFile
    offset: int
    mapped: torch.Tensor


class DiskStore:
    """This rank's files in a folder of an ``nvme_path``, and the queue that reads and writes them.

    Args:
        expected_bytes: of all the states that will live here.

    Raises:
        OffloadError: the disk has not as much room.
    """

    medium: Medium = "nvme"
    stream_ordered = False

    def __init__(self, folder: SwapFolder, queue: DiskQueue, expected_bytes: int) -> None:
        self._folder, self._queue = folder, queue
        self._file = folder.file("states", padded_nbytes(expected_bytes))
        self._end = 0
        self._places = AddressMap[_Place]()
        self._failed: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new state, 1-D, zeros until written: mapped, see the note above."""
        nbytes = padded_nbytes(numel * dtype.itemsize)
        if self._end + nbytes > self._file.nbytes:
            self._file, self._end = self._folder.file("more states", max(nbytes, FILE)), 0
        mapped = self._file.mapped(self._end, numel, dtype)
        address = mapped.data_ptr()
        self._places.add(address, nbytes, _Place(address, self._file, self._end, mapped))
        self._end += nbytes
        return mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a state on disk, or part of one."""
        return tensor.device.type == "cpu" and self._places.at(tensor) is not None

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        size = CHUNK // state.element_size()
        for part, its in zip(state.split(size), values.split(size), strict=True):
            populate(part, write=True)
            part.copy_(its)
            self.evict(part)

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        return aligned_empty(nbytes, torch.uint8)

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        return nullcontext()

    def record_event(self) -> Work:
        return Completed()

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """See ``OffloadStore``. The memory begins at a block too, and is nobody else's to the end of its last one."""
        place = self._places.at(state)
        assert place is not None
        return self._queue.read(place.file, place.offset + state.data_ptr() - place.address, _blocks(into))

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """As ``read``."""
        place = self._places.at(state)
        assert place is not None
        return self._queue.write(place.file, place.offset + state.data_ptr() - place.address, _blocks(source))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read and bytes written since the start, other than through mapped states."""
        return self._queue.bytes_read, self._queue.bytes_written

    def evict(self, *states: torch.Tensor) -> None:
        """Gives back the memory that mapped states took when they were used; the values stay in the files.

        Args:
            states: those that may have been, or parts of them; others than this disk's are left alone. None: all.
        """
        for state in states or [place.mapped for place in self._places.all()]:
            if self.holds(state):
                release_mapped(state)

    def poison(self, error: BaseException) -> None:
        """An update or a gradient was lost on its way: nobody may use these states."""
        self._failed = error

    def check_intact(self) -> None:
        """
        Raises:
            ZeroEngineError: an update ended half way.
        """
        if self._failed is not None:
            raise ZeroEngineError(
                f"the states on disk are half updated since a transfer failed ({self._failed}): make the engine anew "
                "and load its last checkpoint"
            ) from self._failed

    def close(self) -> None:
        self._queue.close()
        self._folder.close()


def padded_nbytes(nbytes: int) -> int:
    """The bytes that a state of ``nbytes`` takes in a file."""
    return round_up(max(nbytes, 1))


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as bytes, to the end of its last block."""
    start = tensor.storage_offset() * tensor.element_size()
    stop = min(start + padded_nbytes(tensor.nbytes), tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage(), start, (stop - start,), (1,))
