"""Change the configuration of a running engine: another partitioning of the same model, whose states move.

All checks come first, and change nothing. Then the hooks of the earlier partitioning are removed, and each unit in turn
becomes ordinary, becomes a unit of the next partitioning, and gets its optimizer's states: see ``optim.state_moves``.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.config import Config, ConfigLike, load
from zeroengine.engine.agreement import check_agreement
from zeroengine.engine.assembly import EngineParts, LastingParts, assemble
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.earlier_partition import EarlierPartition
from zeroengine.engine.optional_packages import choose_states
from zeroengine.engine.parts import EngineCalls, place_model
from zeroengine.engine.progress import announce, describe_start
from zeroengine.engine.public_call import ALL, PublicCall
from zeroengine.engine.ranks import Ranks, connect_ranks
from zeroengine.engine.run_progress import RunProgress
from zeroengine.engine.setup import EngineSetup, PartitionUndo
from zeroengine.engine.step_loop import StepLoop
from zeroengine.engine.unit_plans import plan_units
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import FreeMemory, measure_free_memory
from zeroengine.memory.state_choice import SECTIONS
from zeroengine.memory.state_memory import StateMemory, fit_configuration
from zeroengine.offload.placement import Placement
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend
from zeroengine.optim.state_moves import StateMoves, earlier_states
from zeroengine.partition.cut import UnitPlan
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass

log = logging.getLogger("zeroengine")

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
        sets_clipping: Whether the change names the largest norm of the gradient.
        earlier_undo: The calls that end the present partitioning.
        began_s: When the change began, by ``time.perf_counter``.
    """

    setup: EngineSetup
    ranks: Ranks
    placement: Placement
    backend: Callable[[BackendParts], UpdateBackend]
    sets_clipping: bool
    earlier_undo: PartitionUndo
    began_s: float


def changed_configuration(requested: Config, present: Config, written: Mapping[str, Any]) -> Config:
    """Return the configuration after a change, which is not resolved.

    The keys of the top level that the change does not write stay as they are. Of the sizes of a batch those that it
    leaves open follow from the present ``train_batch_size``, or from the present micro-batch if it writes that.

    Args:
        requested: The present configuration before it was resolved.
        present: The present configuration, with the sizes of the next step.
        written: The values of the keys that the change writes.

    Raises:
        ZeroEngineError: The change writes a key that cannot change, or something is wrong with a value.
    """
    before = requested.to_dict() | {key: getattr(present, key) for key in BATCH_KEYS}
    # What "auto" has chosen stays chosen.
    zero, chosen = before["zero_optimization"], present.zero_optimization
    zero["stage"] = chosen.stage
    for section in SECTIONS:
        zero[section]["device"] = getattr(chosen, section).device
    sizes = {key for key in BATCH_KEYS if written.get(key) is not None}
    after = before | dict(written)
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
    return load(after, from_environment=False)


def written_keys(change: ConfigLike) -> dict[str, Any]:
    """Return the values of the keys of the top level that a configuration writes, or that are not the default.

    Overrides of the launcher are of the configuration that the run began with, and do not apply.
    """
    given = load(change, argument="config", from_environment=False)
    default, keys = Config().to_dict(), set() if given._written is None else set(given._written.tree)
    return {key: value for key, value in given.to_dict().items() if key in keys or value != default[key]}


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
        written = written_keys(change)
        requested = changed_configuration(setup.requested, setup.config, written)
        settings = setup.resolve(requested)
        with _trained_as_before(setup.plans):
            plans = plan_units(model, optimizer, settings, group.world_size)
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
    return PlannedChange(planned, ranks, placement, backend, "gradient_clipping" in written, earlier_undo, began_s)


@contextmanager
def _trained_as_before(plans: Sequence[UnitPlan]) -> Iterator[None]:
    """Let the parameters that are trained require gradients inside, and no others: some may be frozen at the moment."""
    params = [(param, plan.trainable) for plan in plans for _, param in plan.params]
    # The class of a released parameter would look at what is asked of it.
    with DisableTorchFunctionSubclass():
        required = [param.requires_grad for param, _ in params]
        try:
            for param, is_trained in params:
                param.requires_grad_(is_trained)
            yield
        finally:
            for (param, _), requires in zip(params, required, strict=True):
                param.requires_grad_(requires)


def _check_moment(parts: EngineParts, checkpoints: EngineCheckpoints) -> None:
    checkpoints.check_not_half_loaded("change()")
    accumulation = parts.loop.accumulation
    if parts.passes.reducer.take_assigned_gradients():
        accumulation.note_assigned_gradients()
    if accumulation.has_gradients or accumulation.backwards or accumulation.ended_micro_steps:
        raise ZeroEngineError(
            "change() between the micro-steps of a step, or after gradients were assigned, which are partitioned as "
            "before: call it after a step() that updated"
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
    if planned.sets_clipping:
        progress.max_norm = None
    for shard in optimizer.shards:
        if shard.unit.move_writes_to_shard():
            shard.reload_master()
    for unit in parts.partition.units:
        unit.move_writes_to_shard()
    steps.checkpoints.close()
    parts.passes.backward.refusal = (
        "a backward of a forward from before engine.change(), whose graph has saved what is elsewhere now: run the "
        "forward again"
    )
    states, group = earlier_states(optimizer), parts.ranks.group
    units, outliers = tuple(parts.partition.units), parts.states.outliers
    parts.partition.restoration.forget()
    planned.earlier_undo.hooks.close()
    # With its channels for the degrees of before.
    transport = parts.ranks.transport
    earlier = EarlierPartition(
        units,
        StateMoves(states, transport, group),
        transport,
        optimizer,
        parts.states.lr_schedule,
        outliers,
        parts.states.elementwise_members,
        frozenset(parts.setup.config.notices),
        bool(parts.partition.placement.disks),
    )
    optimizer.drop_parts()
    lasting = LastingParts(parts.reports, parts.loop.save_on_signal, parts.loop.snapshots)
    return progress, lasting, earlier


def put_together(
    planned: PlannedChange, lasting: LastingParts, earlier: EarlierPartition, calls: EngineCalls
) -> EngineParts:
    """Return the parts of the engine after the change, with the states of before. A collective."""
    try:
        with _trained_as_before(planned.setup.plans):
            parts = assemble(planned.setup, planned.ranks, lasting, planned.placement, planned.backend, calls, earlier)
    except BaseException as error:
        earlier.abandon(f"change() failed ({type(error).__name__}: {error})")
        raise
    finally:
        planned.earlier_undo.stores.close()
    if earlier.has_disks:
        # What is mapped of the earlier files is in cycles.
        gc.collect()
    return parts


def report_change(planned: PlannedChange, parts: EngineParts) -> None:
    """Say on rank 0, and in the records, what the engine has become."""
    setup, group = planned.setup, parts.ranks.group
    step = parts.loop.step_runner.num_updates + parts.loop.step_runner.num_skipped
    seconds = time.perf_counter() - planned.began_s
    start = describe_start(setup.model, setup.state_memory, group.world_size, 1, group.device)
    text = f"changed after step {step}, in {seconds:.2f} s: {start}"
    # Autograd then refuses a backward through a graph that saved parameters before.
    torch.autograd.graph.increment_version([param for unit in parts.partition.units for param in unit.params])
    parts.passes.outside_writes.reset_baseline()
    parts.reports.event("change", step, text, seconds=seconds)
    if setup.config.zero_optimization.zeropp_loco_param is not None and group.rank == 0:
        log.warning("zeropp_loco_param: the error feedback of quantized gradients restarts from zero after a change")
    if group.rank == 0:
        announce(text)
