"""Place a model's states on the device or in stores, and open the stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.config import FLOATS, Config
from zeroengine.config.offload import OffloadOptimizer, OffloadParam
from zeroengine.disk.aligned_memory import ALIGNMENT, round_up_to_block
from zeroengine.disk.probe import DiskSettings, tune
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.monitor.timer import Timer
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.host_memory import check_host_memory
from zeroengine.offload.host_store import DeviceStates, HostStore, StagedDiskStore
from zeroengine.offload.interfaces import Copies, OffloadStore, StateStore, padded_nbytes
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.pipeline import Pipeline
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout

# A disk is measured only if it holds more bytes of states than this.
MIN_TUNED_BYTES = 1 << 28
# The location of states in CPU memory. The location of states on a disk is the path of a folder.
CPU_MEMORY = ""


@dataclass(frozen=True)
class Placement:
    """Where each unit's states live. None stands for the device.

    Attributes:
        disks: The stores on disks.
        stores: The stores that the device reads and writes: CPU memory, and disks, directly or through host buffers.
        parameter_shards: For each unit, where its shard lives.
        optimizer_stores: For each trainable unit, where master weights, moments and summed gradients live.
        pipeline: Brings offloaded states to the update. None: the update is on the device.
        copies: Copies between the device and the host. None: the device is the CPU.
    """

    disks: tuple[DiskStore, ...]
    stores: tuple[OffloadStore, ...]
    parameter_shards: Sequence[OffloadedShards | None]
    optimizer_stores: Sequence[OffloadStore | None]
    pipeline: Pipeline | None
    copies: Copies | None = None

    @property
    def send_buffer_bytes(self) -> int:
        """Bytes of the memory that offloaded shards are sent from."""
        # Units share one object, so the set avoids counting its buffers once per unit.
        return sum(shards.nbytes for shards in set(self.parameter_shards) if shards is not None)

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of the CPU memory between stores and computation."""
        bounce_buffers = sum(store.nbytes for store in self.stores if isinstance(store, StagedDiskStore))
        return bounce_buffers + (self.pipeline.nbytes if self.pipeline is not None else 0)

    @property
    def disk_traffic(self) -> tuple[int, int]:
        """Bytes that were read from disks and written to them since the start."""
        traffic = [disk.traffic for disk in self.disks]
        return sum(read for read, _ in traffic), sum(written for _, written in traffic)

    def evict(self, *states: torch.Tensor) -> None:
        """Free the memory that using states in place took. See ``DiskStore.evict``."""
        for disk in self.disks:
            disk.evict(*states)

    def check_intact(self) -> None:
        """Check that no update ended half way.

        Raises:
            ZeroEngineError: States are half updated.
        """
        for disk in self.disks:
            disk.check_intact()

    def finish_copies(self) -> None:
        """Wait for all copies between a GPU and the host, so that states may be used in place."""
        if self.copies is not None:
            self.copies.synchronize()

    def close(self) -> None:
        """Wait for copies under way, and close all stores."""
        self.finish_copies()
        for store in self.stores:
            store.close()


