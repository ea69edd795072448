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
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts
from zeroengine.checkpoint.dcp_load import load_files
from zeroengine.checkpoint.dcp_metadata import METADATA, ZEROENGINE_PREFIX, DcpMetadata, read_metadata
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntries
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.checkpoint.name_mapping import CheckpointNames, NameMatch
from zeroengine.checkpoint.snapshot import named_param_groups, random_states, set_random_states, stateful_name
from zeroengine.comm.group import Group
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.optim.backends.interface import StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.cut import plain_name
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.named_tensors import named_state
from zeroengine.utils.listed import listed
from zeroengine.utils.progress import evicting, ignore_progress, progress

# A negative value of these can only be damage, and it would ruin the training without an error.
NEVER_NEGATIVE = {"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "momentum"}
# The hyperparameters that an LR schedule writes and reads.
LEARNING_RATES = ("lr", "initial_lr")
# The parameters that an error names.
NUM_SHOWN = 5


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
    """

    client_state: Any
    counters: dict[str, int]
    stateful: dict[str, Any]
    same_world: bool
    missing: list[str]


def restore(
    parts: CheckpointedParts,
    path: Path,
    manifest: Manifest | None,
    *,
    weights_only: bool,
    optimizer: bool,
    strict: bool,
) -> RestoreResult:
    """Put a checkpoint's state into the engine. A collective. See "All or nothing".

    Args:
        parts: The engine.
        path: The checkpoint's directory.
        manifest: Its manifest; None where plain PyTorch wrote the checkpoint.
        weights_only: Load parameters and buffers alone.
        optimizer: Load the optimizer's state and hyperparameters, too; otherwise its state starts anew.
        strict: Checkpoint and model must have the same parameters.

    Raises:
        CheckpointError: On every rank, before anything is changed; the checkpoint does not fit or cannot be read.
        HalfLoadedError: On every rank; it became unreadable while tensors were written.
    """
    # All planning and all objects, which are small, are done with on every rank before any change: a checkpoint that
    # does not fit or cannot be read changes nothing.
    with parts.group.collective_errors("to load a checkpoint"):
        plan = _make_plan(parts, path, manifest, weights_only=weights_only, optimizer=optimizer, strict=strict)
        objects = load_files(path, plan.metadata, {}, plan.objects, ignore_progress)
        # Without checksums, nothing but reading can tell whether the tensors can be read, as far as the optimizer has
        # memory for its state already.
        if manifest is None:
            _load_entries(parts, path, plan, check_only=True)
    undo: list[Callable[[], None]] = []
    # From here on states change. Every exit below either completes the load or runs the undo actions.
    try:
        with loading_errors(parts.group):
            if not weights_only:
                # The undo actions exist before the first change, so that a failure halfway through the changes is
                # undone as well.
                _record_undo(parts, undo)
                _apply_objects(parts, manifest, plan, objects)
        try:
            with loading_errors(parts.group):
                _read_tensors(parts, path, plan)
            # All ranks have written their masters before any rank gathers parameters.
            with loading_errors(parts.group):
                parts.republish()
        # The small state is put back below, but the tensors cannot be. The class of the error says so.
        except ZeroEngineError as error:
            raise HalfLoadedError(
                f"{error}. It could be read a moment ago, and part of the engine's states have been overwritten: load "
                "a checkpoint that is whole before training goes on."
            ) from error
    # A keyboard interrupt must leave the small state consistent, too.
    except BaseException:
        for action in reversed(undo):
            # The caller's schedule may fail here as well. The first error is the one to report.
            with contextlib.suppress(Exception):
                action()
        raise
    client_state, missing = objects.get(f"{ZEROENGINE_PREFIX}client_state"), plan.names.model.missing
    if weights_only:
        return RestoreResult(client_state, {}, {}, plan.same_world, missing)
    counters = parts.counters() if manifest is None else manifest.counters
    # Plain PyTorch saves no counters. The step count of the optimizer is the closest that there is.
    if manifest is None and optimizer:
        counters = {"global_steps": _largest_step_count(parts)}
    prefix = plan.stateful_prefix
    stateful = {name.removeprefix(prefix): state for name, state in objects.items() if name.startswith(prefix)}
    return RestoreResult(client_state, counters, stateful, plan.same_world, missing)


def _record_undo(parts: CheckpointedParts, undo: list[Callable[[], None]]) -> None:
    """Fill `undo` with actions that put the small state back, to be called from the last to the first."""
    # deepcopy is needed, as the state dict may refer to what a load changes in place.
    random, scaler = random_states(parts.group.device), copy.deepcopy(parts.scaler.state_dict())
    # A shallow copy of each group keeps references to tensors, whose values are copied separately.
    groups = [dict(group) for group in parts.optimizer.param_groups]
    tensors = [
        (value, value.clone()) for group in groups for value in group.values() if isinstance(value, torch.Tensor)
    ]

    def restore_groups() -> None:
        for group, saved_group in zip(parts.optimizer.param_groups, groups, strict=True):
            # Keys that the load added have to go, so the group is emptied first.
            group.clear()
            group.update(saved_group)
        for value, saved_value in tensors:
            value.copy_(saved_value)

    undo.append(lambda: set_random_states(random, parts.group.device))
    undo.append(lambda: parts.scaler.load_state_dict(scaler))
    # The actions run in reverse order. So the groups are put back after the schedule, which may write learning rates.
    undo.append(restore_groups)
    scheduler = parts.lr_scheduler()
    if hasattr(scheduler, "state_dict"):
        try:
            schedule = copy.deepcopy(scheduler.state_dict())
        except Exception:
            # A state that cannot be copied cannot be put back.
            return
        undo.append(lambda: scheduler.load_state_dict(schedule))


@contextmanager
def loading_errors(group: Group) -> Iterator[None]:
    """Make any error within, such as one of the caller's schedule, a CheckpointError of all ranks."""
    with (
        group.collective_errors("to load a checkpoint"),
        as_checkpoint_errors("the checkpoint's state cannot be taken over"),
    ):
        yield


@dataclass(frozen=True)
class _LoadPlan:
    """The values to read from a checkpoint, and the tensors that take them.

    Attributes:
        model: The parameters and buffers, by their names in the checkpoint.
        optimizer: For each of this rank's spans, the keys that the checkpoint has of its state.
        objects: The names of the objects to read.
        stateful_prefix: Begins the names of the registered objects' states that are for this rank.
        reads_optimizer: Whether the optimizer's state is read; otherwise spans without keys start theirs anew.
        group_keys: The hyperparameters to take over; None takes all.
    """

    metadata: DcpMetadata
    names: CheckpointNames
    model: StateEntries
    optimizer: list[tuple[OptimizerShard, ShardSpan, StateKeys]]
    objects: list[str]
    stateful_prefix: str
    same_world: bool
    reads_optimizer: bool
    group_keys: Collection[str] | None


def _make_plan(
    parts: CheckpointedParts,
    path: Path,
    manifest: Manifest | None,
    *,
    weights_only: bool,
    optimizer: bool,
    strict: bool,
) -> _LoadPlan:
    """Return what is to be read.

    Raises:
        CheckpointError: The checkpoint does not fit the engine.
    """
    group = parts.group
    metadata = read_metadata(path)
    if manifest is not None:
        # Checksums cover only the files that the manifest lists. A file that it does not list has never been checked.
        unlisted = {METADATA, *metadata.items} - manifest.files.keys()
        if unlisted:
            raise CheckpointError(f"{path} is damaged: its {MANIFEST} does not list {', '.join(sorted(unlisted)[:3])}")
    # A load fills every element that this rank holds, also the copies that another rank saved.
    model = parts.model_entries(once=False)
    names = CheckpointNames(metadata, model, parts.aliases())
    match = names.model
    if strict and manifest is not None and manifest.left_out:
        match = _without_left_out(parts, match, manifest.left_out, path)
    # Without `strict` a checkpoint may hold the optimizer's state alone.
    if match.stored_names or strict:
        match.check(str(path), strict=strict)
    same_world = manifest is not None and manifest.world_size == group.world_size
    # On another number of ranks no state belongs to this rank in particular, so every rank gets the one that rank 0
    # saved.
    stateful_prefix = stateful_name("", group.rank if same_world else 0)
    spans: list[tuple[OptimizerShard, ShardSpan, StateKeys]] = []
    wanted, schedule = [f"{ZEROENGINE_PREFIX}client_state"], f"{ZEROENGINE_PREFIX}lr_scheduler"
    group_keys: Collection[str] | None = None
    if not weights_only:
        if optimizer:
            spans = _plan_optimizer(parts, names, manifest, path)
        else:
            spans = [(shard, span, {}) for shard in parts.optimizer.shards for span in shard.spans()]
            # Many schedules compute a learning rate from the one before, so the rates come with the schedule.
            loads_schedule = parts.lr_scheduler() is not None and schedule in metadata.objects
            group_keys = LEARNING_RATES if loads_schedule else ()
        if manifest is not None:
            _check_param_groups(parts, manifest, path, group_keys)
        wanted.append(schedule)
        wanted += [name for name in metadata.objects if name.startswith(stateful_prefix)]
        # The generators of each rank go on only where each rank finds its own. A changed number of ranks starts new
        # ones.
        if same_world:
            wanted.append(f"{ZEROENGINE_PREFIX}rank.{group.rank}")
    stored_model = {stored: model[MODEL + name] for name, stored in names.model.stored_names.items()}
    # Older or foreign checkpoints lack some objects, and the engine then keeps what it has.
    objects = [name for name in wanted if name in metadata.objects]
    reads_optimizer = optimizer and not weights_only
    return _LoadPlan(
        metadata, names, stored_model, spans, objects, stateful_prefix, same_world, reads_optimizer, group_keys
    )


def _without_left_out(parts: CheckpointedParts, match: NameMatch, left_out: Sequence[str], path: Path) -> NameMatch:
    """Return a match that expects no value of the frozen parameters which the save left out.

    Args:
        parts: The engine.
        match: Of the names in the checkpoint with those of the model.
        left_out: The names that the save left out.
        path: The checkpoint's directory.

    Raises:
        CheckpointError: Such a parameter is trained here, or has no values that it could keep.
    """
    absent = set(left_out).intersection(match.missing)
    trainable = {slot.name for shard in parts.optimizer.shards for slot in shard.unit.layout.slots}
    unset = {name for unit in parts.units for name in unit.unset_params}
    for names, state, advice in (
        (trainable, "are trained here", "Load them first, then this checkpoint with strict=False; or freeze them"),
        (unset, "have no values here", "Load them first, such as by engine.load_weights(base, strict=False)"),
    ):
        if problems := sorted(absent & names):
            raise CheckpointError(
                f"{path} was saved with frozen=False, without parameters that {state}: "
                f"{listed(problems, NUM_SHOWN)}. {advice}."
            )
    own_names = {plain_name(name) for name, _ in named_state(parts.module)}
    return replace(
        match,
        missing=[name for name in match.missing if name not in absent],
        unexpected=match.unexpected + [name for name in left_out if name not in own_names],
    )


def _plan_optimizer(
    parts: CheckpointedParts, names: CheckpointNames, manifest: Manifest | None, path: Path
) -> list[tuple[OptimizerShard, ShardSpan, StateKeys]]:
    """Return the keys that the checkpoint has of each of this rank's spans."""
    saved = sorted({key for keys in names.state_keys.values() for key in keys})
    expected = parts.optimizer.shard_state.keys
    # Without known keys the name of the rule is the only sign of another optimizer.
    by_another = manifest is not None and expected is None and manifest.optimizer != parts.optimizer.base_optimizer_name
    if by_another or (expected is not None and not expected <= set(saved)):
        rule = manifest.optimizer if manifest is not None else "another optimizer"
        raise CheckpointError(
            f"{path} holds the state of {rule} ({', '.join(saved) or 'nothing'}), and the optimizer here is "
            f"{parts.optimizer.base_optimizer_name}. Use the same optimizer, or load with weights_only=True."
        )
    planned = []
    for shard in parts.optimizer.shards:
        for span in shard.spans():
            name = shard.unit.layout.slots[span.param_index].name
            keys = names.state_keys.get(name, {})
            # A parameter without any state has never been updated, which is legitimate. A part of its state is damage.
            if expected is not None and keys and not expected <= set(keys):
                raise CheckpointError(f"{path} lacks optimizer state of {name}")
            planned.append((shard, span, keys))
    return planned


def _read_tensors(parts: CheckpointedParts, path: Path, plan: _LoadPlan) -> None:
    """Read this rank's boxes of all tensors."""
    # The optimizer's state needs the checkpoint's keys first. Only then is there memory to read into.
    shard_state = parts.optimizer.shard_state
    for shard, span, keys in plan.optimizer:
        if keys:
            shard_state.create(shard, span, keys)
        else:
            # A parameter that had no state at the save must start without one, as it did in the saved run.
            shard_state.clear(shard, span)
    state = _load_entries(parts, path, plan)
    # Numbers such as the step were read into copies, which the optimizer takes over here.
    for shard, span, keys in plan.optimizer:
        name = OPTIMIZER + shard.unit.layout.slots[span.param_index].name
        numbers = {key: state[f"{name}.{key}"].pieces[0][1] for key, (_, is_number) in keys.items() if is_number}
        if keys:
            shard_state.set_numbers(shard, span, numbers)


def _load_entries(parts: CheckpointedParts, path: Path, plan: _LoadPlan, *, check_only: bool = False) -> StateEntries:
    """Read the tensors, or check that they can be read. Return the entries of the optimizer's present state."""
    state = parts.optimizer_entries(once=False) if plan.reads_optimizer else {}
    # Entries without a stored name keep their values. A load that is not strict allows this.
    stored_names = plan.names.state_names
    entries = plan.model | {stored_names[name]: entry for name, entry in state.items() if name in stored_names}
    total = sum(entry.nbytes for entry in entries.values())
    # Progress is shown once. Each rank reads about as much, so rank 0 stands for all.
    with progress(f"{'checking' if check_only else 'loading'} {path.name}", total, parts.group.rank == 0) as report:
        load_files(path, plan.metadata, entries, (), evicting(report, parts.evict), check_only=check_only)
    return state


def _apply_objects(
    parts: CheckpointedParts, manifest: Manifest | None, plan: _LoadPlan, objects: Mapping[str, Any]
) -> None:
    """Put hyperparameters, schedule, loss scale and random generators back."""
    if manifest is not None:
        _apply_param_groups(parts, manifest, plan.group_keys)
        # The scale of an fp16 run means nothing in other precisions.
        if manifest.loss_scaler and parts.config.scales_loss:
            parts.scaler.load_state_dict(manifest.loss_scaler)
    schedule, random = f"{ZEROENGINE_PREFIX}lr_scheduler", f"{ZEROENGINE_PREFIX}rank.{parts.group.rank}"
    scheduler = parts.lr_scheduler()
    if scheduler is not None and schedule in objects:
        # The schedule comes after the groups, because some schedules write learning rates when they are loaded.
        scheduler.load_state_dict(objects[schedule])
    if random in objects:
        set_random_states(objects[random], parts.group.device)


def _largest_step_count(parts: CheckpointedParts) -> int:
    """Return the largest step count of a parameter that this rank has part of."""
    state = parts.optimizer.shard_state
    numbers = (state.of(shard, span).numbers for shard in parts.optimizer.shards for span in shard.spans())
    return max((int(number["step"]) for number in numbers if "step" in number), default=0)


# -- The optimizer's parameter groups -------------------------------------------------------------


def _check_param_groups(parts: CheckpointedParts, manifest: Manifest, path: Path, keys: Collection[str] | None) -> None:
    """Check that a checkpoint's groups can be put into the optimizer.

    Args:
        parts: The engine.
        manifest: The checkpoint's manifest.
        path: Its directory.
        keys: The hyperparameters to take over; None takes all.

    Raises:
        CheckpointError: They hold other parameters, or a hyperparameter has no sensible value.
    """
    if keys == ():
        return
    both = (named_param_groups(parts), manifest.param_groups)
    own, saved = ([group["params"] for group in groups] for groups in both)
    if keys is not None and len(own) != len(saved):
        raise CheckpointError(
            f"{path}: its LR schedule has rates for {len(saved)} groups of parameters, and the optimizer here has "
            f"{len(own)}. Make as many groups, or load with weights_only=True."
        )
    # A frozen parameter may be in a group at one time and left out at another, and this changes nothing.
    trainable = {slot.name for shard in parts.optimizer.shards for slot in shard.unit.layout.slots}
    if keys is None and [trainable & set(names) for names in own] != [trainable & set(names) for names in saved]:
        sizes = f"{list(map(len, saved))} parameters there, {list(map(len, own))} here"
        raise CheckpointError(
            f"{path}: the optimizer's groups hold other parameters ({sizes}). Make the same groups, or load with "
            "weights_only=True."
        )
    # Only the manifest of format 1 has no checksum, yet a check of values is cheap for all of them.
    for group, key, value in _saved_hyperparameters(parts, manifest, keys):
        if not _is_acceptable(key, value, group.get(key)):
            raise CheckpointError(
                f"{path} is damaged: its {MANIFEST} has {value!r} for the optimizer's {key}, which is "
                f"{group.get(key)!r} here"
            )


def _apply_param_groups(parts: CheckpointedParts, manifest: Manifest, keys: Collection[str] | None) -> None:
    """Set the hyperparameters to those of a checkpoint, as `torch.optim.Optimizer.load_state_dict` does."""
    for group, key, value in _saved_hyperparameters(parts, manifest, keys):
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            # A captured step reads the tensor, so the tensor has to stay the same object.
            present.copy_(torch.as_tensor(value))
        else:
            # JSON has no tuples, and some optimizers require them.
            group[key] = tuple(value) if isinstance(present, tuple) else value


def _saved_hyperparameters(
    parts: CheckpointedParts, manifest: Manifest, keys: Collection[str] | None
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each group of the optimizer with the key and the value of each of its hyperparameters in a checkpoint."""
    # Without hyperparameters to take over, another optimizer may have other groups.
    for group, saved_group in zip(parts.optimizer.param_groups, manifest.param_groups, strict=keys != ()):
        for key, value in saved_group.items():
            if key != "params" and (keys is None or key in keys):
                yield group, key, value


def _is_acceptable(key: str, saved: Any, present: Any) -> bool:
    """Return whether a well-known hyperparameter of a checkpoint can take the place of the present one."""
    if key == "betas" and isinstance(present, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(present) and all(map(_is_number, saved))
    # Rules of users have hyperparameters that are unknown here. These are taken as they are.
    is_scalar = isinstance(present, torch.Tensor) and present.numel() == 1
    if key in NEVER_NEGATIVE and (is_scalar or isinstance(present, (int, float))):
        return _is_number(saved) and saved >= 0
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
