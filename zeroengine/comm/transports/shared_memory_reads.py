"""Reads of what the ranks of one host have posted: by copies, by mapping pages, and by sums."""

from __future__ import annotations

import ctypes

import torch

from zeroengine import ops
from zeroengine.comm.alarm_board import advise_on_units, compare_forwards
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transports.shared_memory_file import (
    COUNTERS_BYTES,
    MAX_POSTED,
    RECORD,
    SharedMemory,
    SharedMemoryPeer,
    check_result,
)

GATHER, REDUCE, SCALARS, EXCHANGE = range(4)
KINDS = ("gather", "reduce", "all-reduce", "exchange")


class PeerReads:
    """Reads the records of one channel, and the memory that they announce. The caller has seen the counters.

    Args:
        memory: The memory files of all ranks.
        base: Where the channel begins in the control pages, in bytes.
    """

    def __init__(self, memory: SharedMemory, base: int) -> None:
        self._memory, self._base = memory, base

    def record(self, rank: int, seq: int) -> tuple[int, int, int, int, str, int, int]:
        """Return the number, kind, bytes, offset and label of an operation of a rank, and its ``num_forwards``."""
        start = self._base + COUNTERS_BYTES + seq % MAX_POSTED * RECORD.size
        *numbers, label, evaluated, trained = RECORD.unpack_from(self._memory.peers[rank].control, start)
        number, kind, nbytes, offset = numbers
        return number, kind, nbytes, offset, label.rstrip(b"\0").decode(errors="replace"), evaluated, trained

    def source(self, peer: SharedMemoryPeer, seq: int) -> int:
        """Return the offset that ``peer`` posted.

        Raises:
            DivergenceError: The peer's operation differs from this rank's.
        """
        # Offsets depend on each rank's allocations, so they are not compared.
        number, kind, nbytes, offset, label, *num_forwards = self.record(peer.rank, seq)
        own_number, own_kind, own_nbytes, _, own_label, *own_num_forwards = self.record(self._memory.rank, seq)
        if (number, kind, nbytes, label) != (own_number, own_kind, own_nbytes, own_label):
            numbers = self._memory.numbers
            forwards = {numbers[self._memory.rank]: own_num_forwards, numbers[peer.rank]: num_forwards}
            raise self._memory.divergence.error(
                f"the ranks run different units: {self._memory.name_of(self._memory.rank)} is at {KINDS[own_kind]} "
                f"{own_label} ({own_nbytes} bytes), {self._memory.name_of(peer.rank)} at {KINDS[kind]} {label} "
                f"({nbytes} bytes). {advise_on_units(compare_forwards(forwards))}."
            )
        return offset

    def read(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int, start: int = 0) -> None:
        """Copy a part of what ``peer`` posted to an address of this process."""
        # Reading through the file turns a failure into an error. A load from a mapping would raise a signal.
        result = self._memory.lib.ze_pread(peer.fd, address, nbytes, self.source(peer, seq) + start)
        check_result(result, f"reading the memory of {self._memory.name_of(peer.rank)}")

    def map(self, peer: SharedMemoryPeer, seq: int, address: int, nbytes: int, start: int) -> None:
        """Map a part of what ``peer`` posted, whole pages, at an address of this process."""
        result = self._memory.lib.ze_map(address, nbytes, peer.fd, self.source(peer, seq) + start, False)
        check_result(result, f"mapping the memory of {self._memory.name_of(peer.rank)}")

    def sum_kernel(self, target: torch.Tensor, own: torch.Tensor, seq: int, accumulate: bool, start: int) -> None:
        """Read every peer's values and add them in rank order, in one pass over the memory.

        Args:
            target: The sum.
            own: This rank's values.
            seq: The number of the operation.
            accumulate: Whether the sum is added to ``target``.
            start: The offset of the values in what each rank posted, in bytes.
        """
        memory, count = self._memory, self._memory.world_size
        local, fds, offsets = (ctypes.c_void_p * count)(), (ctypes.c_int * count)(), (ctypes.c_int64 * count)()
        local[memory.rank] = own.data_ptr()
        for peer in memory.others:
            fds[peer.rank], offsets[peer.rank] = peer.fd, self.source(peer, seq) + start
        result = self._memory.lib.ze_sum(
            *(target.data_ptr(), ops.DTYPE_CODES[target.dtype], accumulate, target.numel()),
            *(ops.DTYPE_CODES[own.dtype], count, local, fds, offsets),
        )
        check_result(result, "reading the memory of a peer rank")

    def sum_copies(self, target: torch.Tensor, own: torch.Tensor, seq: int, accumulate: bool, start: int) -> None:
        """Do the same as ``sum_kernel`` for any dtype, over copies of the peers' values."""
        memory = self._memory
        pieces = [own if peer.rank == memory.rank else torch.empty_like(own) for peer in memory.peers]
        for peer in memory.others:
            self.read(peer, seq, pieces[peer.rank].data_ptr(), own.nbytes, start)
        sum_in_rank_order(target, pieces, accumulate)
