"""Measure the bytes that each state of an engine holds on this rank, and explain an out-of-memory error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from zeroengine.engine.assembly import EngineParts
from zeroengine.memory.state_bytes import BUFFERS, STATES
from zeroengine.memory.state_memory import StateMemory
from zeroengine.offload.interfaces import Medium
from zeroengine.offload.state_offloader import resident_bytes

# What the advice in an error begins with.
ADVICE = "What takes less"
METHOD = TypeVar("METHOD", bound=Callable[..., Any])


@dataclass(frozen=True)
class Memory:
    """Bytes that an engine holds on this rank now, by state. ``str`` of it is a table for people.

    Attributes:
        device: The device of the engine. All of the following are bytes of its memory, except ``cpu`` and ``nvme``.
        parameters: The parameters in the compute dtype: shards, with those of the second copy if there is one, or whole
            parameters at parameter degree 1.
        gradients: The summed gradients that are kept between backwards.
        master: The fp32 master weights, if the compute dtype is lower.
        optimizer: The moments, the moving averages of the weights, and what the outer step of ``local_steps`` keeps.
        buckets: The buffers that gradients are reduced from.
        gathered: The full buffers of units that are released between uses, and are gathered now.
        put_off: The part of ``gathered``, by unit, that is not freed because a tensor of the user shares the memory.
        staging: Buffers between the stores of offloaded states and the computation, between hosts whose ranks share
            memory, between the replicas of ``local_steps``, and, where they share memory, between shards and the
            owners of matrices; what Gloo receives gradients into; what parts of sequences are sent from; and, in
            ``cpu``, the buffers of ``activation_checkpointing.cpu_checkpointing``.
        quantized: The packets that quantized collectives keep, and the errors of gradients (``zeropp_loco_param``).
        checkpoint: The copy that ``checkpoint.async_save`` writes from, kept for the next save, and loaded states of
            frozen parameters, which the next saves write; on a GPU see ``cpu``.
        cpu: If the engine is on a GPU: the bytes in CPU memory, by the names above, those that ``offload_states`` moved
            there included.
        nvme: The bytes of the four states that are on a disk and not in memory.
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
    quantized: int = 0
    checkpoint: int = 0
    cpu: Mapping[str, int] = field(default_factory=dict)
    nvme: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return the bytes in the device's memory."""
        return sum(getattr(self, name) for name in (*STATES, *BUFFERS, "checkpoint"))

    @property
    def states(self) -> int:
        """Return the bytes that the table in ZeRO, section 5, counts: the four states, wherever they are."""
        return sum(getattr(self, name) + self.cpu.get(name, 0) + self.nvme.get(name, 0) for name in STATES)

    def __str__(self) -> str:
        """Return a table with a row for each state and a column for each kind of memory."""
        offloaded = {name: sizes for name, sizes in (("CPU", self.cpu), ("NVMe", self.nvme)) if any(sizes.values())}
        device_head = "memory" if self.device == "cpu" else "GPU"
        heads = "".join(f"{name:>16}" for name in (device_head, *offloaded))
        lines = [f"{f'on {self.device}':<12}{heads}" if offloaded else f"on {self.device}"]
        # Where nothing uses them, these rows would only distract.
        rare = {
            "staging": offloaded or self.staging,
            "quantized": self.quantized,
            "checkpoint": self.checkpoint or self.cpu.get("checkpoint"),
        }
        for name in (*STATES, *BUFFERS, "checkpoint", "total"):
            if not rare.get(name, True):
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
    # Each state is counted once, by the medium of its store, so that the columns of the table add up.
    on_device, in_cpu, on_disk = (_bytes_of_states(parts, medium) for medium in (None, "cpu", "nvme"))
    # If the engine computes on the CPU, host buffers count as memory of the device.
    # The memory that transports keep is that of the host.
    host_staging = parts.partition.placement.host_buffer_bytes + parts.ranks.transport.staging_bytes()
    host_staging += 0 if parts.ranks.replicas is None else parts.ranks.replicas.between.staging_bytes()
    host_staging += 0 if parts.passes.host_activations is None else parts.passes.host_activations.nbytes
    computes_on_cpu = parts.ranks.group.device.type == "cpu"
    return Memory(
        device=str(parts.ranks.group.device),
        **on_device,
        buckets=parts.passes.reducer.launcher.nbytes,
        put_off={unit.name: unit.gathered_bytes() for unit in parts.passes.gatherer.deferred_frees.units()},
        gathered=sum(unit.gathered_bytes() for unit in parts.partition.units),
        staging=parts.partition.placement.send_buffer_bytes
        + parts.loop.sequences.send_memory.nbytes
        + parts.states.optimizer.backend.exchange_bytes
        + (0 if parts.states.outer_step is None else parts.states.outer_step.mean.nbytes)
        + (host_staging if computes_on_cpu else 0),
        quantized=sum(x.nbytes for x in (parts.ranks.quantized_gather, parts.ranks.quantized_reduce) if x is not None),
        checkpoint=checkpoint_copy_bytes if computes_on_cpu else 0,
        cpu=in_cpu | ({} if computes_on_cpu else {"staging": host_staging, "checkpoint": checkpoint_copy_bytes}),
        nvme=on_disk,
    )


