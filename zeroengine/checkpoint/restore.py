"""A checkpoint's state back into an engine."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zeroengine.checkpoint import dcp_io
from zeroengine.checkpoint.dcp_metadata import EXTRA, METADATA
from zeroengine.checkpoint.directory import MANIFEST, Manifest
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntries
from zeroengine.checkpoint.snapshot import (
    SHOWN,
    EngineParts,
    param_groups,
    random_states,
    set_random_states,
    stateful_name,
)
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.optim.backends.interface import StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan
from zeroengine.utils.progress import progress, releasing

NEVER_NEGATIVE = {"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "momentum"}


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds beside what ``restore`` has put back."""

    client_state: Any
    counters: dict[str, int]  # none with weights_only
    stateful: dict[str, Any]  # by name, the states of the user's objects that are for this rank
    same_world: bool  # whether they were saved on as many ranks
    missing: list[str]  # parameters and buffers that it does not hold


def restore(parts: EngineParts, path: Path, manifest: Manifest | None, *, weights_only: bool, strict: bool) -> Restored:
    """Puts a checkpoint's state into ``parts``. A collective.

    Args:
        manifest: None where plain PyTorch wrote the checkpoint.
        weights_only: parameters and buffers alone.
        strict: every parameter must be in the checkpoint, and every one of its in the model.

    Raises:
        CheckpointError: on every rank, before anything is changed: it does not fit.
    """
    collective_errors = parts.group.collective_errors
    with collective_errors("to load a checkpoint"):
        plan = _plan(parts, path, manifest, weights_only=weights_only, strict=strict)
    with collective_errors("to load a checkpoint"):
        objects = dcp_io.load(path, plan.metadata, {}, plan.objects, lambda nbytes: None)
        if manifest is None:  # no checksum has told that all can be read
            _rehearse(parts, path, plan)
    undo: list[Callable[[], None]] = []
    try:
        with collective_errors("to load a checkpoint"), as_checkpoint_errors():
            if not weights_only:
                _remember(parts, undo)
                _take_over(parts, manifest, plan, objects)
        try:
            with collective_errors("to load a checkpoint"), as_checkpoint_errors():
                _read(parts, path, plan)
            with collective_errors("to load a checkpoint"), as_checkpoint_errors():
                parts.republish()
        except ZeroEngineError as error:
            raise HalfLoadedError(
                f"{error}. It could be read a moment ago, and part of the engine's states have been overwritten: load "
                "a checkpoint that is whole before training goes on."
            ) from error
    except BaseException:
        for action in reversed(undo):
            with contextlib.suppress(Exception):  # of a schedule of the caller's: what came first is what counts
                action()
        raise
    return _restored(parts, manifest, plan, objects)


class HalfLoadedError(CheckpointError):
    """A checkpoint that became unreadable while it was loaded."""


