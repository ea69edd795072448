"""The parts of an engine that a step rests on, in the order in which they are built: each from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.engine.call_checks import forbid_forward_while_unset
from zeroengine.engine.earlier_partition import EarlierPartition
from zeroengine.engine.memory_limit import limit_memory
from zeroengine.engine.ranks import Ranks
from zeroengine.engine.restoration import Restoration
from zeroengine.engine.setup import EngineSetup
from zeroengine.monitor.timer import Timer
from zeroengine.offload.placement import Placement, place_states
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend
from zeroengine.optim.caller_optimizer import redirect_calls
from zeroengine.optim.choice import choose_backend
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import LRSchedule, check_scheduler, make_scheduler
from zeroengine.optim.master_weights import MasterWeights
from zeroengine.optim.mixed_optimizer import MixedOptimizer, members_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.outer_step import Nesterov, OuterStep
from zeroengine.optim.outlier_steps import OutlierSteps
from zeroengine.optim.own_methods import CallOverShards, forward_own_methods
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.optim.step_reduction import StepReduction
from zeroengine.runtime import mixed_precision
from zeroengine.runtime.backward import Backward
from zeroengine.runtime.executor import Executor
from zeroengine.runtime.forward import Forward, check_hooks_allowed
from zeroengine.runtime.frozen_linear import pass_contiguous_inputs
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.original_parameters import is_frozen_and_unset
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.pass_listener import PassListener
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.scheduling import ModuleNumbers, make_schedule
from zeroengine.runtime.step_losses import StepLosses
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.sequence.host_activations import HostActivations
from zeroengine.utils.host_memory import trim_heap
from zeroengine.utils.progress import call_every

# The freed bytes after which the C allocator is told to give memory back.
TRIM_INTERVAL_BYTES = 64 << 20


@dataclass(frozen=True)
class EngineCalls:
    """Holds what the parts call of the engine, which is complete before they do. The first three are bound methods.

    Attributes:
        step: Ends a step, for ``step()``.
        zero_grad: Drops gradients, for ``zero_grad()``.
        run_method: Runs a method that the class of the caller's optimizer adds to torch's ``Optimizer``.
        listener: Is told of forwards and backwards.
    """

    step: Callable[[], None]
    zero_grad: Callable[[bool], None]
    run_method: CallOverShards
    listener: PassListener


@dataclass(frozen=True)
class PartitionedModel:
    """The model's parameters in units, and where the states of each unit live.

    Attributes:
        placement: The states that live in CPU memory or on a disk, and the stores that they live in.
        backend: Makes what updates states at these places by the rules of the optimizer.
        units: All units of the model, in the order of registration.
        restoration: Makes the parameters whole and ordinary when the engine ends.
    """

    placement: Placement
    backend: Callable[[BackendParts], UpdateBackend]
    units: Sequence[Unit]
    restoration: Restoration


def place_model(
    setup: EngineSetup, ranks: Ranks, timer: Timer, purpose: str
) -> tuple[Placement, Callable[[BackendParts], UpdateBackend]]:
    """Open the stores of offloaded states, and choose what updates them. A collective.

    Args:
        setup: What the engine is made from.
        ranks: The ranks.
        timer: Times transfers of offloaded states.
        purpose: The purpose, such as "to initialize", for messages.

    Returns:
        The first two attributes of ``PartitionedModel``.

    Raises:
        ZeroEngineError: On every rank: something cannot be partitioned. The model is as it was.
    """
    config, plans, group = setup.config, setup.plans, ranks.group
    # Placing states may create files. If one rank has no space, every rank must raise, because the others would
    # otherwise wait for it in the first broadcast below.
    with group.collective_errors(purpose):
        check_scheduler(setup.lr_scheduler, setup.base_optimizer, config)
        lack_values = [is_frozen_and_unset(plan) for plan in plans]
        placement = place_states(
            plans, ranks.rules, config, ranks.transport, group.device, timer, setup.copies, lack_values
        )
        setup.partition_undo.stores.callback(placement.close)
        check_hooks_allowed(_hooked_modules(setup, ranks, placement))
        degree = max((ranks.rules.of_unit(plan).optimizer for plan in plans), default=1)
        device, async_step = group.device, setup.async_step
        backend = choose_backend(setup.base_optimizer, plans, placement, config, device, async_step, degree)
    return placement, backend


def partition_model(
    setup: EngineSetup,
    ranks: Ranks,
    placement: Placement,
    backend: Callable[[BackendParts], UpdateBackend],
    earlier: EarlierPartition | None,
) -> PartitionedModel:
    """Move the model's parameters into units. All ranks get rank 0's parameters and buffers. A collective.

    Args:
        setup: What the engine is made from.
        ranks: The ranks.
        placement: Where the states of each unit are to live.
        backend: Makes what updates them.
        earlier: The partitioning before a change, of which this takes over the states; None: the model is ordinary.
    """
    model, config, undo, group = setup.model, setup.config, setup.partition_undo.hooks, ranks.group
    units: list[Unit] = []
    restoration = Restoration(group, ranks.data_group, ranks.transport, placement, units)
    undo.push(restoration)
    # Each unit is in the list as soon as it holds parameters, so that an error in a later unit restores them.
    units.extend(_make_units(setup, ranks, placement, earlier))
    forbid_forward_while_unset(model, units, undo)
    # The units have rank 0's parameters. Buffers belong to no unit, so rank 0 broadcasts them here, at first.
    broadcast: Callable[[torch.Tensor], None] = partial(group.broadcast, purpose="of buffers")
    if earlier is not None:
        broadcast = _leave
    mixed_precision.prepare_buffers(model, config, group.device, broadcast, undo)
    return PartitionedModel(placement, backend, units, restoration)


def _leave(values: torch.Tensor) -> None:
    """Leave the values of this rank as they are."""


def _make_units(
    setup: EngineSetup, ranks: Ranks, placement: Placement, earlier: EarlierPartition | None
) -> Iterator[Unit]:
    """Move the model's parameters into units, one after another, and return the freed memory to the system."""
    count_freed, master_stores = call_every(TRIM_INTERVAL_BYTES, trim_heap), iter(placement.optimizer_stores)
    # One unit at a time frees the old values before the next unit is allocated. The peak is then the model and one
    # unit, rather than two copies of the model.
    for number, (plan, stored) in enumerate(zip(setup.plans, placement.parameter_shards, strict=True)):
        # Frozen units have no masters, so there is one optimizer store for each trainable unit.
        master_store = next(master_stores) if plan.trainable else None
        if earlier is not None:
            earlier.gather_parameters(plan)
        unit = Unit(
            number,
            plan,
            ranks.rules.of_unit(plan),
            ranks.transport_of(plan),
            ranks.holders(plan) if earlier is None else None,
            ranks.group,
            stored,
            master_store,
            ranks.quantized_gather if setup.config.zero_optimization.quantizes_gathers(plan.trainable) else None,
            setup.config.check_parameter_writes,
        )
        # This frees the old values of the parameters, whole ones where slices were cut, and the fp32 values from which
        # a unit of lower precision was rounded.
        count_freed(sum(param.nbytes for param in unit.params) + (4 * plan.numel if unit.has_master else 0))
        yield unit
        if earlier is not None:
            earlier.move_states(unit, master_store)


