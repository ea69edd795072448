"""The memory file of each rank, which its peers read and map: control pages, then memory to send from.

[Note: Huge pages]
The update, the sums and the computation run faster on huge pages, and a peer maps them in a hundredth of the time of
small ones. The kernel gives a huge page where an address and its offset in the file are equal modulo the page's size.
A full buffer begins at a huge page, and the shard of rank r is in it r times the shard's bytes further. So the tensors
of rank r begin in its file, and in its own memory, at an offset that is equal to this. Where ranks gather from fewer
ranks the offsets may differ. Then small pages are mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine import ops
from zeroengine.comm.divergence import Divergence
from zeroengine.utils.formats import round_up
from zeroengine.utils.host_memory import HUGE_PAGE_BYTES, map_in_huge_pages, private_mapping
from zeroengine.utils.process_finalizer import finalize

# What came from other hosts is exchanged within the host on channels of its own. See ``two_level``.
CHANNELS = ("gather", "reduce", "exchange", "gather of other hosts", "reduce of other hosts")
# The operations that a rank may post ahead of its peers. Their records are in a ring of this length.
MAX_POSTED = 256
# Sequence number, kind, bytes, offset, label, and ``Divergence.num_forwards``.
RECORD = struct.Struct("<QIQQ100sQQ")
CACHE_LINE = 64
# The counters posted, summed and executed. Each has a cache line of its own, so that raising one does not slow down
# cores that poll the others.
COUNTERS_BYTES = 3 * CACHE_LINE
CHANNEL_BYTES = COUNTERS_BYTES + MAX_POSTED * RECORD.size
# What a rank waits for outside of the channels, such as a save: text in UTF-8, filled up with zeros.
WAIT_BYTES = 128
# Begins that text where the rank has failed.
FAILED = "\x01"
WAIT_OFFSET = len(CHANNELS) * CHANNEL_BYTES
CONTROL_BYTES = WAIT_OFFSET + WAIT_BYTES


@dataclass(frozen=True)
class RankAddress:
    """How peers find a rank's memory file."""

    host: str  # see ``host_identity``
    pid: int
    fd: int
    inode: int


@dataclass
class SharedMemoryPeer:
    """A rank's memory file as this process sees it."""

    rank: int
    fd: int
    pidfd: int  # readable once the process has ended; -1 where the kernel has none
    control: mmap.mmap

    def wait(self) -> str:
        """Return what the rank waits for outside of the channels, or an empty string."""
        text = self.control[WAIT_OFFSET : WAIT_OFFSET + WAIT_BYTES]
        return text.rstrip(b"\0").decode(errors="replace")

    def failure(self) -> str:
        """Return why the rank runs no operation any more, or an empty string."""
        text = self.wait()
        return text.removeprefix(FAILED) if text.startswith(FAILED) else ""

    def ended(self) -> bool:
        """Return whether the rank's process has ended, as far as the kernel can tell."""
        if self.pidfd < 0:
            return False
        # ``select.select`` takes no descriptor above 1,023.
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


def check_result(result: int, action: str) -> None:
    """Raise ``OSError`` if a function of the library returned a negated ``errno``."""
    if result < 0:
        raise OSError(-result, action)


class MappedBuffer:
    """A ``Buffer`` into which a gather maps the pages of the ranks' shards, and copies nothing.

    Writes stay private to this process.

    Args:
        lib: The library.
        numel: Elements.
        dtype: Their dtype.
        writable: Whether the buffer can also be written where nothing is mapped.
    """

    def __init__(self, lib: ctypes.CDLL, numel: int, dtype: torch.dtype, writable: bool) -> None:
        self._lib, self._writable = lib, writable
        self._size = max(numel, 1) * dtype.itemsize
        _, self.tensor = _private_pages(numel, dtype)
        self._holds_memory = True

    def allocate(self) -> None:
        """Count the memory that the next gather maps."""
        if self._writable and not self._holds_memory:
            # A private mapping of this device is ordinary memory, in which writes make pages.
            fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
            try:
                check_result(self._lib.ze_map(self.tensor.data_ptr(), self._size, fd, 0, False), "mapping memory")
            finally:
                os.close(fd)
        self._holds_memory = True

    def free(self) -> None:
        """Unmap the shards. The address range stays reserved."""
        check_result(self._lib.ze_unmap(self.tensor.data_ptr(), self._size), "releasing a full buffer")
        self._holds_memory = False

    def detach(self) -> None:
        """Replace the mapped pages by private copies."""
        # The kernel copies a page of a private mapping at its first write, so writing the same values is enough.
        self.tensor.copy_(self.tensor.clone())

    def nbytes(self) -> int:
        """Return the bytes that it holds now."""
        return self._size if self._holds_memory else 0


