"""The parts of an engine. Each is complete when its constructor returns, and uses only parts that were built before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn

from zeroengine.checkpoint.on_signal import SaveOnSignal
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.logged_transport import log_collectives
from zeroengine.comm.packing import ErrorFeedback
from zeroengine.comm.quantized_transport import QuantizedGather, QuantizedReduce, QuantizedTransport
from zeroengine.comm.replicas import RankSums, Replicas, SumsOverReplicas
from zeroengine.comm.transports.choose import unused_keys
from zeroengine.config import FLOATS, Config
from zeroengine.config.zero import LoCo
from zeroengine.engine.accumulation import Accumulation
from zeroengine.engine.duplicate_inputs import InputComparison
from zeroengine.engine.foreign_parameters import ForeignParameters
from zeroengine.engine.monitoring import start_monitor
from zeroengine.engine.peak_rates import peak_flops_of
from zeroengine.engine.progress import ProgressPrinter
from zeroengine.engine.restoration import Restoration
from zeroengine.engine.step import StepRunner
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.forward_profile import ForwardProfiler
from zeroengine.monitor.profile_table import ProfiledRank
from zeroengine.monitor.record import EventKind
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import Copies
from zeroengine.offload.placement import Placement, place_states
from zeroengine.offload.state_offloader import StateOffloader
from zeroengine.optim.caller_optimizer import redirect_calls
from zeroengine.optim.choice import choose_backend, update_request
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import LRSchedulerLike, check_scheduler, make_scheduler
from zeroengine.optim.master_weights import MasterWeights
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.outer_step import Nesterov, OuterStep
from zeroengine.optim.own_methods import CallOverShards, forward_own_methods
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.plan.search.automatic import StatePlanner
from zeroengine.runtime import mixed_precision
from zeroengine.runtime.forward import Forward
from zeroengine.runtime.module_hooks import check_hooks_allowed
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.utils.byte_counter import call_every
from zeroengine.utils.listed import listed
from zeroengine.utils.malloc_trim import trim_heap

log = logging.getLogger("zeroengine")

# The number of parameters without values that an error names.
NUM_SHOWN = 5
# The freed bytes after which the C allocator is told to give memory back.
TRIM_INTERVAL_BYTES = 64 << 20


class EngineParts:
    """The parts of one engine, built on every rank. Building them partitions ``model``.

    Args:
        model: The model; its parameters keep their objects, shapes and names.
        base_optimizer: An optimizer over the model's own parameters, whose rule and param groups are adopted.
        config: The resolved configuration, the same on every rank.
        group: All ranks.
        replicas: The replicas that ``local_steps`` divides them into, each of which holds the states once. None: all
            ranks are one.
        transport: Moves bytes between the ranks of the replica.
        planner: Predicts what the states take, for advice.
        plans: The units that the model is cut into.
        lr_scheduler: A schedule over ``base_optimizer``, a callable that makes one, or None.
        async_step: Whether a step is issued without waiting for its norm. None: on a GPU, where possible.
        copies: Moves tensors between the device and the host. None: as the device requires.
        undo: Receives the calls that make ``model``, ``base_optimizer`` and ``lr_scheduler`` ordinary again, with their
            values at that time, and that free the engine's threads, files and other resources.
        end_step: Called by ``step()`` of either optimizer.
        zero_grad: Called by ``zero_grad()`` of either optimizer.
        call_optimizer: Called by the methods that the class of ``base_optimizer`` adds to torch's ``Optimizer``.

    Attributes:
        model: The module that was passed to ``initialize``.
        config: The resolved configuration.
        group: All ranks.
        replicas: The replicas of ``local_steps``, if there are several.
        replica_layout: Which ranks are in which replica.
        replica_group: The ranks that the states are partitioned over: those of this rank's replica.
        transport: Moves bytes between the ranks of ``replica_group``.
        rank_sums: Sums small vectors over all ranks.
        quantized_gather: Gathers parameters inexactly; None if nothing asks for it.
        quantized_reduce: Sums gradients inexactly, as the reduce channel of ``transport``; None likewise.
        monitor: Records each step. None: nothing asks for it.
        timer: Times the kinds of work; it does nothing without a monitor.
        forward_profiler: Profiles one forward by module; None if nothing asks for it, and on other ranks than 0.
        planner: Predicts what other stages and places of the states would take.
        placement: The states that live in CPU memory or on a disk, and the stores that they live in.
        units: All units of the model, in the order of registration.
        scaler: The loss scale.
        reducer: Collects gradients in buffers and reduces them.
        forward: Gathers what forwards need.
        backward: Gathers what backwards need, and lets units be reduced.
        gatherer: Gathers parameters before they are used and releases them afterwards.
        accumulation: Counts micro-steps, and decides which call may end a step.
        outside_writes: Finds values that user code wrote into the model.
        optimizer: Updates this rank's shards.
        master_weights: Reads and replaces the masters between steps.
        outer_step: Turns what the replicas have become into common parameters; None without ``local_steps``.
        progress: Prints a line from time to time; None if nothing asks for it, and on other ranks than 0.
        step_runner: Clips, updates, steps the LR schedule, and counts.
        foreign_parameters: Finds parameters that ``initialize`` was not given.
        input_comparison: Warns where ranks train on the same samples.
        state_offloader: Moves states away from the device on request.
        save_on_signal: Saves a checkpoint when a signal arrives; None if that is not configured.
        restoration: Makes the parameters whole and ordinary when the engine ends.
        elementwise_members: Methods of the optimizer's class that were found to work on shards.
        undo: The calls that end the engine. ``restoration`` is one of them.
    """

    has_ended = False

    def __init__(
        self,
        model: nn.Module,
        base_optimizer: torch.optim.Optimizer,
        config: Config,
        group: Group,
        replicas: Replicas | None,
        transport: Transport,
        planner: StatePlanner,
        plans: Sequence[UnitPlan],
        lr_scheduler: LRSchedulerLike,
        async_step: bool | None,
        copies: Copies | None,
        undo: ExitStack,
        end_step: Callable[[], None],
        zero_grad: Callable[[], None],
        call_optimizer: CallOverShards,
    ) -> None:
        self.model, self.config, self.group, self.undo = model, config, group, undo
        self.transport, self.planner = transport, planner
        self.replicas = replicas
        self.replica_group = group if replicas is None else replicas.group
        self.replica_layout = ReplicaLayout(group.rank, 1, group.world_size) if replicas is None else replicas.layout
        rules = DegreeRules.of_settings(config.zero_optimization, transport.world_size)
        # The transport may choose its channels by the degrees, and what follows stands around the chosen ones.
        self.transport.open_groups(tuple(dict.fromkeys(rules.of_unit(plan) for plan in plans)), self.replica_group)
        if config.comms_logger.enabled and group.rank == 0:
            self.transport = log_collectives(self.transport, config.comms_logger, undo)
        zero = config.zero_optimization
        self.quantized_reduce: QuantizedReduce | None = None
        if zero.gradient_bits is not None and transport.world_size > 1:
            feedback = _error_feedback(zero.zeropp_loco_param)
            is_gathered = any(rules.of_unit(plan).optimizer > 1 for plan in plans)
            # A mixture exists only with `degrees.per_unit`. See "Hops" in quantized_transport.py.
            all_reduces = transport.reduces_by_levels or not is_gathered
            self.quantized_reduce = QuantizedReduce(
                self.transport, zero.gradient_bits, feedback, group.device, all_reduces
            )
            self.transport = cast(Transport, QuantizedTransport(self.transport, self.quantized_reduce))
        quantizes = transport.world_size > 1 and any(zero.quantizes_gathers(plan.trainable) for plan in plans)
        self.quantized_gather = QuantizedGather(self.transport) if quantizes else None
        self.rank_sums: RankSums = self.transport if replicas is None else SumsOverReplicas(self.transport, replicas)
        self.monitor = start_monitor(model, config, group, plans, undo)
        self.timer = timer = Timer() if self.monitor is None else self.monitor.timer
        self.forward_profiler = _make_profiler(model, config, group, plans)
        self.save_on_signal = SaveOnSignal(config, group) if config.checkpoint.on_signal else None
        if self.save_on_signal is not None:
            undo.callback(self.save_on_signal.close)
        # Whatever can be refused without a unit is refused up to here, while the model is still as it was.
        # Placing states may create files. If one rank has no space, every rank must raise, because the others would
        # otherwise wait for it in the first broadcast below.
        with group.collective_errors("to initialize"):
            check_scheduler(lr_scheduler, base_optimizer, config)
            self.placement = place_states(plans, rules, config, self.transport, group.device, timer, copies)
            undo.callback(self.placement.close)
            check_hooks_allowed(_hooked_modules(model, plans, rules, self.placement))
            backend = choose_backend(
                update_request(base_optimizer, plans, self.placement, config, group.device, async_step)
            )
        self.units: list[Unit] = []
        shards: list[OptimizerShard] = []
        self.restoration = Restoration(self.units, group, self.replica_group, self.transport, self.placement, shards)
        undo.push(self.restoration)
        # Each unit is in the list as soon as it holds parameters, so that an error in a later unit restores them.
        self.units.extend(self._make_units(plans, rules))
        _forbid_forward_while_unset(model, self.units, undo)
        # The units have rank 0's parameters. Buffers belong to no unit, so rank 0 broadcasts them here.
        mixed_precision.prepare_buffers(model, config, group.device, group.broadcast, undo)
        self.scaler = LossScaler(config.fp16 if config.scales_loss else None)
        collects_copies = group.device.type == "cuda" if async_step is None else async_step
        stores = self.placement.optimizer_stores
        scaler = self.scaler
        self.reducer = Reducer(self.units, self.transport, config, stores, collects_copies, lambda: scaler.scale, timer)
        self.forward = Forward(model, self.units, self.transport, self.reducer, config, timer)
        for handle in self.forward.hook_handles:
            undo.callback(handle.remove)
        undo.callback(self.forward.forget_units)
        self.gatherer, self.backward = self.forward.gatherer, self.forward.backward
        if self.monitor is not None:
            self.backward.subscribe(self.monitor)
        micro_steps_per_step = None if config.manual_accumulation else int(config.gradient_accumulation_steps)
        self.accumulation = Accumulation(micro_steps_per_step, group.rank, self.backward, self.reducer)
        # The ranks agree on all values now. Later changes of a parameter's version come from outside of the engine.
        self.outside_writes = OutsideWrites(
            self.units, self.replica_group, self.reducer.assigned_checksums, config.check_parameter_writes
        )
        # What the caller's optimizer and schedule do here may raise on one rank alone.
        with group.collective_errors("to initialize"):
            # As with units, a shard is in the list as soon as it holds a master.
            shards.extend(
                OptimizerShard(index, unit_grads, store)
                for index, (unit_grads, store) in enumerate(zip(self.reducer.gradients, stores, strict=True))
            )
            self.optimizer = ShardedOptimizer(
                base_optimizer,
                backend,
                shards,
                self.reducer,
                self.transport,
                after_update=self.gatherer.publish_update,
                step=end_step,
                zero_grad=zero_grad,
                writes=self.outside_writes,
                timer=timer,
                moments_dtype=FLOATS[config.optimizer_state_dtype],
                pipeline=self.placement.pipeline,
            )
            schedule = make_scheduler(lr_scheduler, self.optimizer, config)
            self.outer_step = self._make_outer_step()
        self.master_weights = MasterWeights(
            self.optimizer, self.gatherer, self.placement, self.outside_writes, self.transport
        )
        self.progress: ProgressPrinter | None = None
        if config.steps_per_print is not None and group.rank == 0:
            self.progress = ProgressPrinter(config, group.world_size)
            self.backward.subscribe(self.progress)
        self.step_runner = StepRunner(
            config,
            self.optimizer,
            base_optimizer,
            schedule,
            self.scaler,
            self.reducer,
            self.gatherer,
            self.transport,
            self.replica_layout,
            self.backward,
            timer,
            self.report_event,
            self.progress,
        )
        undo.callback(self.step_runner.close)
        # This records the present model, so everything that replaces parameters must be done before.
        self.foreign_parameters = ForeignParameters(model, self.units, base_optimizer, group.rank)
        self.input_comparison = InputComparison(self.rank_sums, group.device)
        # From here on the caller's optimizer.step() ends a step of the engine. It would otherwise update parameters on
        # this rank alone.
        redirect_calls(base_optimizer, end_step, zero_grad, undo)
        forward_own_methods(base_optimizer, call_optimizer, undo)
        self.elementwise_members: set[str] = set()
        # The casts come last because they prepend their hooks, so inputs are cast before the gatherer's hooks run.
        mixed_precision.install(model, config, group.device, undo)
        # Whole parameters were freed in small pieces, which the C allocator would not return to the system.
        trim_heap()
        # Nothing above has failed, so gradients from before are dropped now.
        dropped = self.reducer.user_gradients.drop()
        if group.rank == 0:
            _log_notices(config, group, self.transport, self.units)
            if dropped:
                log.warning(
                    "%d parameters had a .grad from before initialize(), such as that of a test backward. It is "
                    "dropped: no step uses it. (%s)",
                    len(dropped),
                    listed(dropped, NUM_SHOWN),
                )
        self.state_offloader = StateOffloader()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Tell those who report the loss what a backward was given."""
        if self.monitor is not None:
            self.monitor.note_loss(loss)
        if self.progress is not None:
            self.progress.note_loss(loss)

    def report_event(self, kind: EventKind, step: int, text: str, **facts: Any) -> None:
        """Tell the monitor of an event, if there is a monitor. Rank 0's events count."""
        if self.monitor is not None:
            self.monitor.event(kind, step, text, **facts)

    def note_new_masters(self, unit: Unit, names: Sequence[str]) -> None:
        """Let parameters that every replica was given anew be what the replicas start from."""
        if self.outer_step is not None and names:
            self.outer_step.set_anchor([slot.name for slot in unit.layout.slots if slot.name not in names], unit)

    def _make_outer_step(self) -> OuterStep | None:
        if self.replicas is None or self.config.local_steps is None:
            return None
        nesterov = self.config.local_steps.nesterov
        hyperparameters = None if nesterov is None else Nesterov(*nesterov)
        between, device = self.replicas.between, self.group.device
        return OuterStep(self.optimizer.shards, self.transport, between, hyperparameters, self.timer, device)

    def _make_units(self, plans: Sequence[UnitPlan], rules: DegreeRules) -> Iterator[Unit]:
        """Move the model's parameters into units, one after another, and return the freed memory to the system."""
        count_freed, master_stores = call_every(TRIM_INTERVAL_BYTES, trim_heap), iter(self.placement.optimizer_stores)
        # One unit at a time frees the old values before the next unit is allocated. The peak is then the model and one
        # unit, rather than two copies of the model.
        for plan, stored in zip(plans, self.placement.parameter_shards, strict=True):
            # Frozen units have no masters, so there is one optimizer store for each trainable unit.
            master_store = next(master_stores) if plan.trainable else None
            quantizes = self.config.zero_optimization.quantizes_gathers(plan.trainable)
            unit = Unit(
                plan,
                rules.of_unit(plan),
                self.transport,
                self.group.broadcast,
                stored,
                master_store,
                self.quantized_gather if quantizes else None,
                self.config.check_parameter_writes,
            )
            # This frees the old values of the parameters, and the fp32 values from which a unit of lower precision was
            # rounded.
            count_freed(unit.full_buffer.nbytes + (4 * plan.numel if unit.is_mixed_precision else 0))
            yield unit