def _hooked_modules(setup: EngineSetup, ranks: Ranks, placement: Placement) -> Iterator[nn.Module]:
    """Yield the modules that take hooks of forwards. See ``Forward``."""
    yield setup.model
    for plan, stored in zip(setup.plans, placement.parameter_shards, strict=True):
        if stored is not None or ranks.rules.of_unit(plan).optimizer > 1:
            yield from plan.modules


@dataclass(frozen=True)
class Passes:
    """What the forwards and the backwards of a model run through.

    Attributes:
        scaler: The loss scale.
        reducer: Collects gradients in buffers and reduces them.
        forward: Gathers what forwards need.
        backward: Gathers what backwards need, and lets units be reduced.
        gatherer: Gathers parameters before they are used and releases them afterwards.
        outside_writes: Finds values that user code wrote into the model.
        host_activations: Moves inputs of activation checkpoints to the host; None if nothing asks for it.
    """

    scaler: LossScaler
    reducer: Reducer
    forward: Forward
    backward: Backward
    gatherer: Gatherer
    outside_writes: OutsideWrites
    host_activations: HostActivations | None


def connect_passes(
    setup: EngineSetup, ranks: Ranks, partition: PartitionedModel, timer: Timer, listener: PassListener
) -> Passes:
    """Register the hooks on the model by which forwards gather parameters and backwards reduce gradients.

    Args:
        setup: What the engine is made from.
        ranks: The ranks.
        partition: The units of the model.
        timer: Times forwards, backwards and collectives.
        listener: Is told of forwards and backwards.
    """
    config, device, units, transport = setup.config, ranks.group.device, partition.units, ranks.transport
    undo = setup.partition_undo.hooks
    scaler = LossScaler(config.fp16 if config.scales_loss else None)
    collects_copies = device.type == "cuda" if setup.async_step is None else setup.async_step
    stores = partition.placement.optimizer_stores
    gradients = [
        UnitGradients(
            unit,
            ranks.transport_of(unit),
            config.accumulation_dtype(unit.dtype),
            config.reduce_dtype(unit.dtype),
            store,
        )
        for unit, store in zip((unit for unit in units if unit.trainable), stores, strict=True)
    ]
    modules = ModuleNumbers(setup.model, units)
    executor = Executor(make_schedule(units, gradients, modules, transport, config), units)
    # Gradients of fp16 must not grow with the weights, so the ranks agree on what these are divided by.
    agree = partial(_largest_of_ranks, ranks.group) if config.scales_loss else None
    weights = StepLosses(agree)
    reducer = Reducer(executor, gradients, transport, config, collects_copies, lambda: scaler.scale, weights, timer)
    if config.gradient_allreduce_op == "sum":
        reducer.gradient_factor = float(reducer.num_summed)
    num_forwards = ranks.group.divergence.num_forwards
    forward = Forward(setup.model, modules, executor, transport, reducer, config, timer, num_forwards, listener)
    for handle in forward.hook_handles:
        undo.callback(handle.remove)
    if config.memory_limit is not None and device.type == "cpu":
        limit_memory(setup.model, config.memory_limit, undo)
    # The casts prepend their hooks, so inputs are cast before the hooks above run.
    mixed_precision.install(setup.model, config, device, undo)
    if device.type == "cpu" and not gradients:
        pass_contiguous_inputs(setup.model, undo)
    # The ranks agree on all values now. Later changes of a parameter's version come from outside of the engine.
    digests, compares = reducer.assigned_digests, config.check_parameter_writes
    data_ranks = ranks.replica_group.world_size
    compared, number = (ranks.group, ranks.replica_layout.replica) if setup.model_groups else (ranks.replica_group, 0)
    outside_writes = OutsideWrites(units, compared, digests, compares, data_ranks, number)
    copies, host_activations = partition.placement.copies, None
    if config.activation_checkpointing.cpu_checkpointing and copies is not None:
        host_activations = HostActivations(setup.model, units, copies, undo)
    return Passes(scaler, reducer, forward, forward.backward, forward.gatherer, outside_writes, host_activations)


