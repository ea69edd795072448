"""Which of a model's states live elsewhere than on the device, and the stores that they live in."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.config import FLOATS, Config
from zeroengine.config.offload import OffloadOptimizer, OffloadParam
from zeroengine.disk.probe import DiskSettings, tune
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError
from zeroengine.offload.device_copies import Copies, GPUCopies
from zeroengine.offload.disk_store import DiskStore, OffloadStore, padded_nbytes
from zeroengine.offload.host_store import DeviceStore, DiskThroughHost, HostStore
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.pipeline import Pipeline, StateStore
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout

MIN_TUNED_BYTES = 1 << 28  # of states on one disk
PIECE = 4096  # what buffers hold a multiple of, in elements
MEMORY = ""  # stands for CPU memory where a folder's name would


@dataclass(frozen=True)
class Placement:
    """Where each unit's states live; None stands for the device.

    Attributes:
        parameters: of each unit, where its shard lives.
        optimizer: of each trainable unit, where master, moments and summed gradients live.
        pipeline: what brings states that live elsewhere to the update.
    """

    disks: tuple[DiskStore, ...]
    stores: tuple[OffloadStore, ...]
    parameters: Sequence[OffloadedShards | None]
    optimizer: Sequence[OffloadStore | None]
    pipeline: Pipeline | None
    copies: Copies | None = None

    @property
    def send_buffer_bytes(self) -> int:
        """Of memory that shards are sent from."""
        shards = {id(shards): shards for shards in self.parameters if shards is not None}
        return sum(shards.nbytes for shards in shards.values())

    @property
    def host_buffer_bytes(self) -> int:
        """Of CPU memory between stores and computation."""
        bounces = sum(store.nbytes for store in self.stores if isinstance(store, DiskThroughHost))
        return bounces + (self.pipeline.nbytes if self.pipeline is not None else 0)

    def evict(self, *states: torch.Tensor) -> None:
        """Gives back memory that using these states in place took, or any states; see `DiskStore.evict`."""
        for disk in self.disks:
            disk.evict(*states)

    def check_intact(self) -> None:
        """
        Raises:
            ZeroEngineError: states are half updated.
        """
        for disk in self.disks:
            disk.check_intact()

    def finish_copies(self) -> None:
        """Returns when no copy between a GPU and the host is under way: states may be written where they are."""
        if self.copies is not None:
            self.copies.synchronize()

    def close(self) -> None:
        self.finish_copies()
        for store in self.stores:
            if isinstance(store, DiskThroughHost):
                store.close()
        for disk in self.disks:
            disk.close()


def place_states(
    plans: Sequence[UnitPlan],
    degrees: Degrees,
    config: Config,
    transport: Transport,
    device: torch.device,
    copies: Copies | None = None,
) -> Placement:
    """Opens the stores that ``config`` names for the states of a model cut into ``plans``.

    Args:
        copies: between ``device`` and the host. None: a GPU's own; on the CPU none.

    Raises:
        ZeroEngineError: a path cannot be used, or there is too little room.
    """
    zero = config.zero_optimization
    if copies is None and device.type == "cuda":
        used = [section for section in (zero.offload_optimizer, zero.offload_param) if section.device != "none"]
        copies = GPUCopies(device, pin=all(section.pin_memory for section in used))
    params_at, optimizer_at = (_place_of(section, copies) for section in (zero.offload_param, zero.offload_optimizer))
    trainable = [plan for plan in plans if plan.trainable]
    params_offloaded = [params_at is not None and plan.numel > zero.param_persistence_threshold for plan in plans]
    homes = _within_ratio([plan.numel for plan in trainable], zero.offload_optimizer.ratio)
    homes = [goes and optimizer_at is not None for goes in homes]
    expected: dict[str, int] = {}
    shard_bytes = [
        padded_nbytes(_shard_numel(plan, degrees, degrees.parameters, transport) * plan.dtype.itemsize) * is_offloaded
        for plan, is_offloaded in zip(plans, params_offloaded, strict=True)
    ]
    if params_at is not None:
        expected[params_at] = sum(shard_bytes)
    if optimizer_at is not None:
        gone = (plan for plan, goes in zip(trainable, homes, strict=True) if goes)
        nbytes = sum(_optimizer_room(plan, degrees, config, transport) for plan in gone)
        expected[optimizer_at] = expected.get(optimizer_at, 0) + nbytes
    if not expected:
        return Placement((), (), [None] * len(plans), [None] * len(trainable), None)
    disks = {at: open_disk(at, nbytes, config, transport.rank) for at, nbytes in expected.items() if at != MEMORY}
    stores: dict[str, OffloadStore] = dict(disks)
    if copies is not None:
        stores = {at: DiskThroughHost(disk, copies, zero.offload_param.buffer_count) for at, disk in disks.items()}
        stores |= {MEMORY: HostStore(copies)} if MEMORY in expected else {}
    shards = None
    if params_at is not None:
        shards = OffloadedShards(stores[params_at], transport, zero.offload_param.buffer_count)
    moved_from: list[StateStore] = list(disks.values())
    if copies is not None:
        moved_from.append(DeviceStore(copies, tuple(stores.values())))
    moved = max((_moved_bytes(plan, config, params_at, optimizer_at, copies) for plan in trainable), default=1)
    largest = max((_shard_numel(plan, degrees, degrees.optimizer, transport) for plan in trainable), default=1)
    numel = min(zero.offload_optimizer.buffer_size, -(-largest // PIECE) * PIECE)  # no piece is longer than a shard
    piece, count = max(numel // PIECE, 1) * PIECE, zero.offload_optimizer.buffer_count
    to_the_cpu = copies is None or optimizer_at is not None  # else the update is on the device, and shards come to it
    slots = zero.offload_param.buffer_count * max(shard_bytes) if params_at not in (None, MEMORY) else 0
    check_room(expected.get(MEMORY, 0) + to_the_cpu * count * piece * moved + slots, on_disk=MEMORY not in expected)
    return Placement(
        tuple(disks.values()),
        tuple(stores.values()),
        [shards if is_offloaded else None for is_offloaded in params_offloaded],
        [stores[optimizer_at] if optimizer_at is not None and goes else None for goes in homes],
        Pipeline(moved_from, count, piece, moved, copies) if to_the_cpu else None,
        copies,
    )


def can_offload_gradients(degrees: Degrees, transport: Transport) -> bool:
    """Whether what is kept of gradients is only read again at the step, so that it may live elsewhere."""
    return degrees.gradients > 1 or transport.world_size == 1


def _place_of(section: OffloadOptimizer | OffloadParam, copies: Copies | None) -> str | None:
    """A folder, or ``MEMORY``; None: the device."""
    if section.device == "cpu" and copies is not None:
        return MEMORY
    return section.disk


def _moved_bytes(
    plan: UnitPlan, config: Config, params_at: str | None, optimizer_at: str | None, copies: Copies | None
) -> int:
    """Of an element's states, those that a pipeline moves at most: what is on disk, or on a GPU."""
    on_disk, gradient = optimizer_at not in (None, MEMORY), config.accumulation_dtype(plan.dtype).itemsize
    moved = plan.dtype.itemsize if copies is not None or params_at is not None else 0
    moved += gradient if copies is not None or on_disk else 0
    return max(moved + (_optimizer_bytes(plan, config, gradient=False) if on_disk else 0), 1)