def _remember(parts: EngineParts, undo: list[Callable[[], None]]) -> None:
    """Fill ``undo`` with what puts hyperparameters, schedule, loss scale and random states back, the last one first."""
    random, scaler = random_states(parts.group.device), copy.deepcopy(parts.scaler.state_dict())
    groups = [dict(group) for group in parts.optimizer.param_groups]
    tensors = [
        (value, value.clone()) for group in groups for value in group.values() if isinstance(value, torch.Tensor)
    ]

    def put_groups_back() -> None:
        for group, before in zip(parts.optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        for value, before_value in tensors:
            value.copy_(before_value)

    undo.append(lambda: set_random_states(random, parts.group.device))
    undo.append(lambda: parts.scaler.load_state_dict(scaler))
    undo.append(put_groups_back)  # after the schedule, which may write rates
    scheduler = parts.lr_scheduler
    if hasattr(scheduler, "state_dict"):
        try:
            before = copy.deepcopy(scheduler.state_dict())
        except Exception:
            return  # it cannot be copied, and so not be put back
        undo.append(lambda: scheduler.load_state_dict(before))


@contextmanager
def as_checkpoint_errors() -> Iterator[None]:
    """Raise whatever comes, such as from a schedule of the caller's, as a CheckpointError."""
    try:
        yield
    except ZeroEngineError:
        raise
    except Exception as error:
        raise CheckpointError(f"the checkpoint's state cannot be taken over: {dcp_io.cause(error)}") from error


@dataclass(frozen=True)
class _Plan:
    """What is to be read of a checkpoint, and where to."""

    metadata: Metadata
    name_mapping: NameMapping
    model: StateEntries  # by their names in the checkpoint
    # For each of this rank's spans, the optimizer states that the checkpoint keeps.
    optimizer: list[tuple[OptimizerShard, ShardSpan, StateKeys]]
    objects: list[str]
    stateful: str  # what the names of the user's objects for this rank begin with
    same_world: bool
    weights_only: bool


def _plan(parts: EngineParts, path: Path, manifest: Manifest | None, *, weights_only: bool, strict: bool) -> _Plan:
    group, state_index = parts.group, parts.state_index
    metadata = dcp_io.read_metadata(path)
    if manifest is not None:
        unlisted = {METADATA, *dcp_io.files_of(metadata)} - manifest.files.keys()
        if unlisted:
            raise CheckpointError(f"{path} is damaged: its {MANIFEST} does not list {', '.join(sorted(unlisted)[:3])}")
    model = state_index.model(once=False)
    name_mapping = NameMapping(metadata, model, state_index.aliases())
    name_mapping.check_model(path, strict=strict)
    same_world = manifest is not None and manifest.world_size == group.world_size
    stateful = stateful_name("", group.rank if same_world else 0)
    optimizer: list[tuple[OptimizerShard, ShardSpan, StateKeys]] = []
    wanted = [f"{EXTRA}client_state"]
    if not weights_only:
        optimizer = _plan_optimizer(parts, name_mapping, manifest, path)
        if manifest is not None:
            _check_groups(parts, manifest, path)
        wanted.append(f"{EXTRA}lr_scheduler")
        wanted += [name for name in metadata.state_dict_metadata if name.startswith(stateful)]
        if same_world:
            wanted.append(f"{EXTRA}rank.{group.rank}")
    there = {name_mapping.model[name]: entry for name, entry in model.items() if name in name_mapping.model}
    objects = [name for name in wanted if name in metadata.state_dict_metadata]
    return _Plan(metadata, name_mapping, there, optimizer, objects, stateful, same_world, weights_only)


def _rehearse(parts: EngineParts, path: Path, plan: _Plan) -> None:
    """Read all that ``_read`` will, where that can be told already: what the optimizer keeps is made by it."""
    entries, total = _entries(plan, _optimizer_state(parts, plan))
    with progress(f"checking {path.name}", total, parts.group.rank == 0) as report:
        dcp_io.check_readable(path, plan.metadata, entries, releasing(report, parts.evict))


def _optimizer_state(parts: EngineParts, plan: _Plan) -> StateEntries:
    """Return what the optimizer keeps now, by its names here; nothing where the weights alone are loaded."""
    return {} if plan.weights_only else parts.state_index.optimizer(once=False)


def _entries(plan: _Plan, state: StateEntries) -> tuple[StateEntries, int]:
    """Return what is read, by its names in the checkpoint, and how many bytes these are."""
    entries = plan.model | {
        plan.name_mapping.state[name]: e for name, e in state.items() if name in plan.name_mapping.state
    }
    return entries, sum(entry.nbytes for entry in entries.values())


def _read(parts: EngineParts, path: Path, plan: _Plan) -> None:
    """Fills this rank's part of the state."""
    shard_state = parts.optimizer.shard_state
    for states, span, keys in plan.optimizer:
        if keys:
            shard_state.prepare(states, span, keys)
        else:
            shard_state.clear(states, span)
    state = _optimizer_state(parts, plan)
    entries, total = _entries(plan, state)
    with progress(f"loading {path.name}", total, parts.group.rank == 0) as report:
        dcp_io.load(path, plan.metadata, entries, (), releasing(report, parts.evict))
    for states, span, keys in plan.optimizer:
        name = OPTIMIZER + states.unit.layout.slots[span.param_index].name
        numbers = {key: state[f"{name}.{key}"].pieces[0][1] for key, (_, is_number) in keys.items() if is_number}
        if keys:
            shard_state.set_numbers(states, span, numbers)


def _take_over(parts: EngineParts, manifest: Manifest | None, plan: _Plan, objects: Mapping[str, Any]) -> None:
    """What is no tensor: hyperparameters, schedule, scaler, random states."""
    group = parts.group
    if plan.weights_only:
        return
    if manifest is not None:
        _set_groups(parts, manifest)
        if manifest.loss_scaler and parts.config.scales_loss:
            parts.scaler.load_state_dict(manifest.loss_scaler)
    if parts.lr_scheduler is not None and f"{EXTRA}lr_scheduler" in objects:
        parts.lr_scheduler.load_state_dict(objects[f"{EXTRA}lr_scheduler"])
    if f"{EXTRA}rank.{group.rank}" in objects:
        set_random_states(objects[f"{EXTRA}rank.{group.rank}"], group.device)


def _restored(parts: EngineParts, manifest: Manifest | None, plan: _Plan, objects: Mapping[str, Any]) -> Restored:
    client_state = objects.get(f"{EXTRA}client_state")
    if plan.weights_only:
        return Restored(client_state, {}, {}, plan.same_world, plan.name_mapping.missing)
    counters = manifest.counters if manifest is not None else {"global_steps": _largest_step_count(parts)}
    mine = plan.stateful
    stateful = {name.removeprefix(mine): state for name, state in objects.items() if name.startswith(mine)}
    return Restored(client_state, counters, stateful, plan.same_world, plan.name_mapping.missing)


def _largest_step_count(parts: EngineParts) -> int:
    """Return the largest step count of a parameter that this rank has part of."""
    state = parts.optimizer.shard_state
    numbers = (state.of(shard, span).numbers for shard in parts.optimizer.units for span in shard.spans())
    return max((int(number["step"]) for number in numbers if "step" in number), default=0)


class NameMapping:
    """Our names, and those that a checkpoint has for the same things.

    Whoever wrote it may have put prefixes before parameter names and before ``state.``; and of a tied parameter it
    may hold another name than ours.

    Attributes:
        model, state: from the names of entries here to those in the checkpoint, where it has them.
    """

    def __init__(self, metadata: Metadata, model: StateEntries, aliases: Mapping[str, str]) -> None:
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
        self.keys: dict[str, StateKeys] = {}  # what is kept of each parameter
        by_parameter = {name: param for param in params for name in (param, *others.get(param, ()))}
        for name, tensor in self._there.items():
            before, state, rest = name.partition("state.")
            param, _, key = rest.rpartition(".")
            if state and param in by_parameter and (not before or before.endswith(".")):
                ours = by_parameter[param]
                self.state[f"{OPTIMIZER}{ours}.{key}"] = name
                is_number = not tuple(tensor.size) and (key == "step" or bool(model[MODEL + ours].shape))
                self.keys.setdefault(ours, {})[key] = (tensor.properties.dtype, is_number)

    @property
    def missing(self) -> list[str]:
        """Parameters and buffers that the checkpoint does not hold."""
        return [
            name.removeprefix(MODEL)
            for name, entry in self._entries.items()
            if name not in self.model and 0 not in entry.shape
        ]

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
            elif strict and 0 not in entry.shape:
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
    parts: EngineParts, name_mapping: NameMapping, manifest: Manifest | None, path: Path
) -> list[tuple[OptimizerShard, ShardSpan, StateKeys]]:
    """For each of this rank's spans: what the checkpoint keeps of its parameter."""
    saved = sorted({key for keys in name_mapping.keys.values() for key in keys})
    expected = parts.optimizer.shard_state.keys
    by_another = manifest is not None and expected is None and manifest.optimizer != parts.optimizer.base_optimizer_name
    if by_another or (expected is not None and not expected <= set(saved)):
        rule = manifest.optimizer if manifest is not None else "another optimizer"
        raise CheckpointError(
            f"{path} holds the state of {rule} ({', '.join(saved) or 'nothing'}), and the optimizer here is "
            f"{parts.optimizer.base_optimizer_name}. Use the same optimizer, or load with weights_only=True."
        )
    planned = []
    for states in parts.optimizer.units:
        unit = states.unit
        for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
            keys = name_mapping.keys.get(unit.layout.slots[span.param_index].name, {})
            if expected is not None and keys and not expected <= set(keys):
                raise CheckpointError(f"{path} lacks optimizer state of {unit.layout.slots[span.param_index].name}")
            planned.append((states, span, keys))
    return planned