def _largest_of_ranks(group: Group, number: float) -> float:
    return max(group.all_gather_object(number, "of weights of losses"))


@dataclass(frozen=True)
class States:
    """What a step updates, and what updates it.

    Attributes:
        base_optimizer: The optimizer that was passed to ``initialize``, or was built there. It updates nothing.
        optimizer: Updates this rank's shards.
        lr_schedule: The LR schedule.
        outliers: Which steps are skipped as outliers; None without ``skip_steps``.
        outer_step: Turns what the replicas have become into common parameters; None without ``local_steps``.
        master_weights: Reads and replaces the masters between steps.
        elementwise_members: Methods of the class of ``base_optimizer`` that were found to work on shards.
    """

    base_optimizer: torch.optim.Optimizer
    optimizer: ShardedOptimizer
    lr_schedule: LRSchedule
    outliers: OutlierSteps | None
    outer_step: OuterStep | None
    master_weights: MasterWeights
    elementwise_members: set[str] = field(default_factory=set)

    def note_new_masters(self, unit: Unit, names: Sequence[str]) -> None:
        """Let parameters that every replica was given anew be what the replicas start from."""
        if self.outer_step is not None and names:
            self.outer_step.set_anchor([slot.name for slot in unit.layout.slots if slot.name not in names], unit)


