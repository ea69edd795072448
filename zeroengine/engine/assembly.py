"""Make the parts of an engine, each complete when its constructor returns."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroengine.checkpoint.on_signal import SaveOnSignal
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.config import FLOATS, Config
from zeroengine.engine import mixed_precision
from zeroengine.engine.accumulation import Accumulation
from zeroengine.engine.duplicate_inputs import InputComparison
from zeroengine.engine.foreign_parameters import ForeignParameters
from zeroengine.engine.full_values import FullValues
from zeroengine.engine.gathered import attach_owner
from zeroengine.engine.step import StepRunner
from zeroengine.engine.unset_parameters import forbid_forward_while_unset
from zeroengine.offload.interfaces import Copies
from zeroengine.offload.placement import Placement, place_states
from zeroengine.offload.state_offloader import StateOffloader
from zeroengine.optim.caller_optimizer import redirect_calls
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import LRSchedulerLike, make_scheduler
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees, degrees_of_stage
from zeroengine.runtime.backward_tracker import BackwardTracker
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.unit import Unit
from zeroengine.utils.malloc_trim import trim_heap
from zeroengine.utils.progress import every_64_mib

log = logging.getLogger("zeroengine")


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine. Each uses only parts that are listed above it.

    Attributes:
        model: The module that was passed to ``initialize``.
        config: The resolved configuration.
        group: The ranks that the states are partitioned over.
        transport: Moves bytes between these ranks.
        placement: Says which states live in CPU memory or on a disk, and holds the stores that they live in.
        units: All units of the model, in the order of registration.
        scaler: The loss scale.
        backward: Tells when backwards begin and end.
        accumulation: Counts micro-steps, and says which call may end a step.
        gatherer: Gathers parameters before they are used and releases them afterwards.
        reducer: Collects gradients in buckets and reduces them.
        outside_writes: Finds values that were written into the model from outside.
        optimizer: Updates this rank's shards.
        step_runner: Clips, updates, steps the LR schedule, and counts.
        full_values: Reads and writes whole parameters, gradients and optimizer states.
        foreign_parameters: Finds parameters that ``initialize`` was not given.
        input_comparison: Warns where ranks train on the same samples.
        state_offloader: Moves states away from the device on request.
        save_on_signal: Saves a checkpoint when a signal arrives; None where the configuration does not ask for it.
    """

    model: nn.Module
    config: Config
    group: Group
    transport: Transport
    placement: Placement
    units: list[Unit]
    scaler: LossScaler
    backward: BackwardTracker
    accumulation: Accumulation
    gatherer: Gatherer
    reducer: Reducer
    outside_writes: OutsideWrites
    optimizer: ShardedOptimizer
    step_runner: StepRunner
    full_values: FullValues
    foreign_parameters: ForeignParameters
    input_comparison: InputComparison
    state_offloader: StateOffloader
    save_on_signal: SaveOnSignal | None


