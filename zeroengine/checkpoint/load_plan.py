"""Plan what a load reads from a checkpoint, and check that it fits the engine, before anything is changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zeroengine.checkpoint.content import stateful_name
from zeroengine.checkpoint.dcp_metadata import (
    METADATA,
    ZEROENGINE_PREFIX,
    OpenFile,
    open_local,
    read_metadata,
)
from zeroengine.checkpoint.engine_state import EngineState, EngineTensors
from zeroengine.checkpoint.entries import (
    AVERAGE,
    OPTIMIZER,
    SCALES,
    UNSAVED,
    StateEntries,
    momentum_name,
)
from zeroengine.checkpoint.manifest import MANIFEST, Manifest
from zeroengine.checkpoint.name_mapping import CheckpointNames, NameMatch, torch_dtype
from zeroengine.checkpoint.param_groups import LEARNING_RATES, check_param_groups
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.checkpoint.unused_states import UnusedStates, own_memory, plan_unused
from zeroengine.errors import CheckpointError
from zeroengine.ops import MOMENT_BLOCK
from zeroengine.optim.backends.interface import StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.boxes import Box
from zeroengine.partition.layout import ShardSpan
from zeroengine.utils.formats import listed

log = logging.getLogger("zeroengine")

# The parameters that an error names.
NUM_SHOWN = 5


@dataclass(frozen=True)
class LoadOptions:
    """What a load takes from a checkpoint. See ``Engine.load_checkpoint``.

    Attributes:
        fallback: Where the checkpoint is damaged, load the newest of the others that is whole.
        weights_only: Load parameters and buffers alone.
        optimizer: Load the optimizer's state and hyperparameters, too; otherwise its state starts anew.
        strict: Checkpoint and model must have the same parameters.
    """

    fallback: bool
    weights_only: bool
    optimizer: bool
    strict: bool

    @property
    def reads_optimizer(self) -> bool:
        """Whether the optimizer's state is read, rather than left or started anew."""
        return self.optimizer and not self.weights_only


@dataclass(frozen=True)
class LoadPlan:
    """The values to read from a checkpoint, and the tensors that take them.

    Attributes:
        names: What the checkpoint has of the model and of the optimizer's state.
        entries: The parameters and buffers, the other tensors of the model's state dict, and the momentum of the outer
            step of ``local_steps``, by their names in the checkpoint.
        optimizer: For each of this rank's spans, the keys that the checkpoint has of its state.
        objects: The names of the objects to read.
        stateful_prefix: Begins the names of the registered objects' states that are for this rank.
        same_world: Whether the checkpoint was saved on as many ranks.
        group_keys: The hyperparameters to take over; None takes all.
        saved_names: The keys of the model's state dict.
        restarted: The parameters whose moving average restarts from the loaded weights.
        unused: The states that this run does not use; None where weights alone are read.
    """

    names: CheckpointNames
    entries: StateEntries
    optimizer: list[tuple[OptimizerShard, ShardSpan, StateKeys]]
    objects: list[str]
    stateful_prefix: str
    same_world: bool
    group_keys: Collection[str] | None
    saved_names: SavedNames
    restarted: Collection[str]
    unused: UnusedStates | None


