"""Put a checkpoint's state back into an engine.

[Note: All or nothing]
A load must not leave an engine with half of a checkpoint. So `restore` plans first, on all ranks, and checks that
everything in the plan fits and can be read; only then it changes anything. Small state (hyperparameters, schedule, loss
scale, random generators) comes first, since it can be put back when a later step fails. Tensors come last: they are
too large to be copied beforehand, so that a failure while they are read leaves the engine half loaded, and the error
says so (`HalfLoadedError`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.content import random_states, set_random_states
from zeroengine.checkpoint.dcp_load import load_files
from zeroengine.checkpoint.dcp_metadata import ZEROENGINE_PREFIX, OpenFile, open_local
from zeroengine.checkpoint.engine_state import EngineState, EngineTensors
from zeroengine.checkpoint.entries import OPTIMIZER, SCALES, StateEntries
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.load_plan import LoadOptions, LoadPlan, make_plan
from zeroengine.checkpoint.manifest import Manifest
from zeroengine.checkpoint.moment_conversion import moments_to_convert
from zeroengine.checkpoint.param_groups import apply_param_groups
from zeroengine.checkpoint.unused_states import UnusedStates
from zeroengine.comm.group import Group
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.optim.backends.interface import StateKeys
from zeroengine.optim.lr_schedules import load_schedule_state
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.layout import ShardSpan
from zeroengine.utils.formats import listed
from zeroengine.utils.progress import evicting, ignore_progress, progress

log = logging.getLogger("zeroengine")

# The keys that a warning names.
NUM_SHOWN = 3


class HalfLoadedError(CheckpointError):
    """A load failed after it had overwritten some states: they are partly those of the checkpoint."""


@dataclass(frozen=True)
class RestoreResult:
    """The rest of a checkpoint, which `restore` has not put back itself.

    Attributes:
        client_state: What the user passed to the save.
        counters: The engine's step counters; empty where weights alone were loaded.
        stateful: By name, the states of the user's registered objects that are for this rank.
        same_world: Whether they were saved on as many ranks.
        missing: The parameters and buffers that the checkpoint does not hold.
        unused: The states that it holds and this run does not use; None where weights alone were loaded.
    """

    client_state: Any
    counters: dict[str, int]
    stateful: dict[str, Any]
    same_world: bool
    missing: list[str]
    unused: UnusedStates | None


def restore(
    engine: EngineState, path: Path, manifest: Manifest | None, options: LoadOptions, open_file: OpenFile = open_local
) -> RestoreResult:
    """Put a checkpoint's state into the engine. A collective. See "All or nothing".

    Args:
        engine: The engine's state.
        path: The checkpoint's directory.
        manifest: Its manifest; None where plain PyTorch wrote the checkpoint.
        options: What to take from it.
        open_file: As of `read_metadata`.

    Raises:
        CheckpointError: On every rank, before anything is changed; the checkpoint does not fit or cannot be read.
        HalfLoadedError: On every rank; it became unreadable while tensors were written.
    """
    tensors, group = engine.tensors, engine.tensors.group
    # All planning and all objects, which are small, are done with on every rank before any change: a checkpoint that
    # does not fit or cannot be read changes nothing.
    with group.collective_errors("to load a checkpoint"), as_checkpoint_errors(f"{path} cannot be loaded"):
        plan = make_plan(engine, path, manifest, options, open_file)
        objects = load_files(path, plan.names.metadata, {}, plan.objects, ignore_progress)
        # Without checksums, nothing but reading can tell whether the tensors can be read, as far as the optimizer has
        # memory for its state already.
        if manifest is None:
            _load_entries(engine, path, plan, options, check_only=True)
    # From here on states change. Whatever is raised below, also a keyboard interrupt, puts the small state back.
    with contextlib.ExitStack() as restore_on_error:
        with loading_errors(group):
            if not options.weights_only:
                # All is recorded before the first change, so that a failure halfway through the changes is undone as
                # well.
                _put_small_state_back(engine, restore_on_error)
                _apply_objects(engine, manifest, plan, objects)
        try:
            with loading_errors(group):
                num_steps = 0 if manifest is None else manifest.counters["global_steps"]
                _read_tensors(engine, path, plan, options, num_steps)
            # All ranks have written their masters before any rank gathers parameters.
            with loading_errors(group):
                engine.master_weights.publish()
                tensors.restart_averages(plan.restarted)
            with loading_errors(group):
                _load_by_own_code(tensors, path, plan, objects, is_whole=manifest is None or not manifest.left_out)
        # The small state is put back, but the tensors cannot be. The class of the error says so.
        except ZeroEngineError as error:
            raise HalfLoadedError(
                f"{error}. It could be read a moment ago, and part of the engine's states have been overwritten: load "
                "a checkpoint that is whole before training goes on."
            ) from error
        restore_on_error.pop_all()
    counters: dict[str, int] = {}
    stateful: dict[str, Any] = {}
    if not options.weights_only:
        counters = engine.counters if manifest is None else manifest.counters
        # Plain PyTorch saves no counters. The step count of the optimizer is the closest that there is.
        if manifest is None and options.optimizer:
            has_steps = any("step" in keys for keys in plan.names.state_keys.values())
            counters = {"global_steps": _largest_step_count(tensors.optimizer) if has_steps else 0}
        prefix = plan.stateful_prefix
        stateful = {name.removeprefix(prefix): state for name, state in objects.items() if name.startswith(prefix)}
    client_state = objects.get(f"{ZEROENGINE_PREFIX}client_state")
    return RestoreResult(client_state, counters, stateful, plan.same_world, plan.names.model.missing, plan.unused)


def _put_small_state_back(engine: EngineState, stack: contextlib.ExitStack) -> None:
    """Let the end of `stack` put the small state back as it is now."""
    optimizer, device = engine.tensors.optimizer, engine.tensors.group.device
    stack.callback(set_random_states, random_states(device), device)
    # deepcopy is needed, as the state dict may refer to what a load changes in place.
    stack.callback(engine.scaler.load_state_dict, copy.deepcopy(engine.scaler.state_dict()))
    # A shallow copy of each group keeps references to tensors, whose values are copied separately.
    groups = [dict(group) for group in optimizer.param_groups]
    values = [value for group in groups for value in group.values() if isinstance(value, torch.Tensor)]
    for value in values:
        stack.callback(value.copy_, value.clone())
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        stack.callback(group.update, saved_group)
        # Keys that the load added have to go, so the group is emptied first.
        stack.callback(group.clear)
    # The stack runs in reverse order. So the groups are put back after the schedule, which may write learning rates.
    schedule = engine.schedule
    # A state that cannot be copied cannot be put back.
    with contextlib.suppress(Exception):
        stack.callback(_load_quietly, schedule, copy.deepcopy(schedule.state_dict()))


def _load_quietly(schedule: Any, state: Any) -> None:
    # The caller's schedule may fail here as well. The first error is the one to report.
    with contextlib.suppress(Exception):
        schedule.load_state_dict(state)


@contextlib.contextmanager
def loading_errors(group: Group) -> Iterator[None]:
    """Make any error within, such as one of the caller's schedule, a CheckpointError of all ranks."""
    with (
        group.collective_errors("to load a checkpoint"),
        as_checkpoint_errors("the checkpoint's state cannot be taken over"),
    ):
        yield


