"""The arithmetic of offload: which units' states go where, and how many bytes the stores and the buffers take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

import torch

from zeroengine.config import Config
from zeroengine.config.offload import OffloadOptimizer, OffloadParam
from zeroengine.disk.aligned_memory import ALIGNMENT, round_up_to_block
from zeroengine.offload.interfaces import Medium, padded_nbytes
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.unit_layout import DegreeRules, layout_of_unit

# The location of states in CPU memory. The location of states on a disk is the path of a folder.
CPU_MEMORY = ""
# The elements of a chunk are a multiple of this for each element that shares a scale, so that the scales of a chunk
# begin at a block of their file.
SCALES_PER_BLOCK = ALIGNMENT // torch.float32.itemsize
StateName = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True)
class PlacementPlan:
    """Where each unit's states go, and the sizes of stores and buffers, before anything is opened or allocated.

    Attributes:
        param_location: The folder of the parameter shards, or ``CPU_MEMORY``; None: the device.
        optimizer_location: Likewise, of the optimizer's states.
        params_offloaded: For each unit, whether its parameter shard is offloaded.
        optimizer_offloaded: For each trainable unit, whether its optimizer's states are offloaded.
        bytes_by_location: The bytes that all states take at each location, each padded to whole blocks.
        shard_bytes: For each unit, the bytes, padded, of its parameter shard if that is offloaded; else 0.
        num_chunks: The number of the pipeline's buffers; 0 without a pipeline.
        chunk_numel: The elements in one of them.
        element_bytes: The bytes of one element in it, of all states that are moved.
    """

    param_location: str | None
    optimizer_location: str | None
    params_offloaded: tuple[bool, ...]
    optimizer_offloaded: tuple[bool, ...]
    bytes_by_location: dict[str | None, int]
    shard_bytes: tuple[int, ...]
    num_chunks: int
    chunk_numel: int
    element_bytes: int

    @property
    def largest_shard_bytes(self) -> int:
        """Bytes of the largest parameter shard that is offloaded."""
        return max(self.shard_bytes, default=0)

    @property
    def is_empty(self) -> bool:
        """Whether every state stays on the device."""
        return self.param_location is None and self.optimizer_location is None

    @property
    def pipeline_bytes(self) -> int:
        """Bytes of the pipeline's buffers."""
        return self.num_chunks * self.chunk_numel * self.element_bytes


