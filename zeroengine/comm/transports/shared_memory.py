"""The transport between CPU ranks of one host: each rank's memory is a file that its peers read.

Gloo would send the bytes through sockets, four kernel copies a byte on cores that are busy with compute.
Here a rank *posts* an operation (a counter in a shared page, and what the operation is) and each peer
reads what it needs straight into its destination, or maps it.

[Note: Lifetimes]
Memory that was posted may be written again once every peer has executed the operation (``executed`` of
each peer is past it). ``all_reduce_scalars`` is posted on the reduce channel after the gather channel is
drained, and a rank posts it only after executing everything before it, so it closes all lifetimes at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Buffer, ChannelName, PagedBuffer, refill
from zeroengine.comm.transports.shared_memory_channel import (
    CHANNELS,
    CONTROL_BYTES,
    SharedMemoryChannel,
    SharedMemoryPeer,
)


class MappedBuffer:
    """A ``Buffer`` that shows the ranks' shards side by side: a gather maps their pages, and copies nothing.

    Writes stay private to this process, as they would in a copy.
    """

    def __init__(self, lib: ctypes.CDLL, numel: int, dtype: torch.dtype) -> None:
        self._lib = lib
        self._size = max(numel, 1) * dtype.itemsize
        self.tensor = _reserve(numel, dtype)
        self._holds = True

    def prepare(self) -> None:
        self._holds = True

    def free(self) -> None:
        failed = self._lib.ze_unmap(self.tensor.data_ptr(), self._size)
        if failed:
            raise OSError(-failed, "releasing a full buffer")
        self._holds = False

    def detach(self) -> None:
        self.tensor.copy_(self.tensor.clone())  # a private mapping has pages of its own once they are written

    def nbytes(self) -> int:
        return self._size if self._holds else 0


class SharedMemoryTransport:
    """See ``interfaces.Transport``. Made by ``connect``."""

    name = "shm"
    overlaps = False

    def __init__(self, rank: int, fd: int, peers: list[SharedMemoryPeer], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, len(peers), timeout
        lib = ops.library()
        assert lib is not None  # `offer` looked
        self.lib = lib
        self.peers, self.others = peers, [p for p in peers if p.rank != rank]
        self.control = peers[rank].control
        self.closed = False
        self._fd = fd
        self._end = CONTROL_BYTES
        self._regions: list[tuple[int, int, int]] = []  # address, bytes, offset in the file
        self.gather, self.reduce = (SharedMemoryChannel(self, name) for name in CHANNELS)
        self._mapped: set[int] = set()  # addresses of mapped buffers
        self._scalars: list[torch.Tensor] = []
        descriptors = {fd, *(p.fd for p in self.others), *(p.pidfd for p in peers if p.pidfd >= 0)}
        self._finalizer = weakref.finalize(self, _close_all, descriptors)

    def empty(self, numel: int, dtype: torch.dtype, channel: ChannelName, *, sent: bool = True) -> torch.Tensor:
        if not sent:
            return torch.empty(numel, dtype=dtype, device="cpu")
        nbytes = max(numel, 1) * dtype.itemsize
        offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end = offset + nbytes
        os.ftruncate(self._fd, self._end)
        tensor = _reserve(numel, dtype)  # mmap.mmap(fd) would keep a descriptor for each
        start = tensor.data_ptr()
        failed = self.lib.ze_map(start, nbytes, self._fd, offset, True)
        if failed:
            raise OSError(-failed, "mapping shared memory")
        # The system gives the addresses of memory that is gone again.
        self._regions = [r for r in self._regions if r[0] + r[1] <= start or start + nbytes <= r[0]]
        self._regions.append((start, nbytes, offset))
        return tensor

    def refill(self, tensor: torch.Tensor, channel: ChannelName | None) -> None:
        refill(tensor)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        if copied:
            return PagedBuffer(numel, dtype)
        buffer = MappedBuffer(self.lib, numel, dtype)
        self._mapped.add(buffer.tensor.data_ptr())
        weakref.finalize(buffer, self._mapped.discard, buffer.tensor.data_ptr())
        return buffer

    def shard_align(self, dtype: torch.dtype) -> int:
        return mmap.PAGESIZE // dtype.itemsize

    def is_mapped(self, full: torch.Tensor) -> bool:
        return full.data_ptr() in self._mapped

    def offset_of(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr()
        for start, nbytes, offset in self._regions:
            if start <= address < start + nbytes:
                return offset + address - start
        raise AssertionError("memory that is sent comes from Transport.empty")

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        # Two vectors in turn: a rank is at most one such operation ahead of the slowest reader.
        if not self._scalars or self._scalars[0].numel() < values.numel():
            self._scalars = [self.empty(values.numel(), torch.float64, "reduce") for _ in range(2)]
        self._scalars.reverse()
        sent = self._scalars[0][: values.numel()].copy_(values)
        self.gather.drain()
        self.reduce.drain()
        return self.reduce.all_reduce_scalars(sent, label)

    def check_order(self) -> None: ...

    def fence(self) -> None:
        for channel in (self.gather, self.reduce):
            channel.drain()
        for channel in (self.gather, self.reduce):
            channel.fence()

    def progress(self) -> None:
        self.gather.progress()
        self.reduce.progress()

    def report(self) -> str:
        lines = []
        for peer in self.peers:
            at = ", ".join(f"{name}: {getattr(self, name).describe(peer.rank)}" for name in CHANNELS)
            lines.append(f"rank {peer.rank}{' (ended)' if peer.ended() else ''} last issued {at}")
        return "; ".join(lines) + "."

    def close(self) -> None:
        self.closed = True
        self._finalizer()


def _reserve(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Private memory of its own pages, unmapped when the tensor goes."""
    size = max(numel, 1) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def _close_all(descriptors: set[int]) -> None:
    for fd in descriptors:
        os.close(fd)