def make_plan(
    engine: EngineState, path: Path, manifest: Manifest | None, options: LoadOptions, open_file: OpenFile = open_local
) -> LoadPlan:
    """Return what is to be read.

    Args:
        engine: The engine's state.
        path: The checkpoint's directory.
        manifest: Its manifest; None where plain PyTorch wrote the checkpoint.
        options: What to take from it.
        open_file: As of `read_metadata`.

    Raises:
        CheckpointError: The checkpoint does not fit the engine.
    """
    tensors, group = engine.tensors, engine.tensors.group
    metadata = read_metadata(path, open_file)
    if manifest is not None:
        # Checksums cover only the files that the manifest lists. A file that it does not list has never been checked.
        unlisted = {METADATA, *metadata.items} - manifest.files.keys()
        if unlisted:
            raise CheckpointError(f"{path} is damaged: its {MANIFEST} does not list {', '.join(sorted(unlisted)[:3])}")
    # A load fills every element that this rank holds, also the copies that another rank saved.
    model = tensors.model_entries(once=False)
    saved_names = tensors.saved_names()
    aliases = saved_names.aliases
    names = CheckpointNames(metadata, model, aliases, saved_names.computed)
    match = names.model
    if options.strict and manifest is not None and manifest.left_out:
        match = _without_left_out(tensors, match, manifest.left_out, aliases, path)
    # Without `strict` a checkpoint may hold the optimizer's state alone.
    if match.stored_names or options.strict:
        match.check(str(path), strict=options.strict)
        stored_names, stored = match.stored_names.items(), metadata.tensors
        tensors.warn_of_casts({own: torch_dtype(stored[name].dtype) for own, name in stored_names}, str(path))
    same_world = manifest is not None and manifest.world_size == group.world_size
    # On another number of ranks no state belongs to this rank in particular, so every rank gets the one that rank 0
    # saved.
    stateful_prefix = stateful_name("", group.rank if same_world else 0)
    spans: list[tuple[OptimizerShard, ShardSpan, StateKeys]] = []
    wanted, schedule = [f"{ZEROENGINE_PREFIX}client_state"], f"{ZEROENGINE_PREFIX}lr_scheduler"
    group_keys: Collection[str] | None = None
    if not options.weights_only:
        if options.optimizer:
            spans = _plan_optimizer(tensors, names, manifest, path)
        else:
            optimizer = tensors.optimizer
            spans = [(shard, span, {}) for shard in optimizer.shards for span in optimizer.state_of(shard).spans(shard)]
            # Many schedules compute a learning rate from the one before, so the rates come with the schedule.
            loads_schedule = engine.schedule is not None and schedule in metadata.objects
            group_keys = LEARNING_RATES if loads_schedule else ()
        if manifest is not None:
            check_param_groups(tensors, manifest, path, group_keys, aliases)
        wanted += [schedule] if engine.schedule is not None else []
        wanted += [name for name in metadata.objects if name.startswith(stateful_prefix)]
        # The generators of each rank go on only where each rank finds its own. A changed number of ranks starts new
        # ones.
        if same_world:
            wanted.append(f"{ZEROENGINE_PREFIX}rank.{group.rank}")
    entries = {stored: model[name] for name, stored in names.model.stored_names.items()}
    computed = [names.model.prefix + key for key in saved_names.computed]
    wanted += computed
    # These tensors have no memory in the engine, and every rank takes the whole values.
    whole = {name: metadata.tensors[name] for name in computed if name in metadata.tensors}
    entries |= {name: own_memory(tensor, [Box.whole(tensor.shape)]) for name, tensor in whole.items()}
    if options.reads_optimizer:
        entries |= _plan_outer(tensors, names, path)
    averages, restarted = _plan_averages(tensors, names, path, weights_only=options.weights_only)
    entries |= averages
    # Older or foreign checkpoints lack some objects, and the engine then keeps what it has.
    objects = [name for name in wanted if name in metadata.objects]
    unused = None
    if not options.weights_only:
        held, lost = plan_unused(engine, names, aliases, {*entries, *objects}, optimizer=options.optimizer)
        entries |= held
        has_scale = manifest is not None and bool(manifest.loss_scaler) and not engine.config.scales_loss
        unused = UnusedStates(str(path), held, lost + ["loss_scaler"] * has_scale)
    return LoadPlan(
        names, entries, spans, objects, stateful_prefix, same_world, group_keys, saved_names, restarted, unused
    )


def _plan_outer(tensors: EngineTensors, names: CheckpointNames, path: Path) -> StateEntries:
    """Return the momentum of the outer step that the checkpoint has, by its names there."""
    own, stored_names, prefix = tensors.outer_entries(once=False), names.model.stored_names, names.model.prefix
    candidates = {momentum_name(stored.removeprefix(prefix)): own.get(name) for name, stored in stored_names.items()}
    outer = {name: entry for name, entry in candidates.items() if entry is not None and name in names.metadata.tensors}
    if tensors.group.rank == 0 and own and not outer:
        log.warning("%s has no momentum of an outer step (local_steps.outer): it starts from zero", path)
    return outer


def _plan_averages(
    tensors: EngineTensors, names: CheckpointNames, path: Path, *, weights_only: bool
) -> tuple[StateEntries, list[str]]:
    """Return the moving averages to read, by their names in the checkpoint, and the parameters whose average restarts.

    Args:
        tensors: The engine's tensors.
        names: What the checkpoint has.
        path: The checkpoint's directory.
        weights_only: Whether all averages restart from the weights.
    """
    own, stored, prefix = tensors.average_entries(once=False), names.metadata.tensors, names.model.prefix
    present = {
        name: AVERAGE + of_model.removeprefix(prefix).removeprefix(UNSAVED)
        for name, of_model in names.model.stored_names.items()
        if name in own
    }
    read = {name: stored_name for name, stored_name in present.items() if stored_name in stored and not weights_only}
    restarted = [name for name in present if name not in read]
    if tensors.group.rank == 0 and restarted and not weights_only:
        shown = listed(restarted, NUM_SHOWN)
        log.warning("%s has no moving average (ema) of %s: it restarts from the loaded weights", path, shown)
    return {stored_name: own[name] for name, stored_name in read.items()}, restarted


