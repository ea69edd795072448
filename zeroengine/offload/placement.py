"""Place a model's states on the device or in stores, and open the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.disk.aligned_memory import ALIGNMENT
from zeroengine.disk.probe import DiskSettings, tune
from zeroengine.disk.queue import DiskQueue, TransferTimes
from zeroengine.disk.read_only_file import ReadOnlyFile
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.host_memory import check_host_memory
from zeroengine.offload.host_store import DeviceStates, HostStore, StagedDiskStore
from zeroengine.offload.interfaces import OffloadStore, StateStore
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.pipeline import Pipeline
from zeroengine.offload.placement_plan import CPU_MEMORY, PlacementPlan, plan_placement
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.unit_layout import DegreeRules, layout_of_unit

# A disk is measured only if it holds more bytes of states than this.
MIN_TUNED_BYTES = 1 << 28


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
        in_place: Whether frozen parameters on a disk may be in files that others have written (``refer``).
    """

    disks: tuple[DiskStore, ...]
    stores: tuple[OffloadStore, ...]
    parameter_shards: Sequence[OffloadedShards | None]
    optimizer_stores: Sequence[OffloadStore | None]
    pipeline: Pipeline | None
    copies: GPUCopies | None = None
    in_place: bool = False

    @property
    def send_buffer_bytes(self) -> int:
        """Bytes of the memory that offloaded shards are sent from."""
        # Units share one object, so the set avoids counting its buffers once per unit.
        return sum(shards.nbytes for shards in set(self.parameter_shards) if shards is not None)

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of the CPU memory between stores and computation."""
        bounce_buffers = sum(store.nbytes for store in self.stores if isinstance(store, StagedDiskStore))
        bounce_buffers += sum(disk.unaligned_bytes for disk in self.disks)
        return bounce_buffers + (self.pipeline.nbytes if self.pipeline is not None else 0)

    def refer(self, states: Sequence[torch.Tensor], file: ReadOnlyFile, offsets: Sequence[int]) -> bool:
        """Let states that are only read have the values at ``offsets``, in bytes, of a file. Nothing is copied.

        Returns:
            Whether all of them are on the disk of the file, and so may. If not, none of them does.
        """
        disk = next((disk for disk in self.disks if all(disk.can_refer(state, file) for state in states)), None)
        if disk is not None:
            for state, offset in zip(states, offsets, strict=True):
                disk.refer(state, file, offset)
        return disk is not None

    @property
    def disk_traffic(self) -> tuple[int, int]:
        """Bytes that were read from disks and written to them since the start."""
        traffic = [disk.traffic for disk in self.disks]
        return sum(read for read, _ in traffic), sum(written for _, written in traffic)

    def trace(self, keeps: bool) -> list[TransferTimes]:
        """Return the traced transfers of all disks, and trace those from now on, or do not."""
        return [transfer for disk in self.disks for transfer in disk.trace(keeps)]

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


def _check_disk_blocks(
    plans: Sequence[UnitPlan], rules: DegreeRules, placed: PlacementPlan, transport: Transport
) -> None:
    """Check that what each rank updates of a parameter shard on a disk begins at one of the disk's blocks."""
    for plan, is_offloaded in zip(plans, placed.params_offloaded, strict=True):
        degrees = rules.of_unit(plan)
        if not is_offloaded or placed.param_location == CPU_MEMORY or degrees.optimizer == degrees.parameters:
            continue
        layout = layout_of_unit(plan, degrees, transport.world_size, transport.shard_align_bytes)
        if layout.shard_numel(degrees.optimizer) * plan.dtype.itemsize % ALIGNMENT:
            raise ZeroEngineError(
                f"parameters on a disk at degree {degrees.parameters}, and the optimizer at degree "
                f"{degrees.optimizer}: over {transport.name}, the part of unit {plan.name} that a rank updates begins "
                'inside a block of the disk. Write the same number for "parameters" and "optimizer" in "degrees", or '
                '"offload_param": {"device": "cpu"}.'
            )