def place_states(
    plans: Sequence[UnitPlan],
    degrees: Degrees,
    config: Config,
    transport: Transport,
    device: torch.device,
    timer: Timer,
    copies: Copies | None = None,
) -> Placement:
    """Open the stores that ``config`` asks for, and assign the units' states to them.

    Args:
        plans: The units.
        degrees: The number of ranks that each state is partitioned over.
        config: The configuration, with the place of each state.
        transport: Gathers the parameters, and determines the alignment of shards.
        device: The device that the model computes on.
        timer: Times the waits for the stores.
        copies: Copies between ``device`` and the host. None: ``GPUCopies`` on a GPU, and no copies on the CPU.

    Raises:
        ZeroEngineError: A path cannot be used, or there is too little room.
    """
    zero = config.zero_optimization
    # One pair of streams serves both sections, so memory is page-locked only if neither section forbids it.
    if copies is None and device.type == "cuda":
        sections = [section for section in (zero.offload_optimizer, zero.offload_param) if section.device != "none"]
        copies = GPUCopies(device, pin=all(section.pin_memory for section in sections))
    param_location = _location_of(zero.offload_param, copies)
    optimizer_location = _location_of(zero.offload_optimizer, copies)
    trainable = [plan for plan in plans if plan.trainable]
    if param_location is None and optimizer_location is None:
        return Placement((), (), [None] * len(plans), [None] * len(trainable), None)

    # Offloading the shard of a unit that stays gathered would free no memory.
    params_offloaded = [param_location is not None and plan.numel > zero.param_persistence_threshold for plan in plans]
    ratio = zero.offload_optimizer.ratio if optimizer_location is not None else 0.0
    optimizer_offloaded = _within_ratio([plan.numel for plan in trainable], ratio)
    # The size of each store is computed before it is opened, so that a full disk is an error at the start.
    shard_bytes = [
        padded_nbytes(_shard_numel(plan, degrees, degrees.parameters, transport) * plan.dtype.itemsize) * offloaded
        for plan, offloaded in zip(plans, params_offloaded, strict=True)
    ]
    state_bytes = [
        _optimizer_state_bytes(plan, degrees, config, transport) * offloaded
        for plan, offloaded in zip(trainable, optimizer_offloaded, strict=True)
    ]
    # Both sections may name one folder, which then has one store with room for both.
    bytes_by_location = Counter({param_location: sum(shard_bytes)})
    bytes_by_location[optimizer_location] += sum(state_bytes)

    disks = {
        path: open_disk(path, nbytes, config, transport.rank)
        for path, nbytes in bytes_by_location.items()
        if path not in (None, CPU_MEMORY)
    }
    # None, which stands for the device, has no store.
    stores: dict[str | None, OffloadStore] = {
        # A disk cannot read from a GPU's memory, so every transfer passes through the host.
        path: disk if copies is None else StagedDiskStore(disk, copies, zero.offload_param.buffer_count)
        for path, disk in disks.items()
    }
    if copies is not None and CPU_MEMORY in bytes_by_location:
        stores[CPU_MEMORY] = HostStore(copies)
    param_store, optimizer_store = stores.get(param_location), stores.get(optimizer_location)
    shards = None
    if param_store is not None:
        shards = OffloadedShards(param_store, transport, zero.offload_param.buffer_count, timer)

    # The pipeline serves updates on the CPU: it moves states from a disk and from a GPU. If only parameters are
    # offloaded from a GPU there is no pipeline, because the update runs on the GPU.
    moved_stores: list[StateStore] = list(disks.values())
    if copies is not None:
        # Gradients and parameters that stay on the GPU are moved to the CPU's update like states on a disk.
        moved_stores.append(DeviceStates(copies, tuple(stores.values())))
    element_bytes = max(
        (_moved_element_bytes(plan, config, param_location, optimizer_location, copies) for plan in trainable),
        default=1,
    )
    has_pipeline = copies is None or optimizer_location is not None
    largest_shard = max((_shard_numel(plan, degrees, degrees.optimizer, transport) for plan in trainable), default=1)
    # No chunk need be longer than a shard.
    chunk_numel = min(zero.offload_optimizer.buffer_size, round_up_to_block(largest_shard))
    chunk_numel = max(chunk_numel // ALIGNMENT, 1) * ALIGNMENT
    num_chunks = zero.offload_optimizer.buffer_count

    pipeline_bytes = has_pipeline * num_chunks * chunk_numel * element_bytes
    send_buffer_bytes = zero.offload_param.buffer_count * max(shard_bytes) if param_location in disks else 0
    # Masters and buffers are allocated later. Running out of memory then would kill processes without a message.
    check_host_memory(
        bytes_by_location[CPU_MEMORY] + pipeline_bytes + send_buffer_bytes, on_disk=CPU_MEMORY not in bytes_by_location
    )
    return Placement(
        tuple(disks.values()),
        tuple(stores.values()),
        [shards if offloaded else None for offloaded in params_offloaded],
        [optimizer_store if offloaded else None for offloaded in optimizer_offloaded],
        Pipeline(moved_stores, num_chunks, chunk_numel, element_bytes, timer, copies) if has_pipeline else None,
        copies,
    )


def can_offload_gradients(degrees: Degrees, transport: Transport) -> bool:
    """Return whether a rank keeps only its shard of the summed gradients, which nothing reads before the step."""
    return degrees.gradients > 1 or transport.world_size == 1


def open_disk(path: str, nbytes: int, config: Config, rank: int) -> DiskStore:
    """Open a store of ``nbytes`` bytes in the folder ``path``, with the settings of the configuration.

    Raises:
        OffloadError: ``path`` cannot be used, or has too little room.
    """
    folder = SwapFolder(path, label=f"rank{rank}", min_free_bytes=nbytes)
    auto = None in (config.aio.block_size, config.aio.queue_depth)
    tuned = tune(path) if auto and nbytes > MIN_TUNED_BYTES else DiskSettings()
    # DeepSpeed's configurations may name "libaio". It is accepted with a notice, and means "auto".
    backend = None if config.aio.backend == "libaio" else config.aio.backend
    queue = DiskQueue(
        config.aio.queue_depth or tuned.queue_depth, config.aio.block_size or tuned.block_size, backend or tuned.backend
    )
    return DiskStore(folder, queue, nbytes)


def _location_of(section: OffloadOptimizer | OffloadParam, copies: Copies | None) -> str | None:
    """Return the folder that states go to, or ``CPU_MEMORY``; None: they stay on the device."""
    return CPU_MEMORY if section.device == "cpu" and copies is not None else section.disk


def _within_ratio(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Return for each unit whether it is offloaded, so that at most ``ratio`` of all elements are."""
    # The choice depends only on sizes, so all ranks make the same choice.
    remaining, chosen = ratio * sum(sizes), []
    for size in sizes:
        chosen.append(size <= remaining)
        remaining -= size if chosen[-1] else 0
    return chosen


def _shard_numel(plan: UnitPlan, degrees: Degrees, degree: int, transport: Transport) -> int:
    """Return the elements, with padding, of a rank's shard of a state that is partitioned over ``degree`` ranks."""
    shapes = ((name, tuple(param.shape)) for name, param in plan.params)
    align = max(transport.shard_align_bytes // plan.dtype.itemsize, 1)
    return FlatLayout.build(plan.name, shapes, degrees, transport.world_size, align).shard_numel(degree)


def _optimizer_state_bytes(plan: UnitPlan, degrees: Degrees, config: Config, transport: Transport) -> int:
    """Return the bytes that a unit's master weights, moments and gradients take in a store."""
    numel = _shard_numel(plan, degrees, degrees.optimizer, transport)
    moment_bytes = padded_nbytes(numel * FLOATS[config.optimizer_state_dtype].itemsize)
    # Each state is padded separately, because each begins at a block of the file.
    nbytes = 2 * moment_bytes + plan.is_mixed_precision * padded_nbytes(numel * torch.float32.itemsize)
    if can_offload_gradients(degrees, transport):
        grad_numel = _shard_numel(plan, degrees, degrees.gradients, transport)
        nbytes += padded_nbytes(grad_numel * config.accumulation_dtype(plan.dtype).itemsize)
    return nbytes


def _moved_element_bytes(
    plan: UnitPlan, config: Config, param_location: str | None, optimizer_location: str | None, copies: Copies | None
) -> int:
    """Return the largest number of bytes per element that a pipeline moves: states on a disk or on a GPU."""
    optimizer_on_disk = optimizer_location not in (None, CPU_MEMORY)
    nbytes = (copies is not None or param_location is not None) * plan.dtype.itemsize
    nbytes += (copies is not None or optimizer_on_disk) * config.accumulation_dtype(plan.dtype).itemsize
    state_bytes = 2 * FLOATS[config.optimizer_state_dtype].itemsize + plan.is_mixed_precision * torch.float32.itemsize
    return max(nbytes + optimizer_on_disk * state_bytes, 1)
