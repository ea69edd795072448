"""Collect an engine's state for a checkpoint."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from zeroengine.checkpoint.dcp_metadata import ZEROENGINE_PREFIX
from zeroengine.checkpoint.engine_state import EngineState, EngineTensors
from zeroengine.checkpoint.entries import AVERAGE, MODEL, StateEntries, StateEntry, momentum_name
from zeroengine.errors import CheckpointError
from zeroengine.memory.checkpoint_copy import COPY_ALIGNMENT
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.partition.storages import storages_of
from zeroengine.utils.formats import round_up
from zeroengine.utils.work import Work


@dataclass(frozen=True)
class CheckpointContent:
    """Everything that one rank contributes to a checkpoint.

    Attributes:
        entries: The tensors by name, with this rank's boxes.
        objects: Further values by name, from this rank alone.
        aliases: Further names, and the entries that they stand for.
        about: The fields of the manifest that the engine knows.
        copies: Copies between the GPU that the tensors are on and the host; None on the CPU.
        note_read: Takes what still reads states on a stream of its own, for the next update to wait for.
    """

    entries: StateEntries
    objects: dict[str, Any]
    aliases: dict[str, str]
    about: dict[str, Any]
    copies: GPUCopies | None = None
    note_read: Callable[[Work], None] = field(default=lambda _: None)

    def copied(self, memory: torch.Tensor) -> tuple[CheckpointContent, list[Work]]:
        """Return a content whose tensors are copies, and what to wait for before they are read.

        Args:
            memory: Bytes of CPU memory to copy to, at least `copy_bytes` of them; on a GPU from
                `GPUCopies.host_memory`.
        """
        end, works = 0, []
        entries = {}
        for name, entry in self.entries.items():
            pieces = []
            for box, tensor in entry.pieces:
                copy = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                pieces.append((box, copy))
                if (work := self._start_copy(name, copy, tensor.detach())) is not None:
                    works.append(work)
                # The next piece may have another dtype, and a view has to begin at a multiple of its element size.
                end += round_up(tensor.nbytes, COPY_ALIGNMENT)
            entries[name] = StateEntry(entry.shape, entry.dtype, pieces)
        if self.copies is not None:
            works.append(self.copies.record_event())
        return CheckpointContent(entries, self.objects, self.aliases, self.about), works

    def _start_copy(self, name: str, target: torch.Tensor, source: torch.Tensor) -> Work | None:
        """Copy in the order of the current stream, or start a copy beside it, which is returned."""
        # The user's code may write what is the model's, at any time and on the current stream.
        if self.copies is None or name.startswith(MODEL) or self.copies.is_host(source):
            target.copy_(source, non_blocking=True)
            return None
        work = self.copies.copy(target, source)
        self.note_read(work)
        return work

    @property
    def copy_bytes(self) -> int:
        """The memory that a copy takes, in bytes."""
        return sum(
            round_up(tensor.nbytes, COPY_ALIGNMENT) for entry in self.entries.values() for _, tensor in entry.pieces
        )

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(entry.nbytes for entry in self.entries.values())


def collect_content(engine: EngineState, client_state: Any, *, frozen: bool) -> CheckpointContent:
    """Return what a checkpoint of the engine holds.

    Tensors are views of the engine's states, which must not change until they are saved or copied.

    Args:
        engine: The engine's state.
        client_state: What the user wants to save.
        frozen: Whether frozen parameters are part of it.

    Raises:
        CheckpointError: `client_state`, the schedule or a registered object holds objects that no checkpoint may.
    """
    tensors, group, config = engine.tensors, engine.tensors.group, engine.config
    rank = group.rank
    # Every rank has generators and registered objects of its own, so their names carry the rank.
    objects: dict[str, Any] = {f"{ZEROENGINE_PREFIX}rank.{rank}": random_states(group.device)}
    for name, stateful in engine.stateful.items():
        objects[stateful_name(name, rank)] = storable(f"the state of {name!r}", stateful.state_dict())
    names = tensors.saved_names()
    groups = [own | {"params": list(map(names.first, own["params"]))} for own in named_param_groups(tensors)]
    # These values are the same on all ranks or count from rank 0 only, so rank 0 stores them.
    if rank == 0:
        objects[f"{ZEROENGINE_PREFIX}client_state"] = storable("client_state", client_state)
        for key, value in names.computed.items():
            if not isinstance(value, torch.Tensor):
                objects[MODEL + key] = storable(f"{key!r} of the model's state dict", value)
        if engine.schedule is not None:
            objects[f"{ZEROENGINE_PREFIX}lr_scheduler"] = storable("the LR schedule", engine.schedule.state_dict())
        for i, saved in enumerate(groups):
            # Plain PyTorch reads hyperparameters from here; zeroengine reads them from the manifest.
            objects |= {f"optimizer.param_groups.{i}.{key}": value for key, value in saved.items()}
    about = {
        "step": engine.counters["global_steps"],
        "stage": config.zero_optimization.stage,
        "world_size": group.world_size,
        "precision": str(config.low_precision or torch.float32).removeprefix("torch."),
        "optimizer": tensors.optimizer.base_optimizer_name,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "counters": engine.counters,
        # The manifest is JSON, which knows neither tensors nor numbers of NumPy.
        "param_groups": json.loads(json.dumps(groups, default=_as_plain)),
        "loss_scaler": engine.scaler.state_dict() if config.scales_loss else {},
        "config": config.to_dict(),
        "left_out": [] if frozen else [key for own in tensors.frozen_names() for key in names.keys.get(own, [own])],
    }
    # Each element is stored by one rank, even where several ranks hold a copy of it.
    model = tensors.model_entries(once=True, frozen=frozen)
    entries = {names.in_checkpoint(own): entry for own, entry in model.items()}
    state, outer = tensors.optimizer_entries(once=True), tensors.outer_entries(once=True)
    entries |= {names.state_in_checkpoint(name): entry for name, entry in state.items()}
    entries |= {momentum_name(names.first(own)): entry for own, entry in outer.items()}
    averages = tensors.average_entries(once=True)
    entries |= {AVERAGE + names.first(own): entry for own, entry in averages.items()}
    if frozen:
        entries |= {MODEL + key: entry for key, entry in tensors.computed_entries(names).items()}
    # Tied parameters are one object with several names. Storing each name would double the largest tensors of many
    # models.
    aliases = {MODEL + key: MODEL + keys[0] for keys in names.keys.values() for key in keys[1:]}
    aliases |= {
        AVERAGE + key: AVERAGE + keys[0] for own, keys in names.keys.items() if own in averages for key in keys[1:]
    }
    return CheckpointContent(
        entries, objects, aliases, about, engine.placement.copies, tensors.gatherer.state_reads.append
    )


def named_param_groups(tensors: EngineTensors) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with the own names of parameters."""
    # Objects have no meaning in a file, so parameters are stored by name.
    names = {param: name for name, param in tensors.own_tensors().items()}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[storage] for param in group["params"] for _, storage in storages_of(param)]}
        for group in tensors.optimizer.param_groups
    ]