def _hooked_modules(
    model: nn.Module, plans: Sequence[UnitPlan], rules: DegreeRules, placement: Placement
) -> Iterator[nn.Module]:
    """Yield the modules that the gatherer registers hooks on. See ``register_hooks``."""
    yield model
    for plan, stored in zip(plans, placement.parameter_shards, strict=True):
        if stored is not None or rules.of_unit(plan).optimizer > 1:
            yield from plan.modules


def _forbid_forward_while_unset(model: nn.Module, units: Sequence[Unit], undo: ExitStack) -> None:
    """Make a forward of ``model`` raise ``ZeroEngineError`` as long as some of its parameters have no values.

    The hook that checks this removes itself when all parameters are set; ``undo`` removes it before that.
    """
    # A hook costs time at every forward, and almost every model has all its values.
    if not any(unit.unset_params for unit in units):
        return

    def check_all_set(module: nn.Module, args: Any) -> None:
        names = [slot.name for unit in units for slot in unit.layout.slots if slot.name in unit.unset_params]
        if not names:
            handle.remove()
        # A shallow copy of the model has the same hook.
        elif module is model:
            raise ZeroEngineError(
                f"these parameters were built under meta_init(values=False) and have no values yet: "
                f"{listed(names, NUM_SHOWN)}. Load them with engine.load_weights(path) or "
                "engine.load_checkpoint(directory)."
            )

    handle = model.register_forward_pre_hook(UncopiedHook(check_all_set), prepend=True)
    undo.callback(handle.remove)


