"""Where states live that are not in memory: files on a disk, one set for each rank. Partitioning has no part in this.

[Note: Two ways to the disk]
The loops that read or write whole states (the update, gathers, gradients) move blocks between the files and
buffers of theirs, past the page cache and beside the computation. Everything rare (checkpoints, inspection,
surgery) uses the tensor that ``empty`` gave, which is part of a file, mapped. The kernel keeps both ways coherent
as long as they do not touch one place at one time: what is under way is awaited before a mapped tensor is used.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from ..errors import ZeroEngineError
from .aio import DiskQueue, Transfer, round_up
from .swap import SwapFile, SwapFolder, release_mapped

CHUNK = 1 << 26  # bytes of a further file, at least


@dataclass(frozen=True)
class _Extent:
    """A state's place."""

    address: int
    nbytes: int
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

    def __init__(self, folder: SwapFolder, queue: DiskQueue, expected_bytes: int) -> None:
        self._folder, self._queue = folder, queue
        self._file = folder.file("states", padded(expected_bytes))
        self._end = 0
        self._extents: list[_Extent] = []  # by address
        self._failed: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new state, 1-D, zeros until written: mapped, see the note above."""
        nbytes = padded(numel * dtype.itemsize)
        if self._end + nbytes > self._file.nbytes:
            self._file, self._end = self._folder.file("more states", max(nbytes, CHUNK)), 0
        mapped = self._file.mapped(self._end, numel, dtype)
        extent = _Extent(mapped.data_ptr(), nbytes, self._file, self._end, mapped)
        self._extents.insert(bisect_right(self._extents, extent.address, key=lambda e: e.address), extent)
        self._end += nbytes
        return mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a state on disk, or part of one."""
        return self._extent_of(tensor) is not None

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Starts to read a state, or a part of one that begins at a block, into memory of as many bytes.

        The memory begins at a block too, and is nobody else's to the end of its last one.
        """
        extent = self._extent_of(state)
        assert extent is not None
        return self._queue.read(extent.file, extent.offset + state.data_ptr() - extent.address, _blocks(into))

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Transfer:
        """Starts to write memory, as of ``read``, over a state or a part of one."""
        extent = self._extent_of(state)
        assert extent is not None
        return self._queue.write(extent.file, extent.offset + state.data_ptr() - extent.address, _blocks(source))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read and bytes written since the start, other than through mapped states."""
        return self._queue.bytes_read, self._queue.bytes_written

    def _extent_of(self, tensor: torch.Tensor) -> _Extent | None:
        address = tensor.data_ptr()
        index = bisect_right(self._extents, address, key=lambda e: e.address)
        extent = self._extents[index - 1] if index else None
        return extent if extent is not None and address < extent.address + extent.nbytes else None

    def let_go(self, *states: torch.Tensor) -> None:
        """Gives back the memory that mapped states took when they were used; the values stay in the files.

        Args:
            states: those that may have been, or parts of them; others than this disk's are left alone. None: all.
        """
        for state in states or [extent.mapped for extent in self._extents]:
            if self.holds(state):
                release_mapped(state)

    def fail(self, error: BaseException) -> None:
        """An update or a gradient was lost on its way: nobody may use these states."""
        self._failed = error

    def check(self) -> None:
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


def padded(nbytes: int) -> int:
    """The bytes that a state of ``nbytes`` takes in a file."""
    return round_up(max(nbytes, 1))


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as bytes, to the end of its last block."""
    start = tensor.storage_offset() * tensor.element_size()
    stop = min(start + padded(tensor.nbytes), tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (stop - start,), (1,))
