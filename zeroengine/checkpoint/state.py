"""An engine's state as a snapshot to save, and back."""

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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..comm import Group
from ..config import Config
from ..errors import CheckpointError
from ..offload import aligned_empty
from ..optim import LossScaler, ShardedOptimizer, UnitStates
from ..optim.kept import KeptState, Keys
from ..partition import ShardSpan
from ..runtime import Unit
from . import dcp
from .entries import MODEL, OPTIMIZER, Entries, Entry, Inventory
from .progress import progress, releasing
from .store import Manifest

EXTRA = "zeroengine."  # objects that only zeroengine reads
SHOWN = 10  # of what is wrong


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds, as one rank sees it."""

    entries: Entries
    objects: dict[str, Any]  # by name, from this rank alone
    aliases: dict[str, str]
    about: dict[str, Any]  # the manifest's fields that the engine knows

    def copied(self) -> Snapshot:
        """With tensors of its own in CPU memory."""
        # One piece of memory in huge pages: most of the time of a copy into small ones is page faults.
        memory = aligned_empty(sum(_aligned(t.nbytes) for e in self.entries.values() for _, t in e.pieces), torch.uint8)
        end = 0
        entries = {}
        for name, entry in self.entries.items():
            pieces = []
            for box, tensor in entry.pieces:
                own = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                pieces.append((box, own.copy_(tensor.detach())))
                end += _aligned(tensor.nbytes)
            entries[name] = Entry(entry.shape, entry.dtype, pieces)
        return Snapshot(entries, self.objects, self.aliases, self.about)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def _aligned(nbytes: int) -> int:
    """To a multiple of every dtype's size."""
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class Trained:
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
    let_go: Callable[[], None] = lambda: None  # gives back the memory that using states on disk took

    @property
    def inventory(self) -> Inventory:
        return Inventory(self.module, self.units, self.optimizer, self.group.rank, self.group.world_size)

    @property
    def kept(self) -> KeptState:
        return KeptState(self.optimizer)

    @property
    def names(self) -> dict[nn.Parameter, str]:
        return {p: s.name for u in self.units for p, s in zip(u.params, u.layout.slots, strict=True)}


# -- out ------------------------------------------------------------------------------------------


def snapshot(trained: Trained, client_state: Any) -> Snapshot:
    """What a checkpoint of ``trained`` holds. Tensors are views: they must stay until it is saved.

    Raises:
        CheckpointError: ``client_state`` or the schedule holds objects that no checkpoint may.
    """
    inventory, rank = trained.inventory, trained.group.rank
    objects: dict[str, Any] = {f"{EXTRA}rank.{rank}": random_states(trained.group.device)}
    for name, stateful in trained.stateful.items():
        objects[_stateful(name, rank)] = storable(f"the state of {name!r}", stateful.state_dict())
    groups = param_groups(trained)
    if rank == 0:
        objects[f"{EXTRA}client_state"] = storable("client_state", client_state)
        if trained.lr_scheduler is not None:
            objects[f"{EXTRA}lr_scheduler"] = storable("the LR schedule", trained.lr_scheduler.state_dict())
        for i, group in enumerate(groups):
            objects |= {f"optimizer.param_groups.{i}.{key}": value for key, value in group.items()}
    counters = trained.counters()
    about = {
        "step": counters["global_steps"],
        "stage": trained.config.zero_optimization.stage,
        "world_size": trained.group.world_size,
        "precision": str(trained.config.low_precision or torch.float32).removeprefix("torch."),
        "optimizer": trained.kept.rule,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "counters": counters,
        "param_groups": json.loads(json.dumps(groups, default=str)),
        "loss_scaler": trained.scaler.state_dict() if trained.config.scales_loss else {},
        "config": trained.config.to_dict(),
    }
    entries = inventory.model(once=True) | inventory.optimizer(once=True)
    aliases = {MODEL + alias: MODEL + kept for alias, kept in inventory.aliases().items()}
    return Snapshot(entries, objects, aliases, about)


def _stateful(name: str, rank: int) -> str:
    return f"{EXTRA}stateful.{rank}.{name}"


def versions() -> dict[str, str]:
    """Of zeroengine and torch; a checkout that is not installed has none."""
    found = {}
    for name in ("zeroengine", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def param_groups(trained: Trained) -> list[dict[str, Any]]:
    """The optimizer's groups, with names for parameters."""
    names = trained.names
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[p] for p in group["params"]]}
        for group in trained.optimizer.param_groups
    ]


def storable(what: str, value: Any) -> Any:
    """A copy of ``value`` as a checkpoint gives it back.

    Raises:
        CheckpointError: it holds objects that no checkpoint may.
    """
    try:
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=True)
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