def _make_profiler(model: nn.Module, config: Config, group: Group, plans: Sequence[UnitPlan]) -> ForwardProfiler | None:
    if not config.flops_profiler.enabled or group.rank != 0:
        return None
    peak = peak_flops_of(config, group.device)
    rank = ProfiledRank(group.world_size, config.train_micro_batch_size_per_gpu, peak)
    units = {plan.name for plan in plans}
    return ForwardProfiler(model, config.flops_profiler, units, rank, group.device)


def _error_feedback(section: LoCo | None) -> ErrorFeedback | None:
    return None if section is None else ErrorFeedback(section.err_beta, section.reset_T)


def _quantization_notices(config: Config, units: Sequence[Unit]) -> Iterator[str]:
    """Yield a sentence for each key of quantization that changes less than it says."""
    zero = config.zero_optimization
    gathers = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    name = "zero_quantized_weights" if zero.zero_quantized_weights else "zero_quantized_nontrainable_weights"
    if gathers and not any(unit.is_releasable for unit in units):
        yield f"{name} has no effect: every rank holds the parameters whole, as at stages 0 to 2"


def _log_notices(config: Config, group: Group, transport: Transport, units: Sequence[Unit]) -> None:
    unused = unused_keys(config.comm, transport, group.device)
    for notice in (*_quantization_notices(config, units), *config.notices, *unused):
        log.warning(notice)
    if config.dump_state:
        print(config.describe(), flush=True)