def _read_tensors(engine: EngineState, path: Path, plan: LoadPlan, options: LoadOptions, num_steps: int) -> None:
    """Read this rank's boxes of all tensors. Parameters without stored steps have been updated `num_steps` times."""
    # The optimizer's state needs the checkpoint's keys first. Only then is there memory to read into.
    optimizer, outer_step = engine.tensors.optimizer, engine.tensors.outer_step
    for shard, span, keys in plan.optimizer:
        if keys:
            optimizer.state_of(shard).create(shard, span, keys)
        else:
            # A parameter that had no state at the save must start without one, as it did in the saved run.
            optimizer.state_of(shard).clear(shard, span)
    # Momentum that is not read restarts from zero.
    if not options.weights_only and outer_step is not None:
        outer_step.clear_momentum()
    state = _load_entries(engine, path, plan, options)
    # Numbers such as the step were read into copies, which the optimizer takes over here.
    for shard, span, keys in plan.optimizer:
        name = OPTIMIZER + shard.unit.layout.slots[span.param_index].name
        numbers = {key: state[f"{name}.{key}"].pieces[0][1] for key, (_, shape) in keys.items() if shape is not None}
        shard_state = optimizer.state_of(shard)
        if "step" not in numbers and shard_state.keys(shard) is not None:
            # A parameter with moments has been updated, and a first step would be another rule.
            numbers["step"] = torch.tensor(float(max(num_steps, 1)), device="cpu")
        if keys:
            shard_state.set_numbers(shard, span, numbers)
    if not options.weights_only:
        _set_steps_without_elements(optimizer, plan.names.state_keys if options.optimizer else {}, num_steps)


