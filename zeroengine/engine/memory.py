"""Measure the bytes that each state of an engine holds on this rank, and explain an out-of-memory error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from zeroengine.config import Config
from zeroengine.engine.assembly import EngineParts
from zeroengine.offload.interfaces import Medium
from zeroengine.offload.state_offloader import resident_bytes

REPORTED_STATES = ("parameters", "gradients", "master", "optimizer")
WORKING = ("buckets", "gathered", "staging")
METHOD = TypeVar("METHOD", bound=Callable[..., Any])


@dataclass(frozen=True)
class Memory:
    """Bytes that an engine holds on this rank now, by state. ``str`` of it is a table for people.

    Attributes:
        device: The device of the engine, to whose memory all of the following refer but ``cpu`` and ``nvme``.
        parameters: In the compute dtype: shards, or whole parameters where the parameter degree is 1.
        gradients: What is kept of them between backwards.
        master: The fp32 master weights, where the compute dtype is lower.
        optimizer: The moments.
        buckets: Gradients on their way into a reduction.
        gathered: Full buffers of units that are released between uses, and gathered right now.
        put_off: Of ``gathered``, by unit: the bytes that a tensor of the user shares, so that they are not freed.
        staging: Buffers between where states live and the computation.
        checkpoint: The copy that ``checkpoint.async_save`` writes from, kept for the next one; on a GPU see ``cpu``.
        cpu: Beside a GPU: the bytes in CPU memory, by the names above.
        nvme: Of the four states, the bytes that are on a disk and not in memory.
    """

    device: str
    parameters: int
    gradients: int
    master: int
    optimizer: int
    buckets: int
    gathered: int
    put_off: Mapping[str, int] = field(default_factory=dict)
    staging: int = 0
    checkpoint: int = 0
    cpu: Mapping[str, int] = field(default_factory=dict)
    nvme: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return the bytes in the device's memory."""
        return sum(getattr(self, name) for name in (*REPORTED_STATES, *WORKING, "checkpoint"))

    @property
    def states(self) -> int:
        """Return the bytes that the table of ZeRO, section 5, counts: the four states, wherever they are."""
        return sum(getattr(self, name) + self.cpu.get(name, 0) + self.nvme.get(name, 0) for name in REPORTED_STATES)

    def __str__(self) -> str:
        """Return a table with a row for each state and a column for each kind of memory."""
        offloaded = {name: sizes for name, sizes in (("CPU", self.cpu), ("NVMe", self.nvme)) if any(sizes.values())}
        device_head = "memory" if self.device == "cpu" else "GPU"
        heads = "".join(f"{name:>16}" for name in (device_head, *offloaded))
        lines = [f"{f'on {self.device}':<12}{heads}" if offloaded else f"on {self.device}"]
        for name in (*REPORTED_STATES, *WORKING, "checkpoint", "total"):
            # Staging belongs to offloading, so this row would only distract without it.
            if name == "staging" and not offloaded:
                continue
            if name == "checkpoint" and not (self.checkpoint or self.cpu.get(name)):
                continue
            line = f"{name:<12}{getattr(self, name) / 2**20:>12,.1f} MiB"
            for sizes in offloaded.values():
                size = sum(sizes.values()) if name == "total" else sizes.get(name, 0)
                line += f"{size / 2**20:>12,.1f} MiB"
            lines.append(line)
            if name == "gathered":
                for unit, size in self.put_off.items():
                    lines.append(f"  of it, unit {unit}: {size / 2**20:,.1f} MiB, which a tensor shares")
        return "\n".join(lines)


def measure_memory(parts: EngineParts, checkpoint_copy_bytes: int) -> Memory:
    """Return the bytes that each state holds on this rank now.

    Args:
        parts: The parts of the engine.
        checkpoint_copy_bytes: The bytes of the copy that a checkpoint is written from.
    """
    # Each state is counted once, by the medium of its store, so the columns of the table add up.
    on_device, in_cpu, on_disk = (_bytes_of_states(parts, medium) for medium in (None, "cpu", "nvme"))
    # Host buffers are device memory where the engine computes on the CPU, so they are counted in one place or the
    # other.
    host_staging = parts.placement.host_buffer_bytes
    computes_on_cpu = parts.group.device.type == "cpu"
    return Memory(
        device=str(parts.group.device),
        **on_device,
        buckets=parts.reducer.buffer_bytes(),
        put_off={unit.name: unit.gathered_bytes() for unit in parts.gatherer.deferred_frees.units()},
        gathered=sum(unit.gathered_bytes() for unit in parts.units),
        staging=parts.placement.send_buffer_bytes + (host_staging if computes_on_cpu else 0),
        checkpoint=checkpoint_copy_bytes if computes_on_cpu else 0,
        cpu=in_cpu | ({} if computes_on_cpu else {"staging": host_staging, "checkpoint": checkpoint_copy_bytes}),
        nvme=on_disk,
    )


def _bytes_of_states(parts: EngineParts, medium: Medium | None) -> dict[str, int]:
    """Return the bytes of each state in one kind of memory; None is the device's."""
    # A shard may be away for a while and then holds no bytes, so resident bytes are counted rather than sizes.
    sizes = parts.optimizer.bytes_in(medium)
    shards = ((unit.shard, unit.offloaded_shards) for unit in parts.units)
    gradients = ((grads.flat_grads, grads.store) for grads in parts.reducer.gradients)
    for name, tensors in (("parameters", shards), ("gradients", gradients)):
        sizes[name] = sum(
            resident_bytes(tensor) for tensor, store in tensors if (None if store is None else store.medium) == medium
        )
    return sizes


def explain_out_of_memory(method: METHOD) -> METHOD:
    """Return a method of an engine whose out-of-memory errors say what the engine holds and what to change."""

    @functools.wraps(method)
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(engine, *args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                rest = "The rest are activations, temporaries and what else runs there."
                holds = f"zeroengine holds, {engine.memory()}\n\n{rest}"
                add_advice(error, engine.config, engine.device, engine.world_size, holds)
            raise

    return run  # type: ignore[return-value]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether ``error`` says that a tensor did not fit into memory, the device's or the host's."""
    # For the host's memory torch has no class of errors.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def add_advice(error: RuntimeError, config: Config, device: torch.device, world_size: int, holds: str) -> None:
    """Add to the message of an out-of-memory error what to change. It keeps its type, for callers that catch it.

    Args:
        error: The error.
        config: The resolved configuration.
        device: The device that the model computes on.
        world_size: The number of ranks.
        holds: What takes the memory, in sentences.
    """
    zero, computes_on_cpu = config.zero_optimization, device.type == "cpu"
    # The remedies are listed with the cheapest first. Offloading costs most time, so it comes last.
    remedies = []
    if zero.stage < 3 and world_size > 1:
        remedies.append(f'"zero_optimization": {{"stage": {zero.stage + 1}}}')
    if config.low_precision is None:
        remedies.append('"bf16": {"enabled": true}')
    remedies += ["a smaller micro-batch with more gradient_accumulation_steps", "activation checkpointing"]
    target = '"nvme", "nvme_path": "/a/folder"' if computes_on_cpu else '"cpu"'
    for key, lowest_stage in (("offload_optimizer", 0), ("offload_param", 3)):
        place = getattr(zero, key).device
        if zero.stage >= lowest_stage and (place == "none" or (place == "cpu" and computes_on_cpu)):
            remedies.append(f'"zero_optimization": {{"{key}": {{"device": {target}}}}}')
    # The message of torch stays first: it says how many bytes were asked for.
    error.args = (f"{error}\n\n{holds} What takes less: {', or '.join(remedies)}.",)