# -- in -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds beside what ``restore`` has put back."""

    client_state: Any
    counters: dict[str, int]  # none with weights_only
    stateful: dict[str, Any]  # by name, the states of the user's objects that are for this rank
    same_world: bool  # whether they were saved on as many ranks


def restore(trained: Trained, path: Path, manifest: Manifest | None, *, weights_only: bool, strict: bool) -> Restored:
    """Puts a checkpoint's state into ``trained``. A collective.

    Args:
        manifest: None where plain PyTorch wrote the checkpoint.
        weights_only: parameters and buffers alone.
        strict: every parameter must be in the checkpoint, and every one of its in the model.

    Raises:
        CheckpointError: on every rank, before anything is changed: it does not fit.
    """
    group, inventory = trained.group, trained.inventory
    with group.agreeing("to load a checkpoint"):
        metadata = dcp.read_metadata(path)
        model = inventory.model(once=False)
        naming = Naming(metadata, model, inventory.aliases())
        naming.check_model(path, strict=strict)
        entries = {naming.model[name]: entry for name, entry in model.items() if name in naming.model}
        prepared: list[tuple[UnitStates, ShardSpan, Keys]] = []
        if not weights_only:
            prepared = _plan_optimizer(trained, naming, manifest, path)
            if manifest is not None:
                _check_groups(trained, manifest, path)
        wanted = [f"{EXTRA}client_state"]
        same_world = manifest is not None and manifest.world_size == group.world_size
        mine = _stateful("", group.rank if same_world else 0)
        if not weights_only:
            wanted += [
                f"{EXTRA}lr_scheduler",
                *(name for name in metadata.state_dict_metadata if name.startswith(mine)),
            ]
            if same_world:
                wanted.append(f"{EXTRA}rank.{group.rank}")
        wanted = [name for name in wanted if name in metadata.state_dict_metadata]
    with group.agreeing("to load a checkpoint"):
        for states, span, like in prepared:
            if like:
                trained.kept.make(states, span, like)
            else:
                trained.kept.clear(states, span)
        state = {} if weights_only else inventory.optimizer(once=False)
        entries |= {naming.state[name]: entry for name, entry in state.items() if name in naming.state}
        total = sum(entry.nbytes for entry in entries.values())
        with progress(f"loading {path.name}", total, group.rank == 0) as report:
            objects = dcp.load(path, metadata, entries, wanted, releasing(report, trained.let_go))
        for states, span, like in prepared:
            name = OPTIMIZER + states.unit.layout.slots[span.slot].name
            numbers = {key: state[f"{name}.{key}"].pieces[0][1] for key, (_, is_number) in like.items() if is_number}
            if like:
                trained.kept.take_numbers(states, span, numbers)
    trained.republish()
    if weights_only:
        return Restored(objects.get(f"{EXTRA}client_state"), {}, {}, same_world)
    if manifest is not None:
        _set_groups(trained, manifest)
        if manifest.loss_scaler and trained.config.scales_loss:
            trained.scaler.load_state_dict(manifest.loss_scaler)
    if trained.lr_scheduler is not None and f"{EXTRA}lr_scheduler" in objects:
        trained.lr_scheduler.load_state_dict(objects[f"{EXTRA}lr_scheduler"])
    if f"{EXTRA}rank.{group.rank}" in objects:
        set_random_states(objects[f"{EXTRA}rank.{group.rank}"], group.device)
    steps = [int(max(states.steps, default=0)) for states in trained.optimizer.units]
    counters = manifest.counters if manifest is not None else {"global_steps": max(steps, default=0)}
    stateful = {name.removeprefix(mine): state for name, state in objects.items() if name.startswith(mine)}
    return Restored(objects.get(f"{EXTRA}client_state"), counters, stateful, same_world)


