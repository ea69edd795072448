"""Memory for the gradients of units on their way to a reduce, and the copies that fill it.

Each unit has its own reduce, and a ``GradientBuffer`` holds the gradients of one unit. A bucket, in contrast, is a
queue of units whose reduces are launched together (see ``reducer.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.buffer_pool import ENOUGH_BUFFERS, BufferPool
from zeroengine.comm.interfaces import Transport
from zeroengine.runtime.full_buffer import param_views
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Work, order_behind_current

# The most gradients in one launch of ``ops.cast_copy``.
MAX_TENSORS_PER_LAUNCH = 64
# Bytes of gradients that may wait for a launch. Until then they occupy memory in addition to the buffer.
MAX_PENDING_BYTES = 1 << 26


class PaddingLayout(NamedTuple):
    """The places of the padding in a unit's buffer. Two units with equal layouts may use one buffer in turn.

    ``numel`` follows from the parameters and the dtype. It is compared because a unit of another dtype pads its shards
    to another length (``Transport.shard_align_bytes``), so equal parameters may have different padding at the end.
    """

    dtype: torch.dtype  # that gradients are reduced in
    numel: int  # of the flat buffer, padding included
    params: tuple[tuple[int, tuple[int, ...]], ...]  # offset (in elements) and shape of each parameter


@dataclass(eq=False)
class GradientBuffer:
    """The flat buffer that one unit's gradients are copied into and reduced from.

    Its padding is zero for units of ``layout``: the buffer is zeroed when it takes on that layout, gradients are
    written into ``param_views`` alone, and the sum of the ranks' paddings is zero. The norm relies on this, because it
    also reads the padding.
    """

    memory: torch.Tensor  # 1-D, at least as long as the unit's flat buffer
    flat: torch.Tensor  # of ``memory``: as long as the unit's flat buffer
    layout: PaddingLayout
    param_views: list[torch.Tensor]  # of ``memory``, one for each parameter, in its shape
    collective: Work | None = None  # the last collective that reads the memory
    work: Work | None = None  # done when this rank no longer needs the memory: ``collective``, or what follows it


class GradientBufferPool:
    """All gradient buffers of one rank. Buffers are reused, and freed by ``free_unused`` alone.

    Args:
        gradients: The units that the buffers are for.
    """

    def __init__(self, transport: Transport, gradients: Sequence[UnitGradients]) -> None:
        self._transport = transport
        self._layouts: dict[UnitGradients, PaddingLayout] = {}
        for unit_grads in gradients:
            slots = tuple((slot.offset, slot.shape) for slot in unit_grads.unit.layout.slots)
            self._layouts[unit_grads] = PaddingLayout(unit_grads.format.reduce_dtype, unit_grads.unit.numel, slots)
        numels: dict[torch.dtype, list[int]] = {}
        for unit_grads in gradients:
            numels.setdefault(unit_grads.format.reduce_dtype, []).append(unit_grads.numel)
        self._sizes = {grads: buffer_size(grads.numel, numels[grads.format.reduce_dtype]) for grads in gradients}
        allocate = partial(transport.empty, dtype=torch.uint8)
        # By the dtype that gradients are reduced in.
        self._pools: dict[torch.dtype, BufferPool[GradientBuffer]] = {
            dtype: BufferPool(allocate, self._is_reduced) for dtype in numels
        }
        # By the address of the memory: what is in use, or was put back last.
        self._buffers: dict[int, GradientBuffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(pool.nbytes for pool in self._pools.values())

    def acquire(self, unit_grads: UnitGradients) -> GradientBuffer:
        """Return a buffer to fill with one unit's gradients, whose padding is zero."""
        unit, layout = unit_grads.unit, self._layouts[unit_grads]
        size = self._sizes[unit_grads]
        pool = self._pools[layout.dtype]
        memory = pool.take(size.numel, layout.dtype, largest=size.largest, enough=size.enough)
        buffer = self._buffers.get(memory.data_ptr())
        if buffer is None or buffer.layout != layout:
            # Another unit may have left gradients where this unit has its padding.
            flat = memory[: unit.numel].zero_()
            buffer = GradientBuffer(memory, flat, layout, param_views(unit.layout, memory))
            self._buffers[memory.data_ptr()] = buffer
        return buffer

    def put_back(self, buffer: GradientBuffer) -> None:
        """Take back a buffer whose reduce was launched, or that is not needed. It is free when the reduce is done."""
        self._pools[buffer.layout.dtype].put_back(buffer.memory, buffer)

    def free_unused(self) -> None:
        """Free the buffers that hold no gradients, if their memory can be given back. All reduces have been awaited."""
        if not self._transport.keeps_memory:
            for memory in chain.from_iterable(pool.clear() for pool in self._pools.values()):
                # The system may give new memory the same address.
                del self._buffers[memory.data_ptr()]
                # A transport may refer to the tensors of its last reduces.
                memory.untyped_storage().resize_(0)

    def _is_reduced(self, buffer: GradientBuffer, timeout_s: float) -> bool:
        """Return whether ``buffer`` may be written, after waiting for its peers for at most ``timeout_s`` seconds."""
        if buffer.work is None or buffer.collective is None:
            return True
        if buffer.work is not buffer.collective:
            if not timeout_s and not buffer.work.done():
                return False
            # What follows is a copy at optimizer degree 1, where nothing is gathered and so no peer waits for this rank
            # meanwhile, or an event of the offload's stream, for which the host does not wait.
            buffer.work.wait_stream()
        return self._transport.reduce.reusable(buffer.collective, timeout_s)