def build_states(
    setup: EngineSetup,
    ranks: Ranks,
    partition: PartitionedModel,
    passes: Passes,
    timer: Timer,
    calls: EngineCalls,
    earlier: EarlierPartition | None,
) -> States:
    """Build the optimizer over shards and the schedule, and let the caller's optimizer call the engine. A collective.

    Args:
        setup: What the engine is made from.
        ranks: The ranks.
        partition: The units of the model.
        passes: Where the gradients come from and the updated parameters go.
        timer: Times the norm and the updates.
        calls: The methods of the engine that either optimizer calls.
        earlier: The partitioning before a change, whose optimizer and schedule go on; None: there are none.

    Raises:
        ZeroEngineError: On every rank: the schedule drives another optimizer, or needs a metric.
    """
    config, base_optimizer, placement = setup.config, setup.base_optimizer, partition.placement
    gradients, shards = passes.reducer.gradients, partition.restoration.shards
    # What the caller's optimizer and schedule do here may raise on one rank alone.
    with ranks.group.collective_errors("to initialize"):
        # As with units, a shard is in the list as soon as it holds a master.
        shards.extend(
            OptimizerShard(index, unit_grads, store, config.ema)
            for index, (unit_grads, store) in enumerate(zip(gradients, placement.optimizer_stores, strict=True))
        )
        split_over = ranks.replicas if setup.model_groups else None
        outliers = None if config.skip_steps is None else OutlierSteps(config.skip_steps)
        if earlier is not None:
            outliers = earlier.outliers
        reduction = StepReduction(
            shards, passes.reducer, ranks.transport, passes.outside_writes, timer, split_over, outliers
        )
        backend = partition.backend(
            BackendParts(
                base_optimizer,
                shards,
                reduction,
                passes.outside_writes,
                ranks.transport,
                passes.gatherer.publish_updates,
                placement.pipeline,
                timer,
                None if split_over is None else split_over.between,
            )
        )
        if earlier is None:
            optimizer = ShardedOptimizer(
                base_optimizer, backend, shards, reduction, step=calls.step, zero_grad=calls.zero_grad
            )
            schedule = make_scheduler(setup.lr_scheduler, optimizer, config)
        else:
            optimizer = earlier.optimizer
            optimizer.backend, optimizer.shards, optimizer.reduction = backend, shards, reduction
            earlier.finish_moves()
        outer_step = None
        if ranks.replicas is not None and config.local_steps is not None:
            nesterov = None if config.local_steps.nesterov is None else Nesterov(*config.local_steps.nesterov)
            between, device = ranks.replicas.between, ranks.group.device
            outer_step = OuterStep(shards, ranks.transport, between, nesterov, timer, device)
    master_weights = MasterWeights(optimizer, passes.gatherer, placement, passes.outside_writes, ranks.transport)
    if earlier is not None:
        lr_schedule, members = earlier.lr_schedule, earlier.elementwise_members
        return States(base_optimizer, optimizer, lr_schedule, outliers, None, master_weights, members)
    lr_schedule = LRSchedule(schedule, optimizer, base_optimizer)
    setup.undo.callback(lr_schedule.close)
    # From here on the caller's optimizer.step() ends a step of the engine. It would otherwise update parameters on this
    # rank alone.
    redirect_calls(base_optimizer, calls.step, calls.zero_grad, setup.undo)
    if isinstance(base_optimizer, MixedOptimizer):
        for member in members_of(base_optimizer):
            redirect_calls(member, base_optimizer.refuse_member_step, None, setup.undo)
    forward_own_methods(base_optimizer, calls.run_method, setup.undo)
    return States(base_optimizer, optimizer, lr_schedule, outliers, outer_step, master_weights)
