"""Which of a model's states live on disk, and the disks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm import Transport
from ..config import FLOATS, Config
from ..errors import ZeroEngineError
from ..partition import Degrees, UnitPlan
from .aio import DiskQueue
from .pipeline import Pipeline
from .probe import Settings, tune
from .shards import DiskShards
from .store import DiskStore, padded
from .swap import SwapFolder

WORTH_TUNING = 1 << 28  # bytes of states
PIECE = 4096  # what buffers hold a multiple of, in elements


@dataclass(frozen=True)
class Placement:
    """Where each unit's states live; None stands for the device.

    Attributes:
        parameters: of each unit, where its shard lives.
        optimizer: of each trainable unit, where master, moments and summed gradients live.
        pipeline: what brings states on disk to the update.
    """

    disks: tuple[DiskStore, ...]
    parameters: Sequence[DiskShards | None]
    optimizer: Sequence[DiskStore | None]
    pipeline: Pipeline | None

    @property
    def buffer_bytes(self) -> int:
        """Of memory between the disks and the computation."""
        shards = {id(shards): shards for shards in self.parameters if shards is not None}
        return sum(s.nbytes for s in shards.values()) + (self.pipeline.nbytes if self.pipeline is not None else 0)

    def let_go(self, *states: torch.Tensor) -> None:
        """Gives back memory that using these states in place took, or any states; see `DiskStore.let_go`."""
        for disk in self.disks:
            disk.let_go(*states)

    def check(self) -> None:
        """
        Raises:
            ZeroEngineError: states are half updated.
        """
        for disk in self.disks:
            disk.check()

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


def place(
    plans: Sequence[UnitPlan], degrees: Degrees, config: Config, transport: Transport, device: torch.device
) -> Placement:
    """Opens the disks that ``config`` names for the states of a model cut into ``plans``.

    Raises:
        ZeroEngineError: a path cannot be used, or has too little room.
    """
    zero = config.zero_optimization
    for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if device.type == "cuda" and section.device != "none":
            raise ZeroEngineError(
                f'zero_optimization.{key}: offloading from a GPU is not available yet; write "device": "none"'
            )
    trainable = [plan for plan in plans if plan.trainable]
    expected: dict[str, int] = {}
    away = [zero.offload_param.disk and plan.numel > zero.param_persistence_threshold for plan in plans]
    if zero.offload_param.disk:
        gone = (plan for plan, is_away in zip(plans, away, strict=True) if is_away)
        nbytes = sum(padded(plan.numel // degrees.parameters * plan.dtype.itemsize) for plan in gone)
        expected[zero.offload_param.disk] = nbytes
    homes = _within_ratio([plan.numel for plan in trainable], zero.offload_optimizer.ratio)
    if zero.offload_optimizer.disk:
        gone = (plan for plan, goes in zip(trainable, homes, strict=True) if goes)
        nbytes = sum(padded(plan.numel // degrees.optimizer * _optimizer_bytes(plan, config)) for plan in gone)
        expected[zero.offload_optimizer.disk] = expected.get(zero.offload_optimizer.disk, 0) + nbytes
    disks = {path: open_disk(path, nbytes, config, transport.rank) for path, nbytes in expected.items()}
    shards, optimizer = None, None
    if zero.offload_param.disk:
        shards = DiskShards(disks[zero.offload_param.disk], transport, zero.offload_param.buffer_count)
    if zero.offload_optimizer.disk:
        optimizer = disks[zero.offload_optimizer.disk]
    stores = tuple(disks.values())
    element_bytes = max(
        (
            (_optimizer_bytes(plan, config) if zero.offload_optimizer.disk else 0)
            + (plan.dtype.itemsize if zero.offload_param.disk else 0)
            for plan in trainable
        ),
        default=1,
    )
    piece = max(zero.offload_optimizer.buffer_size // PIECE, 1) * PIECE
    return Placement(
        stores,
        [shards if is_away else None for is_away in away],
        [optimizer if goes else None for goes in homes],
        Pipeline(stores, zero.offload_optimizer.buffer_count, piece, element_bytes) if stores else None,
    )


def open_disk(path: str, nbytes: int, config: Config, rank: int) -> DiskStore:
    """
    Raises:
        OffloadError: ``path`` cannot be used, or has too little room.
    """
    folder = SwapFolder(path, rank=rank, min_free_bytes=nbytes)
    found = (
        tune(path) if nbytes > WORTH_TUNING and None in (config.aio.block_size, config.aio.queue_depth) else Settings()
    )
    queue = DiskQueue(
        config.aio.queue_depth or found.queue_depth,
        config.aio.block_size or found.block_size,
        config.aio.backend or found.backend,
    )
    return DiskStore(folder, queue, nbytes)


def _optimizer_bytes(plan: UnitPlan, config: Config) -> int:
    """Of an element: gradient, moments, and the master where it is not the parameter."""
    mixed = plan.dtype in (torch.bfloat16, torch.float16)
    moments = 2 * FLOATS[config.optimizer_state_dtype].itemsize
    return (4 if mixed else 0) + moments + config.accumulation_dtype(plan.dtype).itemsize


def _within_ratio(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Which of the units, in order, are offloaded so that at most ``ratio`` of all elements are."""
    room, chosen = ratio * sum(sizes), []
    for size in sizes:
        chosen.append(size <= room)
        room -= size if chosen[-1] else 0
    return chosen