class BufferSize(NamedTuple):
    """Which gradient buffers fit a unit.

    Attributes:
        numel: The fewest elements.
        largest: The most elements. The first buffer that is made has so many.
        enough: The number of them, not being filled, from which on the oldest is awaited before there is another one.
    """

    numel: int
    largest: int
    enough: int


def buffer_size(numel: int, numels: Sequence[int]) -> BufferSize:
    """Return which gradient buffers fit a unit of ``numel`` elements, where those of one dtype have ``numels``.

    Large units share their buffers. One of these fits the largest unit, and the others may be smaller if it is the only
    one of its size, such as an embedding. A unit of at most a quarter of that size has buffers of its own size.
    """
    largest, *others = sorted(numels, reverse=True)
    if 4 * numel <= largest:
        return BufferSize(numel, numel, ENOUGH_BUFFERS)
    second = others[0] if others else 0
    if numel > second:
        return BufferSize(numel, numel, 1)
    return BufferSize(second, largest, ENOUGH_BUFFERS)


class CastCopies:
    """Copies and additions of gradients into buffers, collected so that one launch on a GPU performs many.

    The results have the same bits as separate copies.

    Attributes:
        collects: Whether copies are collected, if the kernel supports both dtypes.
    """

    def __init__(self, collects: bool = True) -> None:
        self.collects = collects
        # Pairs of source and target, by whether the source is added to the target or overwrites it.
        self._pairs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
        self._target_addresses: set[int] = set()
        self._nbytes = 0
        # The stream of the copies so far, in whose order all users of the buffers are.
        self._stream: torch.cuda.Stream | None = None

    def follow_stream(self) -> None:
        """Order the current stream behind the copies so far: a model may compute on several.

        Autograd runs a gradient's hooks on the stream of its forward. What waits for a launch is launched on the stream
        that it came on, whose memory the gradients have.
        """
        if not torch.cuda.is_initialized():
            return
        before, self._stream = self._stream, torch.cuda.current_stream()
        # A stream that is being captured has no order to what ran before the capture.
        if before is not None and before != self._stream and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(before):
                self._launch()
                order_behind_current(self._stream)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> None:
        """Copy ``source`` into ``target``, or add it, at the next flush. ``source`` must not change until then."""
        if not self.collects or source.dtype not in ops.DTYPE_CODES or target.dtype not in ops.DTYPE_CODES:
            (target.add_ if accumulate else target.copy_)(source)
            return
        # The copies of one launch have no order, so two copies to one target need two launches.
        if target.data_ptr() in self._target_addresses:
            self._launch()
        self._pairs[accumulate].append((source, target))
        self._target_addresses.add(target.data_ptr())
        self._nbytes += source.nbytes
        if len(self._target_addresses) >= MAX_TENSORS_PER_LAUNCH or self._nbytes >= MAX_PENDING_BYTES:
            self._launch()

    def flush(self) -> None:
        """Launch all pending copies, and order the current stream behind all copies so far."""
        self.follow_stream()
        self._launch()

    def _launch(self) -> None:
        for accumulate, pairs in self._pairs.items():
            # All targets of one launch have one dtype, but the dtypes of its sources may differ.
            for dtype in {target.dtype for _, target in pairs}:
                sources, targets = zip(*(pair for pair in pairs if pair[1].dtype is dtype), strict=True)
                ops.cast_copy(sources, targets, accumulate=accumulate)
        self.discard()

    def discard(self) -> None:
        """Drop all pending copies."""
        for pairs in self._pairs.values():
            pairs.clear()
        self._target_addresses.clear()
        self._nbytes = 0