def _as_plain(value: Any) -> Any:
    """Return a tensor, such as a learning rate that a captured step reads, or a NumPy number as plain numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's generator, torch's, and NumPy's where the process has imported it."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    # Importing NumPy only to save a generator that nobody has used would cost time and memory.
    if "numpy" in sys.modules:
        # The restricted unpickler reads tensors but no arrays. The values are uint32, whose bits int32 carries.
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.view("int32")), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned."""
    # A state of another device is left alone, for the checkpoint may be loaded on a machine without a GPU.
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def stateful_name(name: str, rank: int) -> str:
    """Return the name in a checkpoint of a registered object's state on a rank."""
    return f"{ZEROENGINE_PREFIX}stateful.{rank}.{name}"


def versions() -> dict[str, str]:
    """Return the versions of zeroengine and torch."""
    return {"zeroengine": sys.modules["zeroengine"].__version__, "torch": str(torch.__version__)}


def storable(description: str, value: Any) -> Any:
    """Return a copy of `value` as a checkpoint gives it back, with tensors on the CPU: a reader may have no GPU.

    Args:
        description: What `value` is, for the message.
        value: What the user wants to save.

    Raises:
        CheckpointError: It holds objects that no checkpoint may.
    """
    try:
        # Writing and reading back is the strictest check: what cannot be loaded is refused now rather than after a
        # crash.
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{description} cannot be kept in a checkpoint: {str(error).splitlines()[0]}. It may hold tensors, "
            "numbers, strings, None, and lists, tuples and dicts of them: loading other objects would run code."
        ) from error
