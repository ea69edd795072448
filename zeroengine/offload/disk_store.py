"""States in files on a disk."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zeroengine.disk.mapped_memory import populate, release_mapped
from zeroengine.disk.queue import DiskQueue, TransferTimes
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.interfaces import Medium, padded_nbytes
from zeroengine.utils.work import Work

MIN_EXTRA_FILE_BYTES = 1 << 26
# The bytes of a mapped state that are in memory at once while it is filled.
FILL_CHUNK_BYTES = 1 << 22


class _FileRegion(NamedTuple):
    """The part of a file that is a state.

    Attributes:
        file: The file.
        offset: The offset of the state in the file, in bytes.
        mapped: The mapped state.
    """

    file: SwapFile
    offset: int
    mapped: torch.Tensor


# [Note: Two ways to the disk]
# Loops over whole states (the update, gathers, gradients) move blocks between the files and their own buffers, past the
# page cache and overlapping the computation. Rare uses (checkpoints, inspection, changes by the user) take the tensor
# that ``empty`` returned, which is a mapped part of a file. They call ``populate`` first, so that a failing disk is an
# error and not a signal (see the note in ``disk/mapped_memory.py``). The kernel keeps both ways coherent as long as
# they do not touch the same bytes at the same time, so await transfers before using a mapped tensor.
class DiskStore:
    """An ``OffloadStore`` in this rank's files on a disk, for states that the CPU computes with.

    Args:
        folder: The folder of the files.
        queue: The queue that reads and writes them.
        expected_bytes: The padded bytes of all states that will live here. They get one file; further states get more.

    Raises:
        OffloadError: The disk has too little room.
    """

    medium: Medium = "nvme"
    copies = None

    def __init__(self, folder: SwapFolder, queue: DiskQueue, expected_bytes: int) -> None:
        self._folder, self._queue = folder, queue
        # The file's space is allocated here, so that a full disk is an error before training begins.
        self._file = folder.file("states", padded_nbytes(expected_bytes))
        self._end = 0
        # By the address of the state's storage, which all parts of the state share.
        self._regions: dict[int, _FileRegion] = {}
        self._error: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new state that is a mapped part of a file: see the note above."""
        # Direct I/O needs every state to begin at a block of the file.
        nbytes = padded_nbytes(numel * dtype.itemsize)
        if self._end + nbytes > self._file.nbytes:
            self._file, self._end = self._folder.file("more states", max(nbytes, MIN_EXTRA_FILE_BYTES)), 0
        mapped = self._file.mapped(self._end, numel, dtype)
        self._regions[mapped.untyped_storage().data_ptr()] = _FileRegion(self._file, self._end, mapped)
        self._end += nbytes
        return mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a mapped state of this store, or a part of one."""
        # An address on a GPU may equal one on the host, so the device is compared first.
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._regions

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` through the mapping, a chunk at a time."""
        numel = FILL_CHUNK_BYTES // state.element_size()
        for start in range(0, state.numel(), numel):
            chunk = state[start : start + numel]
            populate(chunk, write=True)
            chunk.copy_(values[start : start + numel])
            # A state may be larger than memory, so each chunk is evicted.
            self.evict(chunk)

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to read a state from its file. The last block of ``into`` is overwritten to its end."""
        # The read bypasses the mapping. ``state`` only tells which part of the file to read.
        file, offset = self._locate(state)
        return self._queue.read(file, offset, _whole_blocks(into))

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to write a state to its file, to the end of the last block of ``source``."""
        file, offset = self._locate(state)
        return self._queue.write(file, offset, _whole_blocks(source))

    def _locate(self, state: torch.Tensor) -> tuple[SwapFile, int]:
        """Return the file that a state is in, and where it begins there in bytes."""
        region = self._regions[state.untyped_storage().data_ptr()]
        return region.file, region.offset + state.data_ptr() - region.mapped.data_ptr()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read and bytes written since the start, other than through mapped states."""
        return self._queue.bytes_read, self._queue.bytes_written

    def trace(self, keeps: bool) -> list[TransferTimes]:
        """Return the transfers since the last call that were traced, and trace those from now on, or do not."""
        transfers, self._queue.timeline = self._queue.timeline or [], [] if keeps else None
        return transfers

    def evict(self, *states: torch.Tensor) -> None:
        """Free the memory that mapped states took when they were used. The values stay in the files.

        Args:
            states: States, or parts of them. States of other stores are ignored. By default all states of this store.
        """
        for state in states or [region.mapped for region in self._regions.values()]:
            if self.holds(state):
                release_mapped(state)

    def poison(self, error: BaseException) -> None:
        """Make ``check_intact`` raise from now on."""
        # A partial update cannot be undone, so the states stay unusable until a checkpoint replaces them.
        self._error = error

    def check_intact(self) -> None:
        """Check that no update ended half way.

        Raises:
            ZeroEngineError: One did.
        """
        if self._error is not None:
            raise ZeroEngineError(
                f"the states on disk are half updated since a transfer failed ({self._error}): make the engine anew "
                "and load its last checkpoint"
            ) from self._error

    def close(self) -> None:
        """Wait for the transfers under way, and close the files."""
        # Transfers use the files, so the queue is closed first.
        self._queue.close()
        self._folder.close()


def _whole_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` to the end of its last block, so that O_DIRECT can move all of them."""
    start = tensor.storage_offset() * tensor.element_size()
    # A buffer of whole blocks contains the rest of the block. Otherwise the range ends with the buffer, and
    # ``DiskQueue`` decides how to move its last bytes.
    stop = min(start + padded_nbytes(tensor.nbytes), tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage(), start, (stop - start,), (1,))