def place_states(
    plans: Sequence[UnitPlan],
    rules: DegreeRules,
    config: Config,
    transport: Transport,
    device: torch.device,
    timer: Timer,
    copies: GPUCopies | None = None,
    lack_values: Sequence[bool] = (),
) -> Placement:
    """Open the stores that ``config`` asks for, and assign the units' states to them.

    Args:
        plans: The units.
        rules: The degrees of each unit.
        config: The configuration, with the place of each state.
        transport: Gathers the parameters, and determines the alignment of shards.
        device: The device that the model computes on.
        timer: Times the waits for the stores.
        copies: Copies between ``device`` and the host. None: ``GPUCopies`` on a GPU, and no copies on the CPU.
        lack_values: For each unit, whether it is frozen and has no values yet. With ``in_place`` it takes no room then.

    Raises:
        ZeroEngineError: A path cannot be used, there is too little room, or degrees do not go with a disk.
    """
    zero = config.zero_optimization
    # One pair of streams serves both sections, so memory is page-locked only if neither section forbids it.
    if copies is None and device.type == "cuda":
        sections = [section for section in (zero.offload_optimizer, zero.offload_param) if section.device != "none"]
        copies = GPUCopies(device, pin=all(section.pin_memory for section in sections))
    placed = plan_placement(
        plans,
        rules,
        config,
        transport.world_size,
        transport.shard_align_bytes,
        has_device_memory=copies is not None,
    )
    if placed.is_empty:
        return Placement((), (), [None] * len(plans), [None] * len(placed.optimizer_offloaded), None, copies)
    _check_disk_blocks(plans, rules, placed, transport)
    bytes_by_location = placed.bytes_by_location
    # The size of each store is known before it is opened, so that a full disk is an error at the start.
    unallocated = sum(compress(placed.shard_bytes, lack_values)) if zero.offload_param.in_place else 0
    disks = {
        path: open_disk(path, nbytes, config, transport.rank, unallocated if path == placed.param_location else 0)
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
    param_store, optimizer_store = stores.get(placed.param_location), stores.get(placed.optimizer_location)
    shards = None
    if param_store is not None:
        shards = OffloadedShards(param_store, transport, zero.offload_param.buffer_count, timer)

    # The pipeline serves updates on the CPU: it moves states from a disk and from a GPU.
    moved_stores: list[StateStore] = list(disks.values())
    if copies is not None:
        # Gradients and parameters that stay on the GPU are moved to the CPU's update like states on a disk.
        moved_stores.append(DeviceStates(copies, tuple(stores.values())))
    send_buffer_bytes = 0
    if placed.param_location in disks:
        send_buffer_bytes = zero.offload_param.buffer_count * placed.largest_shard_bytes
    # Masters and buffers are allocated later. Running out of memory then would kill processes without a message.
    in_memory = bytes_by_location.get(CPU_MEMORY)
    if config.memory_check == "error":
        check_host_memory((in_memory or 0) + placed.pipeline_bytes + send_buffer_bytes, on_disk=in_memory is None)
    return Placement(
        tuple(disks.values()),
        tuple(stores.values()),
        [shards if offloaded else None for offloaded in placed.params_offloaded],
        [optimizer_store if offloaded else None for offloaded in placed.optimizer_offloaded],
        Pipeline(moved_stores, placed.num_chunks, placed.chunk_numel, placed.element_bytes, timer, copies)
        if placed.num_chunks
        else None,
        copies,
        in_place=zero.offload_param.in_place,
    )


def open_disk(path: str, nbytes: int, config: Config, rank: int, unallocated_bytes: int = 0) -> DiskStore:
    """Open a store of ``nbytes`` bytes in the folder ``path``, with the settings of the configuration.

    Args:
        path: The folder.
        nbytes: The padded bytes of all states.
        config: The configuration.
        rank: This rank, for messages.
        unallocated_bytes: As of ``DiskStore``.

    Raises:
        OffloadError: ``path`` cannot be used, or has too little room.
    """
    folder = SwapFolder(path, label=f"rank{rank}", min_free_bytes=nbytes - unallocated_bytes)
    auto = None in (config.aio.block_size, config.aio.queue_depth)
    tuned = tune(path) if auto and nbytes > MIN_TUNED_BYTES else DiskSettings()
    aio = config.aio
    queue = DiskQueue(
        aio.queue_depth or tuned.queue_depth, aio.block_size or tuned.block_size, aio.backend or tuned.backend
    )
    return DiskStore(folder, queue, nbytes, unallocated_bytes)