def assemble(
    model: nn.Module,
    base_optimizer: torch.optim.Optimizer,
    config: Config,
    group: Group,
    plans: Sequence[UnitPlan],
    lr_scheduler: LRSchedulerLike,
    *,
    end_step: Callable[[], None],
    zero_grad: Callable[[], None],
    without_waiting: bool | None,
    copies: Copies | None,
) -> EngineParts:
    """Partition ``model`` and return the parts of the engine that trains it. Call it on every rank.

    Args:
        model: The model; its parameters keep their objects, shapes and names.
        base_optimizer: An optimizer over the model's own parameters, whose rule and param groups are taken over.
        config: The resolved configuration, the same on every rank.
        group: The ranks to partition over.
        plans: How the model is cut into units.
        lr_scheduler: A schedule over ``base_optimizer``, a callable that makes one, or None.
        end_step: Called by ``step()`` of either optimizer.
        zero_grad: Called by ``zero_grad()`` of either optimizer.
        without_waiting: Whether a step is issued without waiting for its norm. None decides by the device.
        copies: Moves tensors between the device and the host. None decides by the device.
    """
    zero = config.zero_optimization
    transport = group.transport(config.comm.transport, config.comm.timeout_seconds, bool(config.comm.register_buffers))
    degrees = degrees_of_stage(zero.stage, group.world_size)
    # Placing states may create files. If one rank has no space, every rank has to raise: the others would otherwise
    # wait for it in the first broadcast below.
    with group.collective_errors("to initialize"):
        placement = place_states(plans, degrees, config, transport, group.device, copies)
    degrees_of_units = [_degrees_of(plan, degrees, config) for plan in plans]
    units = _make_units(plans, degrees_of_units, group, transport, placement)
    forbid_forward_while_unset(model, units)
    # Each unit took rank 0's parameters above. Buffers belong to no unit, so rank 0 broadcasts them here.
    mixed_precision.prepare_buffers(model, config, group.device, group.broadcast)
    scaler = LossScaler(config.fp16 if config.scales_loss else None)
    # Only trainable parameters get gradients, and the first of these marks the beginning of a plain backward.
    backward = BackwardTracker([p for unit in units if unit.trainable for p in unit.params], config.scales_loss)
    micro_steps_per_step = None if config.manual_accumulation else int(config.gradient_accumulation_steps)
    # Listeners are called in the order in which they subscribe, and in the reverse order at the end of a backward.
    # Accumulation, gatherer, reducer and step runner subscribe in their constructors, so the order of these lines
    # matters.
    accumulation = Accumulation(micro_steps_per_step, group.rank, backward)
    gatherer = Gatherer(
        model,
        units,
        transport,
        # Prefetching gains nothing where communication does not overlap with computation, and it would hold memory.
        prefetch_numel=zero.prefetch_bucket_size if zero.overlap_comm else 0,
        max_live_numel=zero.max_live_parameters,
        backward=backward,
    )
    reducer = Reducer(
        units,
        transport,
        bucket_numel=zero.reduce_bucket_size,
        accumulation_dtype=config.accumulation_dtype,
        reduce_dtype=config.reduce_dtype,
        predivide=config.predivide(group.world_size),
        backward=backward,
        stores=placement.optimizer_stores,
        batch_copies=group.device.type == "cuda" if without_waiting is None else without_waiting,
    )
    # From here on the ranks agree on all values. Later changes of a parameter's version were made outside of the
    # engine.
    outside_writes = OutsideWrites(units, group)
    # The caller's optimizer and schedule are checked and may raise on one rank alone.
    with group.collective_errors("to initialize"):
        optimizer = ShardedOptimizer(
            base_optimizer,
            reducer,
            transport,
            after_update=gatherer.publish_update,
            step=end_step,
            zero_grad=zero_grad,
            writes=outside_writes,
            moments_dtype=FLOATS[config.optimizer_state_dtype],
            stores=placement.optimizer_stores,
            pipeline=placement.pipeline,
            without_waiting=without_waiting,
        )
        schedule = make_scheduler(lr_scheduler, optimizer, config)
    step_runner = StepRunner(
        config, optimizer, base_optimizer, schedule, scaler, reducer, gatherer, transport, backward
    )
    # This remembers the model as it is now, so everything that replaces parameters has to be done before.
    foreign_parameters = ForeignParameters(model, units, base_optimizer, group.rank)
    input_comparison = InputComparison(transport, group.device)
    # After this the caller's optimizer.step() ends a step of the engine instead of updating the parameters that this
    # rank alone sees.
    redirect_calls(base_optimizer, end_step, zero_grad)
    full_values = FullValues(
        model,
        units,
        group,
        transport,
        gatherer,
        reducer,
        optimizer,
        outside_writes,
        step_runner.divisor,
        accumulation,
        backward,
    )
    # The functions of parameter_access.py take only a parameter, so each parameter knows its owner, by a weak
    # reference.
    attach_owner((param for unit in units for param in unit.params), full_values)
    # The casts are registered last, for they prepend their hooks: inputs are then cast before the gatherer's hooks run.
    mixed_precision.install(model, config, group.device)
    # Whole parameters were freed in small pieces, which the C allocator would keep for itself.
    trim_heap()
    if group.rank == 0:
        _log_notices(config, group, transport)
    return EngineParts(
        model,
        config,
        group,
        transport,
        placement,
        units,
        scaler,
        backward,
        accumulation,
        gatherer,
        reducer,
        outside_writes,
        optimizer,
        step_runner,
        full_values,
        foreign_parameters,
        input_comparison,
        StateOffloader(),
        SaveOnSignal(config, group) if config.checkpoint.on_signal else None,
    )


def _degrees_of(plan: UnitPlan, degrees: Degrees, config: Config) -> Degrees:
    """Return the degrees of one unit: the parameters of a small unit stay whole on every rank."""
    # Gathering a small unit costs more in latency than its partitioning saves in memory.
    if plan.numel <= config.zero_optimization.param_persistence_threshold:
        return dataclasses.replace(degrees, parameters=1)
    return degrees


def _make_units(
    plans: Sequence[UnitPlan],
    degrees_of_units: Sequence[Degrees],
    group: Group,
    transport: Transport,
    placement: Placement,
) -> list[Unit]:
    """Move the model's parameters into units, one after another, and give back the memory that each frees."""
    units, count_freed, master_stores = [], every_64_mib(trim_heap), iter(placement.optimizer_stores)
    # One unit at a time frees the old values before the next unit is allocated. The peak is then the model and one
    # unit, rather than two copies of the model.
    for plan, degrees, stored in zip(plans, degrees_of_units, placement.parameter_shards, strict=True):
        # Frozen units have no masters, so the optimizer's stores are as many as the trainable units.
        master_store = next(master_stores) if plan.trainable else None
        unit = Unit(plan, degrees, transport, group.broadcast, stored, master_store)
        # Freed are the values that its parameters had before, and the fp32 values from which a unit of lower
        # precision was rounded.
        count_freed(unit.full_buffer.nbytes + (4 * plan.numel if unit.is_mixed_precision else 0))
        units.append(unit)
    return units


def _log_notices(config: Config, group: Group, transport: Transport) -> None:
    for notice in config.notices:
        log.warning(notice)
    if config.comm.register_buffers and transport.name != "nccl":
        log.warning("comm.register_buffers has no effect: nothing moves by NCCL here")
    if config.comm.transport == "shm" and group.device.type != "cpu":
        log.warning('comm.transport "shm" has no effect: it is for ranks that compute on CPUs')
    if config.dump_state:
        print(config.describe(), flush=True)
