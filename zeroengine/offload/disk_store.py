"""States in files on a disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from zeroengine.disk.mapped_memory import call_before_use, populate, populate_pages, release_mapped
from zeroengine.disk.queue import DiskQueue, TransferTimes
from zeroengine.disk.read_only_file import ReadOnlyFile
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.interfaces import Medium, padded_nbytes
from zeroengine.utils.work import Together, Work

MIN_EXTRA_FILE_BYTES = 1 << 26
# The bytes of a mapped state that are in memory at once while it is filled.
FILL_CHUNK_BYTES = 1 << 22


class _Part(NamedTuple):
    """A part of a state whose values are in a file of others. All in bytes.

    Attributes:
        start: Where it begins in the state.
        stop: Where it ends there.
        file: The file.
        offset: Where it begins in the file.
    """

    start: int
    stop: int
    file: ReadOnlyFile
    offset: int

    def within(self, start: int, stop: int) -> _Part:
        """Return the part of this one that lies in [start, stop) of the state."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return _Part(start, stop, self.file, self.offset + start - self.start)


@dataclass
class _FileRegion:
    """The part of a file that is a state.

    Attributes:
        file: The file.
        offset: The offset of the state in the file, in bytes.
        mapped: The mapped state.
        parts: The parts of it whose values are in other files, in order.
    """

    file: SwapFile
    offset: int
    mapped: torch.Tensor
    parts: list[_Part] = field(default_factory=list)

    def range_of(self, state: torch.Tensor) -> tuple[int, int]:
        """Return where a part of the mapped state begins and ends in it, in bytes."""
        start = state.data_ptr() - self.mapped.data_ptr()
        return start, start + state.nbytes

    def parts_in(self, start: int, stop: int) -> Iterator[_Part]:
        """Yield what lies in [start, stop) of each part."""
        for part in self.parts:
            if part.start < stop and start < part.stop:
                yield part.within(start, stop)

    def replace(self, start: int, stop: int, new: Iterable[_Part] = ()) -> None:
        """Let the values in [start, stop) be where ``new`` says, or else in this file."""
        parts, self.parts = [*self.parts_in(0, start), *new, *self.parts_in(stop, self.mapped.nbytes)], []
        for part in parts:
            last = self.parts[-1] if self.parts else None
            if last and (last.stop, last.file, last.offset + last.stop - last.start) == (part.start, *part[2:]):
                self.parts[-1] = last._replace(stop=part.stop)
            else:
                self.parts.append(part)


