"""Change the configuration of a running engine: another partitioning of the same model, whose states move.

All checks come first, and change nothing. Then the hooks of the earlier partitioning are removed, and each unit in turn
becomes ordinary, becomes a unit of the next partitioning, and gets its optimizer's states: see ``optim.state_moves``.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroengine.config import Config, load
from zeroengine.engine import model_checks
from zeroengine.engine.agreement import check_agreement
from zeroengine.engine.assembly import EngineParts, LastingParts, assemble
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.earlier_partition import EarlierPartition
from zeroengine.engine.optional_packages import choose_states
from zeroengine.engine.parts import EngineCalls, EngineSetup, PartitionUndo, Ranks, connect_ranks, place_model
from zeroengine.engine.progress import announce, describe_start
from zeroengine.engine.public_call import ALL, PublicCall
from zeroengine.engine.run_progress import RunProgress
from zeroengine.engine.split_models import check_split_model
from zeroengine.engine.step_loop import StepLoop
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import FreeMemory, measure_free_memory
from zeroengine.memory.state_memory import StateMemory, fit_configuration
from zeroengine.offload.placement import Placement
from zeroengine.optim.algorithms import algorithms_of
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend
from zeroengine.optim.factory import check_optimizer
from zeroengine.optim.state_moves import StateMoves, earlier_states
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.runtime import mixed_precision
from zeroengine.utils.formats import listed

log = logging.getLogger("zeroengine")

ConfigLike = str | Path | Mapping[str, Any] | Config

CHANGE = PublicCall(
    "change()",
    "to change the configuration",
    ALL,
    needs_store=True,
    needs_own_parameters=True,
    ends_backward=True,
)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CHANGEABLE = (
    "zero_optimization",
    *BATCH_KEYS,
    "gradient_clipping",
    "optimizer_state_dtype",
    "communication_data_type",
    "data_types",
    "gradient_predivide_factor",
    "prescale_gradients",
    "activation_checkpointing",
    "check_parameter_writes",
    "aio",
    "memory_check",
)


@dataclass(frozen=True)
class PlannedChange:
    """A change that all checks have passed, and what it needs is open.

    Attributes:
        setup: What the engine is made from after the change.
        ranks: The ranks after the change.
        placement: Where states are to live.
        backend: Makes what updates them.
        earlier_undo: The calls that end the present partitioning.
        began_s: When the change began, by ``time.perf_counter``.
    """

    setup: EngineSetup
    ranks: Ranks
    placement: Placement
    backend: Callable[[BackendParts], UpdateBackend]
    earlier_undo: PartitionUndo
    began_s: float


def changed_configuration(requested: Config, present: Config, change: ConfigLike) -> Config:
    """Return the configuration after a change, which is not resolved.

    The keys of the top level that the change does not write stay as they are. Of the sizes of a batch those that it
    leaves open follow from the present ``train_batch_size``, or from the present micro-batch if it writes that.

    Args:
        requested: The present configuration before it was resolved.
        present: The present configuration, with the sizes of the next step.
        change: A file, a dict, or a whole configuration.

    Raises:
        ZeroEngineError: The change writes a key that cannot change, or something is wrong with a value.
    """
    given = load(change, argument="change")
    written = dict(given.to_dict())
    if not isinstance(change, Config) and given._written is not None:
        written = {key: value for key, value in written.items() if key in given._written.tree}
    before = requested.to_dict() | {key: getattr(present, key) for key in BATCH_KEYS}
    sizes = {key for key in BATCH_KEYS if written.get(key) is not None}
    after = before | written
    if present.gradient_accumulation_steps == "manual" or written.get("gradient_accumulation_steps") == "manual":
        after["train_batch_size"] = written.get("train_batch_size")
    elif sizes:
        kept = "train_micro_batch_size_per_gpu" if sizes == {"train_batch_size"} else "train_batch_size"
        after |= {key: written.get(key) for key in BATCH_KEYS}
        if len(sizes) == 1:
            after[kept] = before[kept]
    refused = [key for key in after if after[key] != before.get(key) and key not in CHANGEABLE]
    if refused:
        raise ZeroEngineError(
            f"change(): a running engine keeps {listed(refused, len(refused))}. What can change: "
            f"{', '.join(CHANGEABLE)}. For anything else save a checkpoint and load it into a new engine."
        )
    return load(after)


def plan_change(parts: EngineParts, checkpoints: EngineCheckpoints, change: ConfigLike) -> PlannedChange:
    """Check a change on all ranks, and open what it needs. Nothing changes. A collective.

    Raises:
        ZeroEngineError: On every rank: the change is refused.
    """
    began_s = time.perf_counter()
    setup, group = parts.setup, parts.ranks.group
    model, optimizer = setup.model, setup.base_optimizer
    with CHANGE.on_all_ranks(parts):
        _check_moment(parts, checkpoints)
        requested = changed_configuration(setup.requested, setup.config, change)
        settings = requested.resolve(
            world_size=group.world_size,
            model_dtype=setup.model_dtype,
            ranks_per_node=setup.ranks_per_node,
            shard_ranks=setup.shard_ranks,
            ranks_per_model=1,
        )
        plans = mixed_precision.units_of_model(model, settings, algorithms_of(optimizer, model, settings))
        model_checks.check_quantizable(
            settings.zero_optimization, plans, mixed_precision.exact_tensors(model, settings)
        )
        check_split_model(settings, plans, optimizer)
        rules = DegreeRules.of_settings(settings.zero_optimization, group.world_size)
        rules.check_patterns(plans)
        for degrees in rules.all_degrees:
            check_optimizer(optimizer, degrees)
    check_agreement(group, settings, model, plans, optimizer)
    memory = StateMemory(plans, settings, setup.state_memory.topology, optimizer)
    held = setup.state_memory.requirement(setup.state_memory.current())

    def free_memory(paths: Collection[str]) -> FreeMemory:
        """Return what is free without the states that the change replaces."""
        free = measure_free_memory(group, paths)
        return dataclasses.replace(
            free,
            device=free.device + held.device - held.states.peak_device_extra,
            host=free.host + held.host,
            disk=free.disk + held.disk,
        )

    memory, notice = fit_configuration(memory, free_memory, choose_states)
    if notice is not None and group.rank == 0:
        log.warning("%s", notice)
    # What fails below may be tried again, and what was open before goes on.
    checkpoints.wait()
    parts.loop.step_runner.await_and_report()
    parts.passes.backward.finish()
    parts.states.master_weights.settle()
    for unit in parts.partition.units:
        unit.collect_writes()
    parts.passes.outside_writes.compare()
    planned = dataclasses.replace(setup, state_memory=memory, requested=requested)
    earlier_undo = setup.partition_undo.begin_again()
    try:
        ranks = connect_ranks(planned, group, None, parts.ranks.plain_transport)
        placement, backend = place_model(planned, ranks, parts.reports.timer, "to change the configuration")
    except BaseException as error:
        setup.partition_undo.end(type(error), error, error.__traceback__)
        setup.partition_undo.take_over(earlier_undo)
        raise
    return PlannedChange(planned, ranks, placement, backend, earlier_undo, began_s)


def _check_moment(parts: EngineParts, checkpoints: EngineCheckpoints) -> None:
    checkpoints.check_not_half_loaded("change()")
    if parts.loop.accumulation.has_gradients:
        raise ZeroEngineError(
            "change() between the micro-steps of a step, whose gradients are partitioned as before: call it after a "
            "step() that updated"
        )
    if parts.setup.is_split or parts.setup.config.local_steps is not None:
        raise ZeroEngineError(
            "change(): the states of a model that is split over ranks, and those of local_steps, cannot move. Save a "
            "checkpoint, and load it into a new engine."
        )
    if checkpoints.replay is not None:
        raise ZeroEngineError("change() under zero-replay: take a step again that comes before it")
    if parts.reports.monitor is not None and parts.setup.config.trace.steps is not None:
        raise ZeroEngineError('change() with "trace": the timeline is of one partitioning; remove that section')


def take_apart(planned: PlannedChange, steps: StepLoop) -> tuple[RunProgress, LastingParts, EarlierPartition]:
    """Make the model ordinary but for its values, and return what the engine goes on with. A collective.

    Afterwards nothing may use the parts of ``steps``, and their memory goes with the last reference to them.
    """
    parts, progress, optimizer = steps.parts, steps.progress(), steps.parts.states.optimizer
    if planned.setup.config.gradient_clipping != parts.setup.config.gradient_clipping:
        progress.max_norm = None
    for shard in optimizer.shards:
        if shard.unit.move_writes_to_shard():
            shard.reload_master()
    for unit in parts.partition.units:
        unit.move_writes_to_shard()
    steps.checkpoints.close()
    states, group = earlier_states(optimizer), parts.ranks.group
    units, outliers = tuple(parts.partition.units), parts.states.outliers
    parts.partition.restoration.forget()
    planned.earlier_undo.hooks.close()
    transport = parts.ranks.plain_transport
    earlier = EarlierPartition(
        units,
        StateMoves(states, transport, group),
        transport,
        optimizer,
        parts.states.lr_schedule,
        outliers,
        parts.states.elementwise_members,
        frozenset(parts.setup.config.notices),
    )
    optimizer.drop_parts()
    lasting = LastingParts(parts.reports, parts.loop.save_on_signal, parts.loop.snapshots)
    return progress, lasting, earlier


def put_together(
    planned: PlannedChange, lasting: LastingParts, earlier: EarlierPartition, calls: EngineCalls
) -> EngineParts:
    """Return the parts of the engine after the change, with the states of before. A collective."""
    try:
        parts = assemble(planned.setup, planned.ranks, lasting, planned.placement, planned.backend, calls, earlier)
    except BaseException as error:
        earlier.abandon(f"change() failed ({type(error).__name__}: {error})")
        raise
    finally:
        planned.earlier_undo.stores.close()
    return parts


def report_change(planned: PlannedChange, parts: EngineParts) -> None:
    """Say on rank 0, and in the records, what the engine has become."""
    setup, group = planned.setup, parts.ranks.group
    step = parts.loop.step_runner.num_updates + parts.loop.step_runner.num_skipped
    seconds = time.perf_counter() - planned.began_s
    start = describe_start(setup.model, setup.state_memory, group.world_size, 1, group.device)
    text = f"changed after step {step}, in {seconds:.2f} s: {start}"
    parts.reports.event("change", step, text, seconds=seconds)
    if group.rank == 0:
        announce(text)