class Naming:
    """Our names, and those that a checkpoint has for the same things.

    Whoever wrote it may have put prefixes before parameter names and before ``state.``; and of a tied parameter it
    may hold another name than ours.

    Attributes:
        model, state: from the names of entries here to those in the checkpoint, where it has them.
    """

    def __init__(self, metadata: Metadata, model: Entries, aliases: Mapping[str, str]) -> None:
        self._entries = model
        self._there = {
            name: known
            for name, known in metadata.state_dict_metadata.items()
            if isinstance(known, TensorStorageMetadata)
        }
        params = [name.removeprefix(MODEL) for name in model]
        others: dict[str, list[str]] = {}
        for alias, kept in aliases.items():
            others.setdefault(kept, []).append(alias)
        prefix = _prefix(self._there, params)
        self.model: dict[str, str] = {}
        for param in params:
            names = [prefix + name for name in (param, *others.get(param, ()))]
            found = next((name for name in names if name in self._there), None)
            if found is not None:
                self.model[MODEL + param] = found
        known = {*self.model.values(), *(prefix + name for names in others.values() for name in names)}
        self.unknown = [
            name.removeprefix(prefix)
            for name in self._there
            if name.startswith(prefix) and name not in known and "state." not in name
        ]
        self.state: dict[str, str] = {}
        self.keys: dict[str, Keys] = {}  # what is kept of each parameter
        by_parameter = {name: param for param in params for name in (param, *others.get(param, ()))}
        for name, tensor in self._there.items():
            before, state, rest = name.partition("state.")
            param, _, key = rest.rpartition(".")
            if state and param in by_parameter and (not before or before.endswith(".")):
                ours = by_parameter[param]
                self.state[f"{OPTIMIZER}{ours}.{key}"] = name
                is_number = not tuple(tensor.size) and (key == "step" or bool(model[MODEL + ours].shape))
                self.keys.setdefault(ours, {})[key] = (tensor.properties.dtype, is_number)

    def check_model(self, path: Path, *, strict: bool) -> None:
        """Whether the checkpoint's model is this one.

        Raises:
            CheckpointError: shapes differ or, where ``strict``, names do: the first ten of how many.
        """
        problems = []
        for name, entry in self._entries.items():
            if name in self.model:
                shape = tuple(self._there[self.model[name]].size)
                if shape != entry.shape:
                    problems.append(f"{name.removeprefix(MODEL)} has shape {shape} there and {entry.shape} here")
            elif strict:
                problems.append(f"{name.removeprefix(MODEL)} is not in the checkpoint")
        if strict:
            problems += [f"{name} is not in the model" for name in self.unknown]
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            hint = " Pass strict=False to load what fits." if strict else ""
            raise CheckpointError(f"{path} is another model's: {'; '.join(problems[:SHOWN])}{more}.{hint}")


def _prefix(there: Mapping[str, Any], params: Sequence[str]) -> str:
    """What stands before most parameters' names."""
    counts: dict[str, int] = {}
    first = params[0]
    candidates = {name.removesuffix(first) for name in there if name.endswith(first)}
    for candidate in candidates:
        if not candidate or candidate.endswith("."):
            counts[candidate] = sum(candidate + param in there for param in params)
    return max(counts, key=lambda prefix: (counts[prefix], prefix == MODEL), default=MODEL)


def _plan_optimizer(
    trained: Trained, naming: Naming, manifest: Manifest | None, path: Path
) -> list[tuple[UnitStates, ShardSpan, Keys]]:
    """For each of this rank's spans: what the checkpoint keeps of its parameter."""
    saved = sorted({key for keys in naming.keys.values() for key in keys})
    expected = trained.kept.expected_keys()
    by_another = manifest is not None and expected is None and manifest.optimizer != trained.kept.rule
    if by_another or (expected is not None and not expected <= set(saved)):
        rule = manifest.optimizer if manifest is not None else "another optimizer"
        raise CheckpointError(
            f"{path} holds the state of {rule} ({', '.join(saved) or 'nothing'}), and the optimizer here is "
            f"{trained.kept.rule}. Use the same optimizer, or load with weights_only=True."
        )
    planned = []
    for states in trained.optimizer.units:
        unit = states.unit
        for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
            keys = naming.keys.get(unit.layout.slots[span.slot].name, {})
            if expected is not None and keys and not expected <= set(keys):
                raise CheckpointError(f"{path} lacks optimizer state of {unit.layout.slots[span.slot].name}")
            planned.append((states, span, keys))
    return planned


def _check_groups(trained: Trained, manifest: Manifest, path: Path) -> None:
    here = [sorted(group["params"]) for group in param_groups(trained)]
    there = [sorted(group["params"]) for group in manifest.param_groups]
    trainable = {slot.name for states in trained.optimizer.units for slot in states.unit.layout.slots}
    if [[p for p in group if p in trainable] for group in here] != [
        [p for p in group if p in trainable] for group in there
    ]:
        sizes = f"{[len(group) for group in there]} parameters there, {[len(group) for group in here]} here"
        raise CheckpointError(
            f"{path}: the optimizer's groups hold other parameters ({sizes}). Make the same groups, or load with "
            "weights_only=True."
        )


def _set_groups(trained: Trained, manifest: Manifest) -> None:
    """Hyperparameters are those of the checkpoint, as with ``torch.optim.Optimizer.load_state_dict``."""
    for group, saved in zip(trained.optimizer.param_groups, manifest.param_groups, strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