def _set_steps_without_elements(
    optimizer: ShardedOptimizer, state_keys: Mapping[str, StateKeys], num_steps: int
) -> None:
    """Set the step counts that this rank keeps of parameters of which it has no elements, and so reads nothing.

    They count the steps of the run, or none where the checkpoint has no state of the parameter.
    """
    for shard in optimizer.shards:
        state = optimizer.state_of(shard)
        if state.keys(shard) is None:
            continue
        with_elements = {span.param_index for span in state.spans(shard)}
        for index, slot in enumerate(shard.unit.layout.slots):
            if index not in with_elements:
                steps = float(num_steps if state_keys.get(slot.name) else 0)
                state.set_numbers(shard, ShardSpan(index, 0, 0, 0), {"step": torch.tensor(steps, device="cpu")})


def _load_entries(
    engine: EngineState, path: Path, plan: LoadPlan, options: LoadOptions, *, check_only: bool = False
) -> StateEntries:
    """Read the tensors, or check that they can be read. Return the entries of the optimizer's present state."""
    state = engine.tensors.optimizer_entries(once=False) if options.reads_optimizer else {}
    # Entries without a stored name keep their values. A load that is not strict allows this.
    stored_names, metadata = plan.names.state_names, plan.names.metadata
    present = {name: entry for name, entry in state.items() if name in stored_names}
    converted = {n for n in present if (n + SCALES in state) != (stored_names[n] + SCALES in metadata.tensors)}
    entries = plan.entries | {stored_names[n]: entry for n, entry in present.items() if n not in converted}
    total = sum(entry.nbytes for entry in [*entries.values(), *(present[name] for name in converted)])
    # Progress is shown once. Each rank reads about as much, so rank 0 stands for all.
    action = f"{'checking' if check_only else 'loading'} {path.name}"
    with progress(action, total, engine.tensors.group.rank == 0) as report:
        report = evicting(report, engine.placement.evict)
        load_files(path, metadata, entries, (), report, check_only=check_only)
        for shard in engine.tensors.optimizer.shards if converted else ():
            moments = moments_to_convert(engine.tensors.optimizer.state_of(shard), shard, plan.names, converted)
            buffers = {stored: entry for moment in moments for stored, entry in moment.buffers.items()}
            load_files(path, metadata, buffers, (), ignore_progress, check_only=check_only)
            for moment in moments if not check_only else ():
                moment.write()
                report(moment.nbytes)
    return state


def _load_by_own_code(
    tensors: EngineTensors, path: Path, plan: LoadPlan, objects: Mapping[str, Any], *, is_whole: bool
) -> None:
    """Let the model's own ``load_state_dict()`` take what is no parameter or buffer, such as extra state."""
    names, prefix = plan.saved_names, plan.names.model.prefix
    values = {key: objects[prefix + key] for key in names.computed if prefix + key in objects}
    values |= {key: plan.entries[prefix + key].pieces[0][1] for key in names.computed if prefix + key in plan.entries}
    missing = [key for key in names.computed if key not in values]
    # A checkpoint without frozen parameters has none of these values either.
    if missing and is_whole and tensors.group.rank == 0:
        log.warning("%s has no %s, which stays as it is", path, listed(missing, NUM_SHOWN))
    tensors.load_by_own_code(names, values, str(path))


def _apply_objects(engine: EngineState, manifest: Manifest | None, plan: LoadPlan, objects: Mapping[str, Any]) -> None:
    """Put hyperparameters, schedule, loss scale and random generators back."""
    if manifest is not None:
        apply_param_groups(engine.tensors, manifest, plan.group_keys)
        # The scale of an fp16 run means nothing in other precisions.
        if manifest.loss_scaler and engine.config.scales_loss:
            engine.scaler.load_state_dict(manifest.loss_scaler)
    group = engine.tensors.group
    schedule, random = f"{ZEROENGINE_PREFIX}lr_scheduler", f"{ZEROENGINE_PREFIX}rank.{group.rank}"
    if engine.schedule is not None and schedule in objects:
        # The schedule comes after the groups, because some schedules write learning rates when they are loaded.
        load_schedule_state(engine.schedule, objects[schedule])
    if random in objects:
        set_random_states(objects[random], group.device)


def _largest_step_count(optimizer: ShardedOptimizer) -> int:
    """Return the largest step count of a parameter that this rank has part of."""
    states = ((shard, optimizer.state_of(shard)) for shard in optimizer.shards)
    numbers = (state.of(shard, span).numbers for shard, state in states for span in state.spans(shard))
    return max((int(number["step"]) for number in numbers if "step" in number), default=0)
