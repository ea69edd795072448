"""The most bytes of gradient buffers at any time, by playing one backward through the rules of the reducer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.offload.interfaces import padded_nbytes
from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.gradient_buffers import buffer_numel
from zeroengine.runtime.offloaded_gradients import MAX_IDLE_STAGING_BUFFERS
from zeroengine.runtime.unit_gradients import GradientFormat

# A pool that waits for the oldest of two reduces has two buffers besides those that are being filled.
MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class GradientFlow:
    """The gradients of one trainable unit in a backward.

    Attributes:
        numel: The elements of the unit's flat buffer.
        shard_numel: The elements of the sum that this rank keeps.
        format: How the gradients are kept and sent.
        first: The position of the module whose backward gives the unit its first gradient.
        last: The position of the module whose backward gives it the last one. A backward runs from high to low.
        slice_numel: The elements of each slice that the reduce cuts the buffer into.
    """

    numel: int
    shard_numel: int
    format: GradientFormat
    first: int
    last: int
    slice_numel: int = 0


def gradient_positions(plan: UnitPlan) -> tuple[int, int]:
    """Return the positions of the modules whose backwards give a unit its first and its last gradient.

    Autograd adds up the gradients of a tied parameter, so it has its gradient after the first of its uses in forward.
    """
    first_use: dict[torch.Tensor, int] = {}
    for module, start in zip(plan.modules, plan.positions, strict=True):
        for position, inner in enumerate(module.modules(), start):
            for param in inner.parameters(recurse=False):
                first_use[param] = min(first_use.get(param, position), position)
    positions = [first_use[param] for _, param in plan.params if param in first_use]
    return max(positions, default=0), min(positions, default=0)


# A size of gradient buffers: their elements, and their dtype.
BufferKey = tuple[int, torch.dtype]


def count_gradient_buffers(flows: Sequence[GradientFlow], bucket_numel: int, *, at_once: bool) -> Counter[BufferKey]:
    """Return the number of gradient buffers of each size. They are never freed.

    Args:
        flows: The trainable units, in the order of registration.
        bucket_numel: Elements of the units that are reduced together.
        at_once: Whether a reduce is done when it was launched, as without peers. Otherwise as many buffers are counted
            as the slowest peer causes.
    """
    pool = _Pool(max((flow.numel for flow in flows), default=0), at_once)
    order = flows[::-1]
    # A unit begins before it completes, also where both happen in one module.
    events = sorted(
        [(-flow.first, 0, index) for index, flow in enumerate(order)]
        + [(-flow.last, 1, index) for index, flow in enumerate(order)]
    )
    # The second step finds the buffers of the first.
    for _ in range(2):
        in_use: dict[int, BufferKey] = {}
        complete: set[int] = set()
        bucket: list[int] = []
        num_queued = 0

        def launch(bucket: list[int], in_use: dict[int, BufferKey]) -> None:
            for index in bucket:
                if not order[index].format.reduced_in_place:
                    pool.release(in_use.pop(index) if index in in_use else pool.acquire(order[index]))
            bucket.clear()

        for _, ends, index in events:
            if not ends:
                # Gradients that are not sharded go to where they are kept, and reach a buffer only at the launch.
                if order[index].format.is_sharded:
                    in_use[index] = pool.acquire(order[index])
                continue
            complete.add(index)
            while num_queued < len(order) and num_queued in complete:
                if bucket and sum(order[i].numel for i in (*bucket, num_queued)) > bucket_numel:
                    launch(bucket, in_use)
                bucket.append(num_queued)
                num_queued += 1
            if bucket and sum(order[i].numel for i in bucket) >= bucket_numel:
                launch(bucket, in_use)
        launch(bucket, in_use)
    return pool.counts


def received_bytes(
    flows: Sequence[GradientFlow], world_size: int, buffers: Mapping[BufferKey, int], transport: type[TransportTraits]
) -> int:
    """Return the most bytes of the memory that a transport receives slices into directly, which is never freed.

    Args:
        flows: The trainable units.
        world_size: The number of ranks.
        buffers: The number of gradient buffers of each size. A reduce that is not in place has one until it is done.
        transport: The class of the transport.
    """
    largest = max((flow.numel for flow in flows), default=0)
    alike: dict[BufferKey, list[GradientFlow]] = {}
    for flow in flows:
        alike.setdefault((flow.slice_numel, flow.format.reduce_dtype), []).append(flow)
    nbytes = 0
    for (slice_numel, dtype), group in alike.items():
        in_place = sum(flow.format.reduced_in_place for flow in group)
        sizes = {_buffer_key(flow, largest) for flow in group if not flow.format.reduced_in_place}
        count = in_place + min(len(group) - in_place, sum(buffers.get(size, 0) for size in sizes))
        nbytes += count * transport.staged_numel(world_size, slice_numel, by_host=False) * dtype.itemsize
    return nbytes


def _buffer_key(flow: GradientFlow, largest: int) -> BufferKey:
    """Return the size of the gradient buffer of a unit, where the largest unit has so many elements."""
    return buffer_numel(flow.numel, largest), flow.format.reduce_dtype


class _Pool:
    """The rules of ``GradientBufferPool`` without memory."""

    def __init__(self, largest: int, at_once: bool) -> None:
        self._largest, self._num_in_flight = largest, 1 if at_once else MAX_IN_FLIGHT
        self._num_idle: Counter[BufferKey] = Counter()
        self.counts: Counter[BufferKey] = Counter()

    def acquire(self, flow: GradientFlow) -> BufferKey:
        key = _buffer_key(flow, self._largest)
        if self._num_idle[key] >= self._num_in_flight:
            self._num_idle[key] -= 1
        else:
            self.counts[key] += 1
        return key

    def release(self, key: BufferKey) -> None:
        self._num_idle[key] += 1


def staging_buffer_bytes(
    flows: Sequence[GradientFlow], *, accumulates: bool, num_reducing: int, on_stream: bool
) -> int:
    """Return the most bytes of the buffers between the reduces of offloaded gradients and their store.

    Args:
        flows: The trainable units, in the order of registration.
        accumulates: Whether a sum is added to that of earlier micro-steps.
        num_reducing: The most reduces that are not done when the next one begins.
        on_stream: Whether a stream orders the copies, as on a GPU.
    """
    needs = []
    for flow in reversed(flows):
        if flow.format.is_offloaded:
            sum_dtype = torch.promote_types(flow.format.reduce_dtype, flow.format.dtype)
            has_total = accumulates or sum_dtype is not flow.format.dtype
            total_dtype = flow.format.dtype if on_stream else sum_dtype
            needs.append(
                (
                    padded_nbytes(flow.shard_numel * sum_dtype.itemsize),
                    padded_nbytes(flow.shard_numel * total_dtype.itemsize) if has_total else 0,
                )
            )
    if on_stream:
        return sum(max((need[index] for need in needs), default=0) for index in (0, 1))
    # Buffers whose reduce is not done, by launch, and buffers whose write is not done.
    reducing: list[list[int]] = []
    writing: list[int] = []
    nbytes = 0
    for launch in needs * 2:
        while len(reducing) > num_reducing:
            writing += reducing.pop(0)
        held: list[int] = []
        for need in (need for need in launch if need):
            idle = [size for size in writing if need <= size <= 4 * need]
            busy = [size for sizes in (*reducing, held) for size in sizes if need <= size <= 4 * need]
            if not idle or len(idle) + len(busy) < MAX_IDLE_STAGING_BUFFERS:
                nbytes += need
                held.append(need)
            else:
                writing.remove(idle[0])
                held.append(idle[0])
        reducing.append(held)
    return nbytes
