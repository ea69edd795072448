"""The contract between communication and the rest of the program.

A ``Transport`` moves bytes between the ranks of one process group. It has the channels ``gather`` and ``reduce``, and
``exchange`` among ranks that share a sample. Each has its own order: all ranks issue the same operations on a channel
in the same order, and an operation may be issued on one channel while another is under way on another one.

[Note: Memory and streams]
On CUDA the caching allocator gives freed memory to whoever next allocates on the stream that it was allocated on, at
once. Kernels and collectives that still use the memory must be ahead of that stream's next work. They are:
- A collective starts behind the stream that issued it, and keeps its tensors alive. Code that frees memory of a
  collective awaits it first, which orders the awaiting stream behind it.
- A full buffer may be gathered ahead of its use, on one stream, and be used and released on another. The first stream
  then waits for the other (``ResizableBuffer.free``), by an event, never by ``record_stream``.
- A gradient buffer is written again once its reduce is done, or on a stream that has awaited it (``Channel.reusable``).
As everywhere in torch, code that computes on several streams must order them: a forward behind the previous step, and
a second stream that uses a unit behind the first.

[Note: What a transport promises]
- Waiting. Every operation returns a ``Work``, which may be awaited twice, late, or out of order; see
  ``utils.work.Work``. Reduces that accumulate into one shard add in the order of issue, whichever is awaited first.
  A transport may begin part of an operation only when it is awaited, so every rank awaits all of its works before the
  next ``all_reduce_scalars``.
- Dtypes. Gathers move bytes of any dtype. Sums take any floating dtype: float32, bfloat16 and float16 have kernels, and
  other dtypes go through torch. The shard and the full buffer of a reduce-scatter may differ in dtype.
- Rounding. Every transport except NCCL's adds bfloat16 and float16 in float32, in rank order, and rounds once, to the
  dtype of the target, so that equal inputs give equal bits. On several hosts each adds the ranks of a host, and then
  the hosts in order. NCCL has its own order and rounding. Nothing here divides: see "SUM only" in docs/design.md.
- Divergence. Ranks that issue different operations get a ``DivergenceError`` that names units and ranks. Shared memory
  compares the records of each operation when it is executed. Gloo tags each message with the operation's number and
  name, so that different operations stall and the watchdog reports them. NCCL compares a checksum of all operations so
  far in ``all_reduce_scalars`` and ``check_order``, and its watchdog notices collectives that do not end.
- Memory. Tensors that an operation sends (``shard`` of a gather, ``full`` of a reduce) must come from
  ``Transport.empty``. It may receive into any memory. ``Transport.buffer`` makes full buffers.

[Note: How to add a transport]
1. Write ``transports/<name>.py`` with a class that inherits ``TransportTraits`` and has the attributes and methods of
   ``Transport``, and a channel class that has those of ``Channel``. mypy checks them against the protocols. The class
   states the traits in which it differs, and in ``staged_numel`` the memory that ``staging_bytes`` counts.
2. Return a ``Work`` from each operation. If this rank must still process the result, return ``Then(work, finish)``. Use
   ``rank_order_sum.sum_in_rank_order`` to add on the CPU, and make each accumulation wait for the previous one, as
   ``GlooChannel.reduce_scatter`` does.
3. Report stalls and divergence: call ``Watchdog.record`` or ``Watchdog.issue`` for each operation, and put calls that
   may fail inside ``Watchdog.guard``.
4. In ``transports/choose.py`` add the class to ``TRANSPORTS``, choose it in ``expected_transport`` or ``_between_cpus``
   (the plan chooses by them as well), and open it in ``open_transport``. There all ranks must agree: exchange whether
   each rank can use it (``Group.all_gather_object``) before any rank does.
5. If users can ask for it by name, add the name to ``Comm.transport`` in ``config/model.py``.
6. Nothing else knows transports by name. If the engine or the plan must treat the new one in another way, add a trait.
7. Add it to the list of transports in tests/comm/transports/test_transports.py, whose tests compare bits, and the
   behavior of ranks that diverge, stall or end. tests/comm/transports/toy.py is the smallest example.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from zeroengine.comm.packing import Packing
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.utils.formats import round_up
from zeroengine.utils.host_memory import map_in_huge_pages, private_mapping
from zeroengine.utils.work import Work, current_stream, order_behind_current

# The ranks of an operation; None: all ranks, in order.
Ranks = tuple[int, ...] | None
# What numbers the slices of an operation, see ``partition.degrees.shard_index``; None: a slice for each rank, in order.
Levels = tuple[int, ...] | None


class Slices(NamedTuple):
    """The slices of an all-to-all.

    Attributes:
        ranks: The ranks that exchange, ascending, this one among them, as for ``all_gather``. None: all ranks.
        levels: What numbers the slices, see ``partition.degrees.shard_index``, where several ranks have the same one.
            None: ``ranks[i]`` has slice i. A transport that ``reduces_by_levels`` takes None alone.
        sizes: Where slices are of unequal size, ``sizes[i][j]`` elements go from the i-th rank to the j-th one, and
            slices lie one after another in both tensors; then ``levels`` is None. None: equally many.
    """

    ranks: Ranks = None
    levels: Levels = None
    sizes: tuple[tuple[int, ...], ...] | None = None


class Buffer(Protocol):
    """A full buffer: memory that comes and goes at one address range, so that views of it stay valid.

    Attributes:
        tensor: The whole buffer, 1-D.
    """

    tensor: torch.Tensor

    def allocate(self) -> None:
        """Allocate the memory before a gather into ``tensor``."""

    def free(self) -> None:
        """Free the memory. ``tensor`` and its views must not be read until the next gather."""

    def detach(self) -> None:
        """Stop showing memory of other ranks, before this buffer is dropped while others share its memory."""

    def nbytes(self) -> int:
        """Return the bytes of memory that it holds now."""


class ResizableBuffer:
    """A ``Buffer`` that empties its storage. Holds memory at first. See "Memory and streams" above.

    Args:
        tensor: The buffer, 1-D, with memory.
        allocating: Makes the context that memory is allocated in, if it is a special one.
    """

    def __init__(
        self, tensor: torch.Tensor, allocating: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self.tensor, self._allocating = tensor, allocating
        # The stream that the memory was allocated on.
        self._stream = current_stream()

    def allocate(self) -> None:
        """Allocate memory on the current stream, if there is none."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() == 0:
            if self._allocating is None:
                storage.resize_(self.tensor.nbytes)
            else:
                with self._allocating():
                    storage.resize_(self.tensor.nbytes)
            self._stream = current_stream()

    def free(self) -> None:
        """Free the memory, behind the current stream."""
        # The allocator reuses freed memory at once on the stream that it was allocated on. That stream must therefore
        # wait for kernels of this stream, which may still read the memory.
        order_behind_current(self._stream)
        self.tensor.untyped_storage().resize_(0)

    def detach(self) -> None:
        """Return at once: the memory is this rank's own."""

    def nbytes(self) -> int:
        """Return the bytes of the storage."""
        return self.tensor.untyped_storage().nbytes()


