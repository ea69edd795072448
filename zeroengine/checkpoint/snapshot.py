"""An engine's state as a snapshot to save."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint.dcp_metadata import EXTRA
from zeroengine.checkpoint.entries import MODEL, StateEntries, StateEntry, StateIndex
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import CheckpointError
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.runtime.unit import Unit

SHOWN = 10  # of what is wrong


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds, as one rank sees it."""

    entries: StateEntries
    objects: dict[str, Any]  # by name, from this rank alone
    aliases: dict[str, str]
    about: dict[str, Any]  # the manifest's fields that the engine knows

    def copied(self, memory: torch.Tensor) -> Snapshot:
        """With tensors of its own in ``memory``: bytes in CPU memory, at least ``copy_bytes`` of them."""
        end = 0
        entries = {}
        for name, entry in self.entries.items():
            pieces = []
            for box, tensor in entry.pieces:
                own = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                pieces.append((box, own.copy_(tensor.detach())))
                end += _aligned(tensor.nbytes)
            entries[name] = StateEntry(entry.shape, entry.dtype, pieces)
        return Snapshot(entries, self.objects, self.aliases, self.about)

    @property
    def copy_bytes(self) -> int:
        return sum(_aligned(tensor.nbytes) for entry in self.entries.values() for _, tensor in entry.pieces)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def _aligned(nbytes: int) -> int:
    """To a multiple of every dtype's size."""
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that have state, and what they need to be put back."""

    module: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    lr_scheduler: Any
    scaler: LossScaler
    config: Config
    group: Group
    counters: Callable[[], dict[str, int]]
    republish: Callable[[], None]  # masters were written: everybody computes with their values from now on
    stateful: Mapping[str, Any]  # the user's own, by name
    on_disk: bool = False  # whether any state is
    evict: Callable[[], None] = lambda: None  # gives back the memory that using states on disk took

    @property
    def state_index(self) -> StateIndex:
        return StateIndex(self.module, self.units, self.optimizer, self.group.rank, self.group.world_size)

    @property
    def names(self) -> dict[nn.Parameter, str]:
        return {p: s.name for u in self.units for p, s in zip(u.params, u.layout.slots, strict=True)}


def snapshot(parts: EngineParts, client_state: Any) -> Snapshot:
    """What a checkpoint of ``parts`` holds. Tensors are views: they must stay until it is saved.

    Raises:
        CheckpointError: ``client_state`` or the schedule holds objects that no checkpoint may.
    """
    state_index, rank = parts.state_index, parts.group.rank
    objects: dict[str, Any] = {f"{EXTRA}rank.{rank}": random_states(parts.group.device)}
    for name, stateful in parts.stateful.items():
        objects[stateful_name(name, rank)] = storable(f"the state of {name!r}", stateful.state_dict())
    groups = param_groups(parts)
    if rank == 0:
        objects[f"{EXTRA}client_state"] = storable("client_state", client_state)
        if parts.lr_scheduler is not None:
            objects[f"{EXTRA}lr_scheduler"] = storable("the LR schedule", parts.lr_scheduler.state_dict())
        for i, group in enumerate(groups):
            objects |= {f"optimizer.param_groups.{i}.{key}": value for key, value in group.items()}
    counters = parts.counters()
    about = {
        "step": counters["global_steps"],
        "stage": parts.config.zero_optimization.stage,
        "world_size": parts.group.world_size,
        "precision": str(parts.config.low_precision or torch.float32).removeprefix("torch."),
        "optimizer": parts.optimizer.base_optimizer_name,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "counters": counters,
        "param_groups": json.loads(json.dumps(groups, default=_as_number)),
        "loss_scaler": parts.scaler.state_dict() if parts.config.scales_loss else {},
        "config": parts.config.to_dict(),
    }
    entries = state_index.model(once=True) | state_index.optimizer(once=True)
    aliases = {MODEL + alias: MODEL + kept for alias, kept in state_index.aliases().items()}
    return Snapshot(entries, objects, aliases, about)


def _as_number(value: Any) -> Any:
    """A tensor, such as a learning rate that a captured step reads, or a number of NumPy's as plain numbers."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def stateful_name(name: str, rank: int) -> str:
    return f"{EXTRA}stateful.{rank}.{name}"


def versions() -> dict[str, str]:
    """Of zeroengine and torch; a checkout that is not installed has none."""
    found = {}
    for name in ("zeroengine", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def param_groups(parts: EngineParts) -> list[dict[str, Any]]:
    """The optimizer's groups, with names for parameters."""
    names = parts.names
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[p] for p in group["params"]]}
        for group in parts.optimizer.param_groups
    ]


def storable(what: str, value: Any) -> Any:
    """A copy of ``value`` as a checkpoint gives it back, with tensors on the CPU: another machine may have no GPU.

    Raises:
        CheckpointError: it holds objects that no checkpoint may.
    """
    try:
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be kept in a checkpoint: {str(error).splitlines()[0]}. It may hold tensors, numbers, "
            "strings, None, and lists, tuples and dicts of them: loading other objects would run code."
        ) from error


def random_states(device: torch.device) -> dict[str, Any]:
    """This process's random generators: Python's, NumPy's where it is imported, torch's."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