def plan_placement(
    plans: Sequence[UnitPlan],
    rules: DegreeRules,
    config: Config,
    world_size: int,
    shard_align_bytes: int,
    *,
    has_device_memory: bool,
) -> PlacementPlan:
    """Decide where each unit's states go, which depends on sizes alone and so is the same on all ranks.

    Args:
        plans: The units.
        rules: The degrees of each unit.
        config: The configuration, with the place of each state.
        world_size: The number of ranks.
        shard_align_bytes: ``Transport.shard_align_bytes``.
        has_device_memory: Whether the device has memory apart from the host's, as a GPU has.
    """
    zero = config.zero_optimization
    param_location = _location_of(zero.offload_param, has_device_memory)
    optimizer_location = _location_of(zero.offload_optimizer, has_device_memory)
    trainable = [plan for plan in plans if plan.trainable]
    if param_location is None and optimizer_location is None:
        return PlacementPlan(None, None, (False,) * len(plans), (False,) * len(trainable), {}, (), 0, 0, 1)

    degrees_of = {id(plan): rules.of_unit(plan) for plan in plans}
    numel_of = {
        id(plan): layout_of_unit(plan, degrees_of[id(plan)], world_size, shard_align_bytes).numel for plan in plans
    }

    def shard_numel(plan: UnitPlan, state: StateName) -> int:
        return numel_of[id(plan)] // int(getattr(degrees_of[id(plan)], state))

    # Offloading the shard of a unit that stays gathered would free no memory.
    param_ratio = zero.offload_param.ratio if param_location is not None else 0.0
    is_released = [plan.numel > zero.param_persistence_threshold for plan in plans]
    within = iter(_within_ratio([plan.numel for plan in compress(plans, is_released)], param_ratio))
    params_offloaded = [released and next(within) for released in is_released]
    ratio = zero.offload_optimizer.ratio if optimizer_location is not None else 0.0
    optimizer_offloaded = _within_ratio([plan.numel for plan in trainable], ratio)
    shard_bytes = [
        padded_nbytes(shard_numel(plan, "parameters") * plan.dtype.itemsize) * offloaded
        for plan, offloaded in zip(plans, params_offloaded, strict=True)
    ]
    state_bytes = [
        offloaded
        * _optimizer_state_bytes(
            plan,
            config,
            shard_numel(plan, "optimizer"),
            numel_of[id(plan)] // plan.data_ranks(world_size),
            shard_numel(plan, "gradients")
            if can_offload_gradients(degrees_of[id(plan)], plan.data_ranks(world_size))
            else None,
        )
        for plan, offloaded in zip(trainable, optimizer_offloaded, strict=True)
    ]
    # Both sections may name one folder, which then has one store with room for both.
    bytes_by_location = Counter({param_location: sum(shard_bytes)})
    bytes_by_location[optimizer_location] += sum(state_bytes)

    element_bytes = max(
        (
            _moved_element_bytes(plan, config, param_location, optimizer_location, has_device_memory)
            for plan in trainable
        ),
        default=1,
    )
    # If only parameters are offloaded from a GPU there is no pipeline, because the update runs on the GPU.
    has_pipeline = not has_device_memory or optimizer_location is not None
    largest_shard = max((shard_numel(plan, "optimizer") for plan in trainable), default=1)
    # No chunk need be longer than a shard.
    chunk_numel = min(zero.offload_optimizer.buffer_size, round_up_to_block(largest_shard))
    largest_block = max((plan.algorithm.block for plan in trainable), default=1)
    granularity = ALIGNMENT if largest_block == 1 else math.lcm(ALIGNMENT, SCALES_PER_BLOCK * largest_block)
    return PlacementPlan(
        param_location,
        optimizer_location,
        tuple(params_offloaded),
        tuple(optimizer_offloaded),
        dict(bytes_by_location),
        tuple(shard_bytes),
        zero.offload_optimizer.buffer_count if has_pipeline else 0,
        max(chunk_numel // granularity, 1) * granularity,
        element_bytes,
    )


def can_offload_gradients(degrees: Degrees, world_size: int) -> bool:
    """Return whether a rank keeps only its shard of the summed gradients, which nothing reads before the step."""
    return degrees.gradients > 1 or world_size == 1


def can_gather_ahead(medium: Medium, world_size: int, *, overlaps: bool) -> bool:
    """Return whether the gather of offloaded shards may be issued ahead of its use, rather than only their read.

    Args:
        medium: The kind of memory that the shards are in.
        world_size: The number of ranks.
        overlaps: Whether collectives overlap the computation (``Transport.overlaps``).
    """
    # A single rank needs no collective. Otherwise the transport must overlap, and a stream must order the collective
    # behind the read, as for CPU memory. A shard on a disk must arrive before its collective is issued.
    return world_size == 1 or (overlaps and medium == "cpu")


def _location_of(section: OffloadOptimizer | OffloadParam, has_device_memory: bool) -> str | None:
    """Return the folder that states go to, or ``CPU_MEMORY``; None: they stay on the device."""
    return CPU_MEMORY if section.device == "cpu" and has_device_memory else section.disk


def _within_ratio(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Return for each unit whether it is offloaded, so that at most ``ratio`` of all elements are."""
    remaining, chosen = ratio * sum(sizes), []
    for size in sizes:
        chosen.append(size <= remaining)
        remaining -= size if chosen[-1] else 0
    return chosen


def _optimizer_state_bytes(plan: UnitPlan, config: Config, numel: int, piece_numel: int, grad_numel: int | None) -> int:
    """Return the bytes that a unit's master weights, moments, averages and gradients take in a store.

    Args:
        plan: The unit.
        config: The resolved configuration.
        numel: The elements that the rank updates.
        piece_numel: Those that it averages with other replicas (``local_steps``).
        grad_numel: Those of its summed gradients; None: they are elsewhere.
    """
    # Each state is padded separately, because each begins at a block of the file.
    nbytes = sum(map(padded_nbytes, plan.algorithm.moment_bytes(numel)))
    nbytes += plan.has_master * padded_nbytes(numel * torch.float32.itemsize)
    nbytes += 0 if config.ema is None else padded_nbytes(numel * config.ema.torch_dtype.itemsize)
    if config.local_steps is not None and config.local_steps.nesterov is not None:
        nbytes += 2 * padded_nbytes(piece_numel * torch.float32.itemsize)
    if grad_numel is not None:
        nbytes += padded_nbytes(grad_numel * config.accumulation_dtype(plan.dtype).itemsize)
    return nbytes


def _moved_element_bytes(
    plan: UnitPlan, config: Config, param_location: str | None, optimizer_location: str | None, has_device_memory: bool
) -> int:
    """Return the largest number of bytes per element that a pipeline moves: states on a disk or on a GPU."""
    optimizer_on_disk = optimizer_location not in (None, CPU_MEMORY)
    nbytes = (has_device_memory or param_location is not None) * plan.dtype.itemsize
    nbytes += (has_device_memory or optimizer_on_disk) * config.accumulation_dtype(plan.dtype).itemsize
    block = plan.algorithm.block
    state_bytes = math.ceil(sum(plan.algorithm.moment_bytes(block)) / block)
    state_bytes += plan.has_master * torch.float32.itemsize
    state_bytes += 0 if config.ema is None else config.ema.torch_dtype.itemsize
    return max(nbytes + optimizer_on_disk * state_bytes, 1)