class PagedBuffer:
    """A ``Buffer`` of CPU pages of its own, into which a disk can read directly. Holds memory at first.

    A large one lies in huge pages where the system has them: all memory comes anew with each gather, and 512 times as
    many pages would take longer than the copy into them.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        # The size is whole pages, because ``free`` frees pages and a disk reads whole blocks.
        size = round_up(max(numel, 1) * dtype.itemsize, mmap.PAGESIZE)
        self._memory, start = map_in_huge_pages(size, private_mapping)
        # A slice would keep the tensor that it is a slice of, a second owner of the storage, which
        # ``FullBuffer.is_aliased`` would take for a tensor of the user.
        pages = torch.frombuffer(self._memory, dtype=dtype, count=size // dtype.itemsize, offset=start)
        self.tensor = torch.empty(0, dtype=dtype, device="cpu").set_(pages.untyped_storage(), 0, (numel,), (1,))
        self._holds_memory = True

    def allocate(self) -> None:
        """Count the pages that the next write takes."""
        self._holds_memory = True

    def free(self) -> None:
        """Give the pages back to the system. The addresses stay reserved, and read as zeros."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._holds_memory = False

    def detach(self) -> None:
        """Return at once: the pages are this rank's own."""

    def nbytes(self) -> int:
        """Return the bytes that it holds now."""
        return self.tensor.nbytes if self._holds_memory else 0