def _bytes_of_states(parts: EngineParts, medium: Medium | None) -> dict[str, int]:
    """Return the bytes of each state in one kind of memory. None stands for the device."""
    # A temporarily offloaded shard has no bytes here, so resident bytes are counted rather than sizes.
    sizes = parts.states.optimizer.bytes_in(medium)
    if parts.states.outer_step is not None:
        sizes["optimizer"] += parts.states.outer_step.bytes_in(medium)
    shards = ((unit.shard, unit.offloaded_shards) for unit in parts.partition.units)
    gradients = ((unit_grads.flat_grads, unit_grads.store) for unit_grads in parts.passes.reducer.gradients)
    for name, tensors in (("parameters", shards), ("gradients", gradients)):
        sizes[name] = sum(
            resident_bytes(tensor) for tensor, store in tensors if (None if store is None else store.medium) == medium
        )
    for state, nbytes in parts.loop.state_offloader.bytes_in(medium).items():
        sizes[{"masters": "master", "moments": "optimizer", "averages": "optimizer"}.get(state, state)] += nbytes
    if medium is None:
        second_copies = (unit.secondary for unit in parts.partition.units)
        sizes["parameters"] += sum(resident_bytes(copy.tensor) for copy in second_copies if copy is not None)
    return sizes


def explain_out_of_memory(method: METHOD) -> METHOD:
    """Make out-of-memory errors of an engine's method say what the engine holds and what to change."""

    @functools.wraps(method)
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(engine, *args, **kwargs)
        except RuntimeError as error:
            explain_if_out_of_memory(error, engine._parts, engine._checkpoints.copy_bytes)
            raise

    return run  # type: ignore[return-value]


def explain_if_out_of_memory(error: RuntimeError, parts: EngineParts, checkpoint_copy_bytes: int) -> None:
    """Add what the engine holds and what to change to ``error``, if it is an out-of-memory error.

    Args:
        error: The error.
        parts: The parts of the engine.
        checkpoint_copy_bytes: The bytes of the copy that a checkpoint is written from.
    """
    # Of two calls that pass the error on, the inner one has explained it.
    if is_out_of_memory(error) and ADVICE not in str(error):
        memory = measure_memory(parts, checkpoint_copy_bytes)
        rest = "The rest are activations, temporaries and what else runs there."
        add_advice(error, parts.setup.state_memory, parts.ranks.group.device, f"zeroengine holds, {memory}\n\n{rest}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether ``error`` says that a tensor did not fit into the memory of the device or the host."""
    # Torch has no class of errors for the host's memory.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def add_advice(error: RuntimeError, state_memory: StateMemory, device: torch.device, holds: str) -> None:
    """Add advice to the message of an out-of-memory error, which keeps its type for callers that catch it.

    Args:
        error: The error.
        state_memory: What states take with other choices.
        device: The device that the model computes on.
        holds: Sentences that say what takes the memory.
    """
    # The cheapest remedies come first. Offloading costs the most time, so it comes last.
    try:
        remedies, offloads = state_memory.advice()
    # Such as of a model that was changed since. It must not hide the error itself.
    except Exception:
        remedies, offloads = [], []
    if state_memory.config.low_precision is None:
        remedies.append('"bf16": {"enabled": true}')
    remedies += ["a smaller micro-batch with more gradient_accumulation_steps", "activation checkpointing", *offloads]
    # The message of torch stays first: it says how many bytes were asked for.
    error.args = (f"{error}\n\n{holds} {ADVICE}: {', or '.join(remedies)}.",)