def _without_left_out(
    tensors: EngineTensors, match: NameMatch, left_out: Sequence[str], aliases: Mapping[str, str], path: Path
) -> NameMatch:
    """Return a match that expects no value of the frozen parameters which the save left out.

    Args:
        tensors: The engine's tensors.
        match: Of the names in the checkpoint with those of the model.
        left_out: The names that the save left out.
        aliases: The own name of a parameter, by its other names.
        path: The checkpoint's directory.

    Raises:
        CheckpointError: Such a parameter is trained here, or has no values that it could keep.
    """
    absent = {aliases.get(name, name) for name in left_out}.intersection(match.missing)
    trainable, unset = tensors.trainable_names(), {name for unit in tensors.units for name in unit.originals.unset}
    for names, state, advice in (
        (trainable, "are trained here", "Load them first, then this checkpoint with strict=False; or freeze them"),
        (unset, "have no values here", "Load them first, such as by engine.load_weights(base, strict=False)"),
    ):
        if problems := sorted(absent & names):
            raise CheckpointError(
                f"{path} was saved with frozen=False, without parameters that {state}: "
                f"{listed(problems, NUM_SHOWN)}. {advice}."
            )
    own_names = {slot.name for unit in tensors.units for slot in unit.layout.slots} | aliases.keys()
    return replace(
        match,
        missing=[name for name in match.missing if name not in absent],
        unexpected=match.unexpected + [name for name in left_out if name not in own_names],
    )


def _plan_optimizer(
    tensors: EngineTensors, names: CheckpointNames, manifest: Manifest | None, path: Path
) -> list[tuple[OptimizerShard, ShardSpan, StateKeys]]:
    """Return the keys that the checkpoint has of each of this rank's spans."""
    saved = sorted({key for keys in names.state_keys.values() for key in keys})
    # SGD without momentum keeps nothing but perhaps steps, and momentum may begin at any time.
    is_stateless = manifest is not None and not {*saved} - {"step"}
    optimizer = tensors.optimizer
    known = [optimizer.state_of(shard).keys(shard) for shard in optimizer.shards]
    # Without known keys the name of the rule is the only sign of another optimizer.
    has_no_sign = is_stateless or any(not expected for expected in known)
    by_another = manifest is not None and has_no_sign and manifest.optimizer != optimizer.base_optimizer_name
    lacks_state = any(expected is not None and not expected <= set(saved) for expected in known)
    rule = manifest.optimizer if manifest is not None else "another optimizer"
    another = CheckpointError(
        f"{path} holds the state of {rule} ({', '.join(saved) or 'nothing'}), and the optimizer here is "
        f"{optimizer.base_optimizer_name}. Use the same optimizer, or load with weights_only=True."
    )
    if by_another or (lacks_state and not is_stateless):
        raise another
    planned = []
    for shard, expected in zip(optimizer.shards, known, strict=True):
        for span in optimizer.state_of(shard).spans(shard):
            name = shard.unit.layout.slots[span.param_index].name
            keys = names.state_keys.get(name, {})
            if expected and keys.keys() == {"step"}:
                keys = {}
            # State that the rule does not keep is that of another one, such as Adam's for Lion.
            if expected is not None and keys.keys() - expected - {"step"}:
                raise another
            # A parameter without any state has never been updated, which is legitimate. A part of its state is damage.
            if expected is not None and keys and not expected <= set(keys):
                raise CheckpointError(f"{path} lacks optimizer state of {name}")
            if any(not torch.can_cast(dtype, shard.master.dtype) for dtype, _ in keys.values()):
                raise CheckpointError(f"{path} holds optimizer state of {name} in a dtype that no rule computes in")
            for key in keys:
                _check_blocks(names, name, key, path, is_moment=expected is not None)
            planned.append((shard, span, keys))
    return planned


def _check_blocks(names: CheckpointNames, name: str, key: str, path: Path, *, is_moment: bool) -> None:
    """Check that a state in bytes is a moment of 8 bits as zeroengine stores it.

    Args:
        names: What the checkpoint has.
        name: The parameter.
        key: The name of its state.
        path: The checkpoint's directory.
        is_moment: Whether the state is a moment. Optimizers of users may keep bytes that are none.

    Raises:
        CheckpointError: Its scales are missing, or do not fit.
    """
    stored = names.state_names[f"{OPTIMIZER}{name}.{key}"]
    values, scales = names.metadata.tensors[stored], names.metadata.tensors.get(stored + SCALES)
    if scales is None and (values.dtype != "uint8" or not is_moment):
        return
    blocks = (-(-math.prod(values.shape) // MOMENT_BLOCK),)
    with_scales = "without scales" if scales is None else f"with scales of {scales.dtype} and shape {scales.shape}"
    if scales is None or (values.dtype, scales.dtype, scales.shape) != ("uint8", "float32", blocks):
        raise CheckpointError(
            f"{path}: the state {key} of {name} is {values.dtype} of shape {values.shape} {with_scales}. A moment of 8 "
            f"bits is uint8 of the parameter's shape, with scales of float32 and shape {blocks}: one for each "
            f"{MOMENT_BLOCK} elements. Load with weights_only=True, or with optimizer=False."
        )