class Channel(Protocol):
    """Operations in one order. See "What a transport promises" above.

    ``label`` names the operation's unit for people, and is compared between the ranks.
    """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        """Gather the shards of some ranks: ``full[i * n:(i + 1) * n]`` becomes the ``shard`` of ``ranks[i]``.

        Args:
            full: 1-D, of ``len(ranks) * n`` elements.
            shard: 1-D, of n elements, from ``Transport.empty``. It may be this rank's slice of
                ``full``, and must not change until ``Transport.all_reduce_scalars`` has next returned.
            label: The unit's name.
            ranks: The ranks that exchange their shards, this one among them. Each of them passes the same, and all
                other ranks gather as well, among themselves. None: all ranks, in order.
        """

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, label: str, accumulate: bool = False, levels: Levels = None
    ) -> Work:
        """Sum this rank's slice of every rank's ``full`` into ``shard``.

        Args:
            shard: 1-D, of n elements. It may be this rank's slice of ``full``.
            full: 1-D, ``world_size * n`` elements, or less if several ranks have the same slice. From
                ``Transport.empty``. It may be written again once it is ``reusable``.
            label: The unit's name.
            accumulate: Whether the sum is added to ``shard``, rather than written over it.
            levels: What numbers the slices, see ``partition.degrees.shard_index``. None: rank r has slice r.
        """

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        """Give each rank its slice of ``sent``: ``received[i * n:(i + 1) * n]`` becomes what ``ranks[i]`` sends here.

        Args:
            received: 1-D, of ``len(ranks) * n`` elements.
            sent: 1-D, of slices of n elements, from ``Transport.empty``. It may be written again once
                it is ``reusable``.
            label: The unit's name.
            slices: The ranks that exchange, and which slice each has.
        """

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        """Sum every rank's ``full``, in place. 1-D, divisible by ``world_size``, from ``Transport.empty``."""

    def reusable(self, work: Work, timeout_s: float) -> bool:
        """Return whether all ranks have read what ``work`` sent, so that this memory may be written again.

        Args:
            work: The result of an operation of this channel.
            timeout_s: Seconds to wait for it at most. On CUDA a positive number orders the current stream behind
                ``work`` instead, and the host goes on.
        """


class PackedSums(Protocol):
    """Sums over several hosts, of which only what goes to other hosts is packed."""

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        label: str,
        accumulate: bool = False,
        levels: Levels = None,
        packing: Packing | None = None,
    ) -> Work:
        """Sum this rank's slice of every rank's ``full`` into ``shard``, as ``Channel.reduce_scatter``.

        Args:
            shard: As for the channel; or ``full``, with ``levels`` of ``()``, for the whole sum.
            full, label, accumulate, levels: As for the channel.
            packing: Packs the sums of a host, and keeps their errors: then the sum is inexact, and ``shard`` and
                ``full`` are float32, bfloat16 or float16. None: sums travel exactly.
        """


class Transport(TransportTraits, Protocol):
    """One process group's way of moving bytes.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        packed_sums: The packed sums of the reduce channel. None: it has none, and whoever packs exchanges the packets
            with all ranks.
    """

    rank: int
    world_size: int

    @property
    def packed_sums(self) -> PackedSums | None:
        """See above."""

    @property
    def gather(self) -> Channel:
        """The channel that parameters are gathered on."""

    @property
    def reduce(self) -> Channel:
        """The channel that gradients are summed on."""

    @property
    def exchange(self) -> Channel:
        """The channel that the ranks which share a sample exchange activations on. See ``open_groups``."""

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return uninitialized memory, 1-D, that operations may send from.

        Args:
            numel: Elements.
            dtype: Their dtype.
            sent: Whether operations send from it. Otherwise they only receive into it.
        """

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a full buffer of ``numel`` elements that the gather channel gathers into.

        Args:
            numel: Elements.
            dtype: Their dtype.
            copied: Whether gathered values must survive overwriting the shards that they came from.
        """

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Return the sum over ranks of a small float64 vector. Issue it with no other operation under way."""

    def close(self) -> None:
        """Free the transport's resources. No operation may be issued afterwards."""