# [Note: Two ways to the disk]
# Loops over whole states (the update, gathers, gradients) move blocks between the files and their own buffers, past the
# page cache and overlapping the computation. Rare uses (checkpoints, inspection, changes by the user) take the tensor
# that ``empty`` returned, which is a mapped part of a file. They call ``populate`` first, so that a failing disk is an
# error and not a signal (see the note in ``disk/mapped_memory.py``). The kernel keeps both ways coherent as long as
# they do not touch the same bytes at the same time, so await transfers before using a mapped tensor.
#
# [Note: Values in files of others]
# Frozen weights that lie on this disk already, as in a safetensors file, need not be copied: ``refer`` remembers where
# they are, and ``read`` reads them there. What uses such a state in place gets it as any other, because ``populate``
# then copies it into its own file, once.
class DiskStore:
    """An ``OffloadStore`` in this rank's files on a disk, for states that the CPU computes with.

    Args:
        folder: The folder of the files.
        queue: The queue that reads and writes them.
        expected_bytes: The padded bytes of all states that will live here. They get one file; further states get more.
        unallocated_bytes: The padded bytes of those among them that take no room yet.

    Raises:
        OffloadError: The disk has too little room.
    """

    medium: Medium = "nvme"
    copies = None

    def __init__(self, folder: SwapFolder, queue: DiskQueue, expected_bytes: int, unallocated_bytes: int = 0) -> None:
        self._folder, self._queue = folder, queue
        # The file's space is allocated here, so that a full disk is an error before training begins.
        self._file = folder.file("states", padded_nbytes(expected_bytes - unallocated_bytes))
        self._end = self._unallocated_end = 0
        self._unallocated_file: SwapFile | None = None
        if unallocated_bytes:
            self._unallocated_file = folder.file("parameters", unallocated_bytes, allocated=False)
        # By the address of the state's storage, which all parts of the state share.
        self._regions: dict[int, _FileRegion] = {}
        self._error: BaseException | None = None

    def empty(self, numel: int, dtype: torch.dtype, *, allocated: bool = True) -> torch.Tensor:
        """Return a new state that is a mapped part of a file: see the note above."""
        # Direct I/O needs every state to begin at a block of the file.
        nbytes = padded_nbytes(numel * dtype.itemsize)
        if not allocated and self._unallocated_file is not None:
            region = self._region(self._unallocated_file, self._unallocated_end, numel, dtype)
            self._call_before_use(region.mapped)
            self._unallocated_end += nbytes
            return region.mapped
        if self._end + nbytes > self._file.nbytes:
            self._file, self._end = self._folder.file("more states", max(nbytes, MIN_EXTRA_FILE_BYTES)), 0
        region = self._region(self._file, self._end, numel, dtype)
        self._end += nbytes
        return region.mapped

    def _region(self, file: SwapFile, offset: int, numel: int, dtype: torch.dtype) -> _FileRegion:
        """Make the state that begins at ``offset`` bytes of a file."""
        region = _FileRegion(file, offset, file.mapped(offset, numel, dtype))
        self._regions[region.mapped.untyped_storage().data_ptr()] = region
        return region

    def _call_before_use(self, mapped: torch.Tensor) -> None:
        # The mapping would otherwise keep the store alive, which has it.
        own = weakref.ref(self)

        def prepare(state: torch.Tensor, write: bool) -> None:
            if (store := own()) is not None:
                store._prepare(state, write=write)

        call_before_use(mapped, prepare)

    def _prepare(self, state: torch.Tensor, *, write: bool) -> None:
        """Make a state, or a part of one, usable in place: give it its values, and room on the disk for a write."""
        region = self._region_of(state)
        self._copy_parts(region)
        if write:
            start, stop = region.range_of(state)
            region.file.allocate(region.offset + start, stop - start)

    def _region_of(self, state: torch.Tensor) -> _FileRegion:
        return self._regions[state.untyped_storage().data_ptr()]

    def _copy_parts(self, region: _FileRegion) -> None:
        """Copy the values that are in other files into a state's own file."""
        values = region.mapped.view(torch.uint8)
        while region.parts:
            part = region.parts[-1]
            part = part.within(max(part.start, part.stop - FILL_CHUNK_BYTES), part.stop)
            region.file.allocate(region.offset + part.start, part.stop - part.start)
            chunk, copy = values[part.start : part.stop], torch.empty(part.stop - part.start, dtype=torch.uint8)
            self._queue.read(part.file, part.offset, copy).wait_host()
            part.file.check_unchanged()
            populate_pages(chunk, write=True)
            chunk.copy_(copy)
            self.evict(chunk)
            region.replace(part.start, part.stop)

    def can_refer(self, state: torch.Tensor, file: ReadOnlyFile) -> bool:
        """Return whether ``state`` is one of this store whose values may be in ``file``: it is on the same disk."""
        return self.holds(state) and state.is_contiguous() and file.disk == self._folder.disk

    def refer(self, state: torch.Tensor, file: ReadOnlyFile, offset: int) -> None:
        """Let a state, or a part of one, have the values that begin at ``offset`` bytes of a file. Nothing is copied.

        It is for states that only ``read`` uses: see the note above.
        """
        region = self._region_of(state)
        start, stop = region.range_of(state)
        region.replace(start, stop, [_Part(start, stop, file, offset)])
        self._call_before_use(region.mapped)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a mapped state of this store, or a part of one."""
        # An address on a GPU may equal one on the host, so the device is compared first.
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._regions

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` through the mapping, a chunk at a time."""
        region = self._region_of(state)
        begin, end = region.range_of(state)
        # What has no room on the disk keeps its values, and so does what lies around it.
        if any(part.start < begin or end < part.stop for part in region.parts):
            self._copy_parts(region)
        region.file.allocate(region.offset + begin, end - begin)
        region.replace(begin, end)
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
        region = self._region_of(state)
        start, stop = region.range_of(state)
        if not region.parts:
            return self._queue.read(region.file, region.offset + start, _whole_blocks(into))
        values, end, reads = into.view(torch.uint8), start, []
        parts = list(region.parts_in(start, stop))
        for part in (*parts, None):
            # Padding lies between parameters, and parameters that were not loaded.
            gap = (stop if part is None else part.start) - end
            if gap:
                target = values[end - start : end - start + gap]
                reads.append(self._queue.read(region.file, region.offset + end, target))
            if part is not None:
                reads.append(self._queue.read(part.file, part.offset, values[part.start - start : part.stop - start]))
                end = part.stop
        return Together(reads, partial(_check_unchanged, parts))

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to write a state to its file, to the end of the last block of ``source``."""
        region = self._region_of(state)
        self._copy_parts(region)
        return self._queue.write(region.file, region.offset + region.range_of(state)[0], _whole_blocks(source))

    @property
    def unaligned_bytes(self) -> int:
        """Bytes of memory that reads of other files go through."""
        return self._queue.unaligned_bytes

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


def _check_unchanged(parts: Iterable[_Part]) -> None:
    for file in {part.file for part in parts}:
        file.check_unchanged()


def _whole_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` to the end of its last block, so that O_DIRECT can move all of them."""
    start = tensor.storage_offset() * tensor.element_size()
    # A buffer of whole blocks contains the rest of the block. Otherwise the range ends with the buffer, and
    # ``DiskQueue`` decides how to move its last bytes.
    stop = min(start + padded_nbytes(tensor.nbytes), tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage(), start, (stop - start,), (1,))