def _check_groups(parts: EngineParts, manifest: Manifest, path: Path) -> None:
    here = [sorted(group["params"]) for group in param_groups(parts)]
    there = [sorted(group["params"]) for group in manifest.param_groups]
    trainable = {slot.name for states in parts.optimizer.units for slot in states.unit.layout.slots}
    if [[p for p in group if p in trainable] for group in here] != [
        [p for p in group if p in trainable] for group in there
    ]:
        sizes = f"{[len(group) for group in there]} parameters there, {[len(group) for group in here]} here"
        raise CheckpointError(
            f"{path}: the optimizer's groups hold other parameters ({sizes}). Make the same groups, or load with "
            "weights_only=True."
        )
    for group, saved in zip(parts.optimizer.param_groups, manifest.param_groups, strict=True):
        for key, value in saved.items():
            if key != "params" and not _fits(key, value, group.get(key)):
                raise CheckpointError(
                    f"{path} is damaged: its {MANIFEST} has {value!r} for the optimizer's {key}, which is "
                    f"{group.get(key)!r} here"
                )


def _fits(key: str, saved: Any, present: Any) -> bool:
    """Return whether a well-known hyperparameter of a checkpoint can take the place of the present one."""
    if key == "betas" and isinstance(present, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(present) and all(map(_is_number, saved))
    if key in NEVER_NEGATIVE and (isinstance(present, (int, float)) or _is_scalar(present)):
        return _is_number(saved) and saved >= 0
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _set_groups(parts: EngineParts, manifest: Manifest) -> None:
    """Hyperparameters are those of the checkpoint, as with ``torch.optim.Optimizer.load_state_dict``."""
    for group, saved in zip(parts.optimizer.param_groups, manifest.param_groups, strict=True):
        for key, value in saved.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and key != "params":
                present.copy_(torch.as_tensor(value))
            elif key != "params":
                group[key] = tuple(value) if isinstance(present, tuple) else value
