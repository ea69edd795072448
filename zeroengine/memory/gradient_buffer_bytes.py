"""The most bytes of gradient buffers at any time, by playing one backward through the rules of the reducer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroengine.comm.buffer_pool import ENOUGH_BUFFERS
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.gradient_buffers import BufferSize, buffer_size
from zeroengine.runtime.offloaded_gradients import StagingBuffer, staging_buffer_to_reuse
from zeroengine.runtime.unit_gradients import GradientFormat
from zeroengine.schedule.bucket_queue import BucketQueue
from zeroengine.utils.work import Completed

# A pool that waits for the oldest of its buffers has so many besides those that are being filled.
MAX_IN_FLIGHT = ENOUGH_BUFFERS


@dataclass(eq=False)
class GradientFlow:
    """The gradients of one trainable unit in a backward.

    Attributes:
        numel: The elements of the unit's flat buffer.
        shard_numel: The elements of the sum that this rank keeps.
        format: How the gradients are kept and sent.
        first: The position of the module whose backward gives the unit its first gradient.
        last: The position of the module whose backward gives it the last one. A backward runs from high to low.
        slice_numel: The elements of each slice that the reduce cuts the buffer into.
        is_ready: Whether the unit has all of its gradients, at the moment of the backward that is played.
    """

    numel: int
    shard_numel: int
    format: GradientFormat
    first: int
    last: int
    slice_numel: int = 0
    is_ready: bool = field(default=False, init=False)


def gradient_positions(plan: UnitPlan) -> tuple[int, int]:
    """Return the positions of the modules whose backwards may give a unit its first and its last gradient.

    Autograd adds up the gradients of a tied parameter, so it has its gradient after the first of its uses in forward.
    Where several units share a module, its parts may run in another order than they are registered in, so each unit
    gets its gradients anywhere between those of all.
    """
    first_use: dict[torch.Tensor, int] = {}
    for module, start in zip(plan.modules, plan.positions, strict=True):
        for position, inner in enumerate(module.modules(), start):
            for param in inner.parameters(recurse=False):
                first_use[param] = min(first_use.get(param, position), position)
    return max(first_use.values(), default=0), min(first_use.values(), default=0)


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
    sizes = _buffer_sizes(flows)
    order = flows[::-1]
    queue = BucketQueue(range(len(order)), [flow.numel for flow in order], bucket_numel)
    # A unit begins before it completes, also where both happen in one module.
    events = sorted(
        [(-flow.first, 0, index) for index, flow in enumerate(order)]
        + [(-flow.last, 1, index) for index, flow in enumerate(order)]
    )
    counts: Counter[BufferKey] = Counter()
    # In the order in which they were put back.
    idle: list[BufferKey] = []
    in_use: dict[GradientFlow, BufferKey] = {}

    def acquire(flow: GradientFlow) -> BufferKey:
        size, dtype = sizes[flow], flow.format.reduce_dtype
        fitting = [key for key in idle if _fits(key, size, dtype)]
        # A slow peer, or a slow disk, frees a buffer only for those who wait.
        if len(fitting) >= (1 if at_once and not flow.format.is_offloaded else size.enough):
            idle.remove(fitting[0])
            return fitting[0]
        key = (size.numel if counts[size.largest, dtype] else size.largest), dtype
        counts[key] += 1
        return key

    def launch(bucket: Sequence[int]) -> None:
        for flow in map(order.__getitem__, bucket):
            if not flow.format.reduced_in_place:
                # Gradients that are not sharded go to where they are kept, and reach a buffer only at the launch.
                idle.append(in_use.pop(flow) if flow in in_use else acquire(flow))

    # The second step finds the buffers of the first.
    for _ in range(2):
        queue.restart()
        for flow in flows:
            flow.is_ready = False
        for _, ends, index in events:
            flow = order[index]
            if ends:
                flow.is_ready = True
                launch(queue.queue_in_order(lambda index: order[index].is_ready, lambda _: True))
            elif flow.format.is_sharded:
                in_use[flow] = acquire(flow)
        launch(queue.take_bucket())
    return counts


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
    sizes = _buffer_sizes(flows)
    alike: dict[BufferKey, list[GradientFlow]] = {}
    for flow in flows:
        alike.setdefault((flow.slice_numel, flow.format.reduce_dtype), []).append(flow)
    nbytes = 0
    for (slice_numel, dtype), group in alike.items():
        in_place = sum(flow.format.reduced_in_place for flow in group)
        wanted = [sizes[flow] for flow in group if not flow.format.reduced_in_place]
        num_fitting = sum(num for key, num in buffers.items() if any(_fits(key, size, dtype) for size in wanted))
        count = in_place + min(len(group) - in_place, num_fitting)
        nbytes += count * transport.staged_numel(world_size, slice_numel, by_host=False) * dtype.itemsize
    return nbytes


def _buffer_sizes(flows: Sequence[GradientFlow]) -> dict[GradientFlow, BufferSize]:
    numels: dict[torch.dtype, list[int]] = {}
    for flow in flows:
        numels.setdefault(flow.format.reduce_dtype, []).append(flow.numel)
    return {flow: buffer_size(flow.numel, numels[flow.format.reduce_dtype]) for flow in flows}


def _fits(key: BufferKey, size: BufferSize, dtype: torch.dtype) -> bool:
    return key[1] is dtype and size.numel <= key[0] <= size.largest


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
    needs = [
        flow.format.staging_bytes(flow.shard_numel, accumulates=accumulates, on_stream=on_stream)
        for flow in reversed(flows)
        if flow.format.is_offloaded
    ]
    if on_stream:
        return sum(max((need[index] for need in needs), default=0) for index in (0, 1))
    buffers: list[StagingBuffer] = []
    # Buffers whose reduce is not done, by launch.
    reducing: list[list[StagingBuffer]] = []
    for launch in needs * 2:
        while len(reducing) > num_reducing:
            for buffer in reducing.pop(0):
                # That this write is done shows only when somebody waits for it.
                buffer.holds_sum, buffer.write = False, Completed()
        reducing.append([])
        for need in (need for need in launch if need):
            reused = staging_buffer_to_reuse(buffers, need)
            if reused is None:
                reused = StagingBuffer(torch.empty(need, dtype=torch.uint8, device="meta"))
                buffers.append(reused)
            reused.holds_sum = True
            reducing[-1].append(reused)
    return sum(buffer.memory.nbytes for buffer in buffers)