class SharedMemory:
    """This rank's memory file, and those of its peers.

    Ranks are numbered among those that share the memory. Only messages name them as the engine does.

    Args:
        rank: This rank.
        fd: The descriptor of its file.
        peers: Every rank, in rank order.
        numbers: The engine's number of each rank.
        divergence: Refuses operations after a divergence, and learns of the first one.

    Attributes:
        numbers, divergence: See above.
        peers: Every rank, in rank order.
        others: Every rank but this one.
    """

    def __init__(
        self, rank: int, fd: int, peers: list[SharedMemoryPeer], numbers: Sequence[int], divergence: Divergence
    ) -> None:
        lib = ops.library()
        # Without the library ``offer`` returns no address.
        assert lib is not None
        self.rank, self.world_size, self.lib = rank, len(peers), lib
        self.peers, self.others = peers, [p for p in peers if p.rank != rank]
        self.control = peers[rank].control
        self.numbers, self.divergence = numbers, divergence
        self._fd = fd
        self._end = CONTROL_BYTES
        # Address, bytes, and offset in the file of each tensor of ``empty``.
        self._regions: list[tuple[int, int, int]] = []
        # Offset in the file and bytes of the tensors that are gone.
        self._unused: list[tuple[int, int]] = []
        # The addresses of mapped buffers.
        self._mapped: set[int] = set()
        # The finalizer holds the descriptors and not this object, or the object would never be collected.
        descriptors = {fd, *(p.fd for p in self.others), *(p.pidfd for p in peers if p.pidfd >= 0)}
        self._process, self._finalizer = os.getpid(), finalize(self, _close_all, descriptors)
        # Peers that wait for this rank learn of its error at once.
        show = weakref.WeakMethod(self._show_failure)
        divergence.listeners["shared memory", fd] = lambda message: (show() or _ignore)(message)

    @property
    def closed(self) -> bool:
        """Whether nothing may be posted: the engine is closed, or belongs to the parent of this process."""
        return not self._finalizer.alive or self._process != os.getpid()

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        return f"rank {self.numbers[rank]}"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory of the file, 1-D, at the file's end."""
        nbytes = max(numel, 1) * dtype.itemsize
        # Peers map this memory, and a mapping begins at a page. See also "Huge pages" above.
        offset, phase = round_up(self._end, mmap.ALLOCATIONGRANULARITY), 0
        if nbytes >= HUGE_PAGE_BYTES:
            phase = self.rank * nbytes // mmap.PAGESIZE * mmap.PAGESIZE
            offset += (phase - offset) % HUGE_PAGE_BYTES
        self._end = offset + nbytes
        os.ftruncate(self._fd, self._end)
        # Python's mmap of the file would keep a descriptor open for each tensor. So this reserves the pages first, and
        # maps the file over them.
        memory, tensor = _private_pages(numel, dtype, phase)
        weakref.finalize(memory, self._unused.append, (offset, nbytes))
        start = tensor.data_ptr()
        check_result(self.lib.ze_map(start, nbytes, self._fd, offset, True), "mapping shared memory")
        # The system reuses addresses of freed memory, so older regions at these addresses are stale.
        self._regions = [r for r in self._regions if r[0] + r[1] <= start or start + nbytes <= r[0]]
        self._regions.append((start, nbytes, offset))
        return tensor

    def reclaim(self) -> None:
        """Give the pages of tensors that are gone back to the system. No peer may read them any more."""
        while self._unused:
            offset, nbytes = self._unused.pop()
            with mmap.mmap(self._fd, nbytes, offset=offset) as pages:
                pages.madvise(mmap.MADV_REMOVE)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Return where in the file ``tensor`` begins, in bytes."""
        address = tensor.data_ptr()
        for start, nbytes, offset in self._regions:
            if start <= address < start + nbytes:
                return offset + address - start
        raise AssertionError("memory that is sent comes from Transport.empty")

    def mapped_buffer(self, numel: int, dtype: torch.dtype, *, writable: bool = False) -> MappedBuffer:
        """Return a new buffer that gathers map shards into. ``writable``: other values may be written beside them."""
        buffer = MappedBuffer(self.lib, numel, dtype, writable)
        self._mapped.add(buffer.tensor.data_ptr())
        # The system may reuse the address for memory that is no mapped buffer.
        weakref.finalize(buffer, self._mapped.discard, buffer.tensor.data_ptr())
        return buffer

    def is_mapped(self, full: torch.Tensor) -> bool:
        """Return whether ``full`` belongs to a ``mapped_buffer``."""
        return full.data_ptr() in self._mapped

    @contextlib.contextmanager
    def long_wait(self, what: str) -> Iterator[None]:
        """Show peers, inside the block, what this rank waits for. See ``Group.long_wait``."""
        self._show_wait(what)
        try:
            yield
        finally:
            self._show_wait("")

    def _show_failure(self, message: str) -> None:
        self._show_wait(FAILED + message[: WAIT_BYTES - 8])

    def _show_wait(self, what: str) -> None:
        if not self.closed:
            text = what.encode()[:WAIT_BYTES].ljust(WAIT_BYTES, b"\0")
            self.control[WAIT_OFFSET : WAIT_OFFSET + WAIT_BYTES] = text

    def close(self) -> None:
        """Close every file. Mapped memory lives as long as its tensors."""
        self._finalizer()


def offer() -> RankAddress | None:
    """Create this rank's memory file. Return None if the system or the build cannot."""
    if ops.library() is None or not hasattr(os, "memfd_create"):
        return None
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        # The file has no name: the kernel frees it with the last process that has it open, however the processes end.
        # MFD_CLOEXEC keeps it from child programs.
        fd = os.memfd_create("zeroengine", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        os.ftruncate(fd, CONTROL_BYTES)
        address = RankAddress(host_identity(), os.getpid(), fd, os.fstat(fd).st_ino)
        undo.pop_all()
        return address
    return None


def open_memory(
    rank: int,
    addresses: Sequence[RankAddress | None],
    numbers: Sequence[int],
    divergence: Divergence,
) -> SharedMemory | str:
    """Open the memory file of every rank.

    Args:
        rank: This rank's place in ``addresses``.
        addresses: Every rank's.
        numbers: The engine's number of each of these ranks.
        divergence: See ``SharedMemory``.

    Returns:
        The memory; or the reason why it cannot be used, and then everything is closed.
    """
    own_address = addresses[rank]
    if own_address is None:
        return "shared memory is not available in this build or system"
    peers: list[SharedMemoryPeer] = []
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, own_address.fd)
        for r, address in enumerate(addresses):
            if address is None or address.host != own_address.host:
                return f"rank {numbers[r]} runs on another host or without shared memory"
            try:
                fd, pidfd = own_address.fd, -1
                if r != rank:
                    # /proc gives access to the peer's descriptor without a socket, if both run as one user.
                    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
                    undo.callback(os.close, fd)
                    if hasattr(os, "pidfd_open"):
                        pidfd = os.pidfd_open(address.pid)
                        undo.callback(os.close, pidfd)
                # In different containers the pid may belong to another process, and the peer may have closed the file.
                if os.fstat(fd).st_ino != address.inode:
                    return f"rank {numbers[r]}'s memory is not visible from rank {numbers[rank]}"
                peers.append(SharedMemoryPeer(r, fd, pidfd, mmap.mmap(fd, CONTROL_BYTES)))
            except OSError as error:
                return f"rank {numbers[r]}'s memory cannot be opened from rank {numbers[rank]}: {error}"
        undo.pop_all()
    return SharedMemory(rank, own_address.fd, peers, numbers, divergence)


def _private_pages(numel: int, dtype: torch.dtype, phase: int = 0) -> tuple[mmap.mmap, torch.Tensor]:
    """Return private memory in pages of its own, and a tensor with which they are unmapped.

    Memory that is large enough begins ``phase`` bytes after a place where a huge page can lie.
    """
    memory, start = map_in_huge_pages(max(numel, 1) * dtype.itemsize, private_mapping, phase)
    return memory, torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)


def host_identity() -> str:
    """Return the same text on ranks that can share memory."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The boot id differs between hosts. Pids are valid only within one pid namespace, and containers that share it
        # differ in their network namespace.
        return "/".join([boot_id, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])
    except OSError:
        # Systems other than Linux share no memory, but their sums go host by host as well.
        return socket.gethostname()


def _close_all(descriptors: set[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _ignore(message: str) -> None:
    """Tell nobody: the memory is closed."""