def check_room(nbytes: int, *, on_disk: bool) -> None:
    """
    Args:
        nbytes: of CPU memory, on each rank.
        on_disk: whether the states themselves are on a disk already.

    Raises:
        OffloadError: there is less CPU memory left than all ranks of this machine will take.
    """
    ranks, left = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_memory()
    if nbytes * ranks > left:
        other = "" if on_disk else ', or write "device": "nvme"'
        raise OffloadError(
            f"offloading takes {nbytes * ranks / 2**30:,.1f} GiB of CPU memory on this machine ({ranks} "
            f"{'ranks' if ranks > 1 else 'rank'}), and {left / 2**30:,.1f} GiB are left: offload less with "
            f'"ratio", with smaller units, or with a smaller "buffer_size" or "buffer_count", use more machines{other}'
        )


def available_memory() -> float:
    """Bytes of CPU memory that this process may still take, as far as Linux and a container say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    left = int(found[1]) << 10 if found is not None else math.inf
    group = Path("/sys/fs/cgroup")
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        files = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)  # that can go
        left = min(left, int(limit) - int(used) + (int(files[1]) if files is not None else 0))
    return left


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def open_disk(path: str, nbytes: int, config: Config, rank: int) -> DiskStore:
    """Open a store of ``nbytes`` bytes in the folder ``path``, with the settings of the configuration.

    Raises:
        OffloadError: ``path`` cannot be used, or has too little room.
    """
    folder = SwapFolder(path, label=f"rank{rank}", min_free_bytes=nbytes)
    # A measurement of what the configuration leaves "auto" is worth its time only where there is much to move.
    auto = None in (config.aio.block_size, config.aio.queue_depth)
    tuned = tune(path) if auto and nbytes > MIN_TUNED_BYTES else DiskSettings()
    # Configurations may name "libaio", as DeepSpeed's do: it is accepted with a notice, and stands for "auto".
    backend = None if config.aio.backend == "libaio" else config.aio.backend
    queue = DiskQueue(
        config.aio.queue_depth or tuned.queue_depth,
        config.aio.block_size or tuned.block_size,
        backend or tuned.backend,
    )
    return DiskStore(folder, queue, nbytes)


def _shard_numel(plan: UnitPlan, degrees: Degrees, degree: int, transport: Transport) -> int:
    """Elements of the shard that a rank owns of a state of ``degree``, padding included."""
    shapes = ((name, tuple(param.shape)) for name, param in plan.params)
    align = transport.shard_align(plan.dtype)
    return FlatLayout.build(plan.name, shapes, degrees, transport.world_size, align).shard_numel(degree)


def _optimizer_room(plan: UnitPlan, degrees: Degrees, config: Config, transport: Transport) -> int:
    """Bytes that a unit's master, moments and gradients take in a store."""
    numel = _shard_numel(plan, degrees, degrees.optimizer, transport)
    mixed = plan.dtype in (torch.bfloat16, torch.float16)
    nbytes = 2 * padded_nbytes(numel * FLOATS[config.optimizer_state_dtype].itemsize) + mixed * padded_nbytes(numel * 4)
    if can_offload_gradients(degrees, transport):
        gradients = _shard_numel(plan, degrees, degrees.gradients, transport)
        nbytes += padded_nbytes(gradients * config.accumulation_dtype(plan.dtype).itemsize)
    return nbytes


def _optimizer_bytes(plan: UnitPlan, config: Config, gradient: bool) -> int:
    """Of an element: moments, the master where it is not the parameter, and the ``gradient`` where it leaves, too."""
    mixed = plan.dtype in (torch.bfloat16, torch.float16)
    moments = 2 * FLOATS[config.optimizer_state_dtype].itemsize
    return (4 if mixed else 0) + moments + gradient * config.accumulation_dtype(plan.dtype).itemsize


def _within_ratio(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Which of the units, in order, are offloaded so that at most ``ratio`` of all elements are."""
    room, chosen = ratio * sum(sizes), []
    for size in sizes:
        chosen.append(size <= room)
        room -= size if chosen[-1] else 0
    return chosen