@dataclass(frozen=True)
class Address:
    """Where peers find a rank's memory."""

    host: str  # differs between hosts and between containers, of which network namespaces are a sign
    pid: int
    fd: int
    inode: int


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return "/".join([f.read().strip(), os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


def offer() -> Address | None:
    """Makes this rank's memory file; None where the system or the build has no such thing."""
    if ops.library() is None or not hasattr(os, "memfd_create"):
        return None
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        fd = os.memfd_create("zeroengine", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        os.ftruncate(fd, CONTROL_BYTES)
        address = Address(_host(), os.getpid(), fd, os.fstat(fd).st_ino)
        undo.pop_all()
        return address
    return None


def connect(rank: int, addresses: Sequence[Address | None], timeout: float) -> SharedMemoryTransport | str:
    """Opens every peer's memory; a reason why not, with everything closed, where one cannot be reached."""
    mine = addresses[rank]
    if mine is None:
        return "shared memory is not available in this build or system"
    peers: list[SharedMemoryPeer] = []
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, mine.fd)
        for r, address in enumerate(addresses):
            if address is None or address.host != mine.host:
                return f"rank {r} runs on another host or without shared memory"
            try:
                fd, pidfd = mine.fd, -1
                if r != rank:
                    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
                    undo.callback(os.close, fd)
                    if hasattr(os, "pidfd_open"):
                        pidfd = os.pidfd_open(address.pid)
                        undo.callback(os.close, pidfd)
                if os.fstat(fd).st_ino != address.inode:
                    return f"rank {r}'s memory is not visible from rank {rank}"
                peers.append(SharedMemoryPeer(r, fd, pidfd, mmap.mmap(fd, CONTROL_BYTES)))
            except OSError as error:
                return f"rank {r}'s memory cannot be opened from rank {rank}: {error}"
        undo.pop_all()
    return SharedMemoryTransport(rank, mine.fd, peers, timeout)
