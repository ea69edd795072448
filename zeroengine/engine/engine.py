"""The engine: a thin loop over the gatherer, the reducer and the sharded optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from zeroengine.checkpoint.on_signal import SaveOnSignal
from zeroengine.comm.group import Group, check_same
from zeroengine.comm.interfaces import ChannelName
from zeroengine.config import FLOATS, Config
from zeroengine.deferred_init import meta_init
from zeroengine.disk.swap_files import populate
from zeroengine.engine import mixed_precision
from zeroengine.engine.accumulation import ENGINE_STEP, MANUAL_MODE, OPTIMIZER_STEP, Accumulation
from zeroengine.engine.backward import Backward
from zeroengine.engine.dataloader import ResumableLoader
from zeroengine.engine.duplicate_inputs import InputComparison
from zeroengine.engine.foreign_parameters import ForeignParameters
from zeroengine.engine.full_values import Access
from zeroengine.engine.gathered import claim
from zeroengine.engine.late import Settled
from zeroengine.engine.memory import Memory
from zeroengine.engine.oom import explaining_memory
from zeroengine.engine.step import Steps
from zeroengine.errors import ZeroEngineError
from zeroengine.migration.messages import engine_attribute, explains_arguments
from zeroengine.migration.names import UNPACKED_CLIENT_STATE, UNPACKED_ENGINE
from zeroengine.offload import offload_states as parking
from zeroengine.offload.device_copies import Copies
from zeroengine.offload.disk_store import Medium, OffloadStore
from zeroengine.offload.offload_states import StateOffloader, resident_bytes
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.placement import place_states
from zeroengine.optim.caller_optimizer import redirect_calls
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.lr_schedules import LRSchedulerLike, make_scheduler
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.optim.step_result import StepResult
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees, degrees_of_stage
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.reserve import expected, needed, slots_needed
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.call_site import returns_one_value
from zeroengine.utils.compiler_disable import eager
from zeroengine.utils.malloc_trim import Freed, return_freed_memory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.data import Dataset

    from zeroengine.checkpoint.manager import CheckpointManager
    from zeroengine.checkpoint.snapshot import EngineParts
    from zeroengine.weights.live_weights import LoadResult, Weights

log = logging.getLogger("zeroengine")


class Engine:
    """Trains a partitioned model. Made by ``initialize``.

        loss = engine(*batch)
        engine.backward(loss)
        engine.step()

    Attributes:
        module: the model that was passed in.
        optimizer: a ``torch.optim.Optimizer`` over the model's parameters, for LR schedulers and hyperparameters.
        lr_scheduler: what ``step`` steps, or None.
        config: the resolved configuration.
        device: where the model computes.
        global_steps: updates taken.
        micro_steps: calls of ``step``; where ``optimizer.step()`` ends a step, ``gradient_accumulation_steps`` at once.
        skipped_steps: updates left out because the gradient was not finite.
        loss_scale: what ``backward`` multiplies the loss by: 1 except where gradients may be fp16. Assign to it to
            start a dynamic scale elsewhere, or to change a static one.
        grad_norm: global norm of the last step's mean gradient before clipping, or None before the first.

    On a GPU ``global_steps``, ``skipped_steps`` and ``grad_norm`` wait for the norm of the last step; ``micro_steps``
    does not. See the note in ``late.py``.
    """

    global_steps = Settled[int]("taken")
    skipped_steps = Settled[int]("skipped")
    grad_norm = Settled["float | None"]("norm")

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        group: Group,
        plans: Sequence[UnitPlan],
        lr_scheduler: LRSchedulerLike,
        *,
        on_device: bool | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.module, self.config, self.device = model, config, group.device
        self.rank, self.world_size = group.rank, group.world_size
        self._accumulation = Accumulation(
            None if config.manual_accumulation else int(config.gradient_accumulation_steps), group.rank
        )
        self._group = group
        self._state_offloader = StateOffloader()
        zero = config.zero_optimization
        self._transport = group.transport(
            config.comm.transport, config.comm.timeout_seconds, config.comm.register_buffers
        )
        degrees = degrees_of_stage(zero.stage, group.world_size)
        with group.agreeing("to initialize"):
            self._placement = place_states(plans, degrees, config, self._transport, group.device, copies)
        each = [self._degrees_of(plan, degrees) for plan in plans]
        slots = None
        if group.symmetric:  # before any other memory of the channels
            expecting = expected(plans, each, self._placement, config, self._transport)
            group.reserve(needed(expecting, zero.prefetch_bucket_size, zero.reduce_bucket_size))
            slots = slots_needed(expecting, zero.reduce_bucket_size)
        masters = iter(self._placement.optimizer)
        freed = Freed()
        self._units = [
            self._build(plan, its, offloaded_shards, next(masters) if plan.trainable else None, freed)
            for plan, its, offloaded_shards in zip(plans, each, self._placement.parameters, strict=True)
        ]
        meta_init.guard(model, self._units)
        mixed_precision.prepare_buffers(model, config, group.device, group.broadcast)
        self._scaler = LossScaler.of(config.fp16) if config.scales_loss else LossScaler()
        self._backward = Backward(self._scaler, config.scales_loss, self._accumulation, self._backward_begins)
        self.gatherer = Gatherer(
            model,
            self._units,
            self._transport,
            prefetch_numel=zero.prefetch_bucket_size if zero.overlap_comm else 0,
            max_live_numel=zero.max_live_parameters,
            enter_forward=self._backward.enter_forward,
        )
        self.reducer = Reducer(
            self._units,
            self._transport,
            bucket_numel=zero.reduce_bucket_size,
            accumulation_dtype=config.accumulation_dtype,
            reduce_dtype=config.reduce_dtype,
            predivide=config.predivide(group.world_size),
            complete=self.gatherer.complete,
            arriving=self._backward.arriving,
            stores=self._placement.optimizer,
            together=self.device.type == "cuda" if on_device is None else on_device,
            slots=slots,
        )
        self._backward.gatherer, self._backward.reducer = self.gatherer, self.reducer
        self._writes = OutsideWrites(self._units, group)
        with group.agreeing("to initialize"):
            self.optimizer = ShardedOptimizer(
                optimizer,
                self.reducer.gradients,
                self._transport,
                publish=self._published,
                step=self._step_by_optimizer,
                zero_grad=self.zero_grad,
                writes=self._writes,
                moments_dtype=FLOATS[config.optimizer_state_dtype],
                stores=self._placement.optimizer,
                pipeline=self._placement.pipeline,
                on_device=on_device,
            )
            schedule = make_scheduler(lr_scheduler, self.optimizer, config)
        self._steps = Steps(
            config,
            self.optimizer,
            optimizer,
            schedule,
            self._scaler,
            self.reducer,
            self._transport,
            self._wait_for_peer_reads,
        )
        self._foreign = ForeignParameters(model, self._units, optimizer, self.rank)
        self._input_comparison = InputComparison(self._transport, self.device)
        redirect_calls(optimizer, self._step_by_optimizer, self.zero_grad)
        self._checkpoints: CheckpointManager | None = None
        self._on_signal = SaveOnSignal(config, group) if config.checkpoint.on_signal else None
        self._stateful: dict[str, Stateful] = {}
        self._access = Access(
            self._units,
            group,
            self._transport,
            self.gatherer,
            self.reducer,
            self.optimizer,
            self._writes,
            self._steps.divisor,
            self._accumulation,
            self._backward.end_if_over,
        )
        claim((param for unit in self._units for param in unit.params), self._access)
        mixed_precision.install(model, config, self.device)
        return_freed_memory()
        if self.rank == 0:
            for notice in config.notices:
                log.warning(notice)
            if config.comm.register_buffers and self._transport.name != "nccl":
                log.warning("comm.register_buffers has no effect: nothing moves by NCCL here")
            if config.comm.transport == "shm" and group.device.type != "cpu":
                log.warning('comm.transport "shm" has no effect: it is for ranks that compute on CPUs')
            if config.dump_state:
                print(config.describe(), flush=True)

    if not TYPE_CHECKING:  # a type checker refuses both by itself

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property that raised AttributeError, which is not that there is none
                object.__getattribute__(self, name)
            raise AttributeError(engine_attribute(name, self))

        def __getitem__(self, index: object) -> NoReturn:
            """Raise TypeError: ``initialize`` is not DeepSpeed's, which returns four. Unpacking comes here, too."""
            raise TypeError(UNPACKED_ENGINE)

    def _degrees_of(self, plan: UnitPlan, degrees: Degrees) -> Degrees:
        if plan.numel <= self.config.zero_optimization.param_persistence_threshold:
            return dataclasses.replace(degrees, parameters=1)
        return degrees

    def _build(
        self,
        plan: UnitPlan,
        degrees: Degrees,
        offloaded_shards: OffloadedShards | None,
        master_store: OffloadStore | None,
        freed: Freed,
    ) -> Unit:
        unit = Unit(plan, degrees, self._transport, self._group.broadcast, offloaded_shards, master_store)
        # What its parameters had before, and what went into making their values, in fp32 if they are rounded then.
        freed.add(unit.full_buffer.nbytes + (4 * plan.numel if unit.is_mixed_precision else 0))
        return unit

    # -- training ---------------------------------------------------------------------------------

    @explaining_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. On a GPU tensors in CPU memory among its inputs are copied there first."""
        if self._state_offloader:
            self._state_offloader.check_resident("the forward", ("parameters",))
        if self.module.training and not self.gatherer.num_user_gathered:
            self._input_comparison.observe((args, kwargs))
        with self.gatherer.model_forward():
            return self.module(*args, **kwargs)

    forward = __call__

    @eager
    @explaining_memory
    @explains_arguments
    def backward(
        self,
        loss: torch.Tensor,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Computes gradients, and reduces them where this micro-step calls for it.

        The loss is scaled by ``loss_scale`` first. The mean over ranks and over ``gradient_accumulation_steps``
        micro-steps is taken in the update. Several calls before one ``step`` add up.

        Args:
            loss: a scalar that depends on the parameters.
            retain_graph, create_graph, inputs: as of ``Tensor.backward``.

        Raises:
            ZeroEngineError: ``loss`` is not a scalar tensor, or is detached.
        """
        if not isinstance(loss, torch.Tensor):
            raise ZeroEngineError(f"backward() takes the loss tensor, found {type(loss).__name__}")
        if loss.numel() != 1:
            raise ZeroEngineError(
                f"backward() takes a scalar loss, found shape {tuple(loss.shape)}: reduce it first, such as loss.mean()"
            )
        if not loss.requires_grad:
            raise ZeroEngineError(
                "backward(): the loss is detached from the parameters. Compute it from engine(...), outside "
                "torch.no_grad(), without .detach() or .item()"
            )
        self._state_offloader.check_resident("backward()")
        self._backward.run(loss, retain_graph, create_graph, inputs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times ``loss_scale``, at least in fp32, for a plain ``engine.scale(loss).backward()``."""
        return self._backward.scaled(loss)

    @property
    def loss_scale(self) -> float:
        return self._scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not self.config.scales_loss:
            raise ZeroEngineError(
                'loss_scale: only fp16 scales the loss; enable it with "fp16": {"enabled": true} in the configuration'
            )
        self._backward.end_if_over()
        if self._accumulation.has_gradients:
            raise ZeroEngineError(
                "loss_scale: the gradients of this step so far have another scale. Assign to it after the step() that "
                "ends one, before the next backward."
            )
        self._scaler.set(scale)

    @property
    def micro_steps(self) -> int:
        return self._accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, micro_steps: int) -> None:
        self._accumulation.micro_steps = micro_steps

    @property
    def lr_scheduler(self) -> Any:
        return self._steps.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._steps.set_schedule(schedule)

    def _backward_begins(self, wanted: bool) -> None:
        self._steps.conclude()
        if wanted:  # else a loss of another model passes through this one, which is frozen meanwhile
            self._steps.check_not_clipped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that came since the last ``step``, such as those that another model's loss left here.

        After a backward that raised in the middle of a step, drop all gradients of the step, which starts anew.
        Directly after a step it does nothing: a step's first gradients overwrite those of the step before.

        Raises:
            ZeroEngineError: earlier micro-steps of this step would lose theirs, too.
        """
        self._backward.finish()
        if not self._accumulation.incomplete:
            if not self._accumulation.has_new_gradients:
                return
            if self._accumulation.has_earlier_micro_steps:
                raise ZeroEngineError(
                    "zero_grad() between backward() and step(), with gradients of earlier micro-steps: they would be "
                    "lost. Call it before the first backward of a step."
                )
        self._steps.forget_clipping()
        self._backward.drop()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step in progress ends with an update."""
        self._backward.end_if_over()
        return self._accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """With manual accumulation: say before a backward whether it is the last one of the step.

        After True the gradients are reduced while that backward computes, rather than in ``step``; they are the same
        either way. After False ``step`` ends a micro-step and does not update, as in DeepSpeed. Holds until an update.

        Raises:
            ZeroEngineError: ``gradient_accumulation_steps`` is a number, so the engine counts.
        """
        self._backward.end_if_over()
        self._accumulation.set_boundary(is_boundary)

    @property
    def gradient_clipping(self) -> float:
        """The largest global norm of the gradient; 0: no clipping. Assign the same value on every rank."""
        return self._steps.gradient_clipping

    @gradient_clipping.setter
    def gradient_clipping(self, max_norm: float) -> None:
        self._steps.set_gradient_clipping(max_norm)

    @eager
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient of this step to ``max_norm``: what ``torch.nn.utils.clip_grad_norm_`` does elsewhere.

        Reduce what is not reduced yet, return the global norm of the mean gradient before clipping, and let the next
        ``step`` clip to ``max_norm`` (to ``gradient_clipping``, where that is smaller). Call it on every rank, between
        the last backward of a step and ``step``.

        Args:
            max_norm: above 0. ``math.inf`` clips nothing and returns the norm.

        Returns:
            The norm, 0-d float64, on the engine's device. Nothing waits for it before its value is read.

        Raises:
            ZeroEngineError: there was no backward, or further backwards of this step are to come.
        """
        max_norm = self._steps.checked_norm(max_norm, "clip_grad_norm_(): max_norm", zero=False)
        self._check_step("clip_grad_norm_()")
        self._accumulation.check_boundary("clip_grad_norm_()")
        self._finish_gradients("clip_grad_norm_()")
        return self._steps.clip(max_norm)

    @eager
    @explaining_memory
    @explains_arguments
    def step(self) -> bool | StepResult:
        """Ends a micro-step; at the accumulation boundary clips, updates and steps the LR schedule.

        Where the gradient's norm is not finite nothing is changed, and ``skipped_steps`` counts it; a dynamic loss
        scale falls. With ``check_grad_overflow`` false, bf16 and fp32 update all the same.

        Returns:
            Whether parameters were updated. On a GPU an object whose truth value says so: asking it waits for the norm.

        Raises:
            ZeroEngineError: there was no backward since the last call, or ``optimizer.step()`` has ended this step, or
                it is called inside ``gathered``, ``no_sync`` or the capture of a CUDA graph, or a backward of this
                step has raised, or gradients overflow at the smallest loss scale, or the model or the optimizer has
                parameters that ``initialize`` was not given.
        """
        self._check_step("step()")
        if not self._accumulation.check_engine_step():
            self._accumulation.end_micro_step()
            self._input_comparison.end_micro_step(False)
            return False
        return self._update(ENGINE_STEP)

    @eager
    @explaining_memory
    def _step_by_optimizer(self) -> None:
        """``step()`` of ``optimizer`` or of the optimizer that was passed in. See "Who ends a step"."""
        self._check_step("optimizer.step()")
        self._accumulation.check_optimizer_step()
        self._update(OPTIMIZER_STEP)

    def _check_step(self, call: str) -> None:
        """
        Raises:
            ZeroEngineError: this is no place to end a step.
        """
        self._state_offloader.check_resident(call)
        self._placement.check_intact()
        if self._checkpoints is not None:
            self._checkpoints.check_not_half_loaded(call)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ZeroEngineError(
                f"{call} inside the capture of a CUDA graph: what it does on the host (counters, schedule, which "
                "gradients are overwritten) would not be done again at a replay. Leave it outside of the graph; what "
                "can be captured is the update itself, zeroengine.ops.AdamTable."
            )
        if torch._C._current_graph_task_id() >= 0:
            raise ZeroEngineError(f"{call} inside of a backward, such as in a hook: call it after the backward")
        self._backward.finish()  # if the last backward raised, its gradients must not be used

    def _finish_gradients(self, call: str) -> None:
        """Return with the gradients of this step reduced. If it raises nothing has changed."""
        if not self.reducer.sync_enabled:
            raise ZeroEngineError(
                f"{call} inside `with engine.no_sync()`: at the accumulation boundary the gradients are to be reduced. "
                "Leave the `with` before the last backward of a step."
            )
        if self.gatherer.num_user_gathered:
            raise ZeroEngineError(
                f"{call} inside `with zeroengine.gathered(...)`: the update would not reach the gathered values. Leave "
                "the `with` first."
            )
        self._foreign.check()
        self.reducer.reduce_remaining()

    def _update(self, call: str) -> bool | StepResult:
        self._finish_gradients(call)
        self.gatherer.finish_gathers_and_release(
            before_update=True
        )  # if it raises nothing has changed, and step() may be called again
        self._accumulation.end_step(call)
        self._input_comparison.end_micro_step(True)
        if call == ENGINE_STEP:
            self._steps.warn_of_unused_hooks()
        updates = self._steps.take()
        self._writes.remember()
        self._placement.evict()
        if self._on_signal is not None and self._on_signal.is_due():
            self._on_signal.save_and_exit(self)
        return updates

    def _wait_for_peer_reads(self) -> None:
        if not self._transport.overlaps:  # nothing to gain from waiting; and peers read this rank's own parameters
            self.gatherer.finish_gathers_and_release()
            self._transport.fence()

    def _published(self, grads: UnitGradients) -> None:
        unit = grads.unit
        torch.autograd.graph.increment_version(unit.params)  # autograd refuses a graph that saved the values before
        if unit.degrees.optimizer > unit.degrees.parameters:
            self.gatherer.all_gather_updated(unit)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the next one outside reduces the sum.

        Legal at every stage. At stages 2 and 3 it holds whole gradients meanwhile.
        """
        self._backward.end_if_over()  # a plain backward before the `with`, and the last one in it, end as they began
        before, self.reducer.sync_enabled = self.reducer.sync_enabled, False
        try:
            yield
        finally:
            try:
                self._backward.end_if_over()
            finally:
                self.reducer.sync_enabled = before

    def train(self, mode: bool = True) -> Engine:
        """Sets training mode, as ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    # -- making room ------------------------------------------------------------------------------

    @explains_arguments
    def offload_states(
        self,
        include: Sequence[str] | None = None,
        *,
        device: Literal["cpu", "nvme"] = "cpu",
        nvme_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Frees the device's memory for another job, such as generation, until ``reload_states``.

        Call it on every rank, between steps. Where the engine computes on the CPU, ``device="cpu"`` frees nothing.

        Args:
            include: of "optimizer" (masters and moments), "gradients" and "parameters". None: the first two, as far
                as their memory can be given back. Without parameters nothing but ``reload_states`` works.
            device: where they go.
            nvme_path: a folder on a disk, for device "nvme"; that of the configuration where None.

        Raises:
            ZeroEngineError: an unknown state, memory that cannot be given back, or a folder that cannot be used.
        """
        zero = self.config.zero_optimization
        configured = zero.offload_optimizer.disk or zero.offload_param.disk
        arguments = {"include": None if include is None else sorted(include), "device": device}
        with self._group.agreeing("to offload states", arguments) as every_rank:  # each may have a disk of its own
            path = self._state_offloader.check_request(include, device, nvme_path, configured)
        check_same("offload_states()", every_rank)
        self._backward.end_if_over()
        self._steps.conclude()  # it may ask for the gradients
        self.gatherer.finish_gathers_and_release()
        self.reducer.wait_reduces()
        self._transport.fence()
        if device == "cpu" and self.device.type == "cpu":
            return
        every = {
            "optimizer": self.optimizer.tensors(),
            "gradients": [grads.grad_shard for grads in self.reducer.gradients if grads.store is None],
            "parameters": [unit.shard for unit in self._units if unit.offloaded_shards is None],
        }
        if include is None:
            include = parking.USUAL
            every = {name: [t for t in of if t.untyped_storage().resizable()] for name, of in every.items()}
        states = {name: every[name] for name in include}
        with self._group.agreeing("to offload states"):
            self._state_offloader.offload(states, path, self.config, self.rank)
        return_freed_memory()

    @explains_arguments
    def reload_states(self) -> None:
        """Brings back what ``offload_states`` took away. Call it on every rank."""
        channels: dict[int, ChannelName | None] = {id(unit.shard): "gather" for unit in self._units}
        channels |= {id(grads.grad_shard): grads.channel for grads in self.reducer.gradients}
        self._state_offloader.reload(lambda tensor: self._transport.refill(tensor, channels.get(id(tensor))))

    # -- looking inside ---------------------------------------------------------------------------

    def memory(self) -> Memory:
        """The bytes that each state holds on this rank now."""
        here, in_cpu, on_disk = (self._bytes_in(medium) for medium in (None, "cpu", "nvme"))
        of_host = self._placement.host_buffer_bytes
        at_host = self.device.type == "cpu"
        copied = 0 if self._checkpoints is None else self._checkpoints.copy_bytes
        return Memory(
            device=str(self.device),
            **here,
            buckets=self.reducer.bucket_bytes(),
            put_off={unit.name: unit.gathered_bytes() for unit in self.gatherer.deferred_frees()},
            gathered=sum(unit.gathered_bytes() for unit in self._units),
            staging=self._placement.send_buffer_bytes + (of_host if at_host else 0),
            checkpoint=copied if at_host else 0,
            cpu=in_cpu | ({} if at_host else {"staging": of_host, "checkpoint": copied}),
            nvme=on_disk,
        )

    def _bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Of each state in a kind of memory; None: on the device."""
        shards = ((unit.shard, unit.offloaded_shards) for unit in self._units)
        gradients = ((grads.grad_shard, grads.store) for grads in self.reducer.gradients)
        found = self.optimizer.bytes_in(medium)
        for name, of in (("parameters", shards), ("gradients", gradients)):
            found[name] = sum(
                resident_bytes(t) for t, store in of if (None if store is None else store.medium) == medium
            )
        return found

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """What ``model.state_dict()`` would be without partitioning, on CPU. Call it on every rank.

        Args:
            rank0_only: the other ranks return an empty dict and hold one unit at a time.

        Raises:
            ZeroEngineError: on every rank, where the model has parameters that ``initialize`` was not given.
        """
        with self._group.agreeing("to collect the state dict"):
            self._foreign.check()
        keep = self.rank == 0 or not rank0_only
        values: dict[nn.Parameter, torch.Tensor] = {}
        for unit in self._units:
            self.gatherer.pin(unit)
            if keep:
                values |= {param: param.detach().to("cpu", copy=True) for param in unit.params}
            self.gatherer.unpin(unit)
        if not keep:
            return {}
        state: dict[str, torch.Tensor] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            state |= {f"{dot}{n}": values[p] for n, p in module._parameters.items() if p is not None}
            skip = module._non_persistent_buffers_set
            buffers = ((n, b) for n, b in module._buffers.items() if b is not None and n not in skip)
            state |= {f"{dot}{n}": b.detach().to("cpu", copy=True) for n, b in buffers}
        return state

    # -- data -------------------------------------------------------------------------------------

    def dataloader(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, **options: Any
    ) -> ResumableLoader:
        """Batches of this rank's share of ``dataset``, whose position is part of every checkpoint.

        A checkpoint loaded on another number of ranks goes on at the same place of the same epoch.

        Args:
            dataset: with ``__len__`` and ``__getitem__``, the same on every rank.
            seed: of the order of each epoch.
            options: further arguments of ``torch.utils.data.DataLoader``, such as ``num_workers``.

        Raises:
            ZeroEngineError: ``dataset`` has no length, or too few samples.
        """
        micro_batch = self.config.train_micro_batch_size_per_gpu
        loader = ResumableLoader(
            dataset, self.rank, self.world_size, micro_batch, shuffle=shuffle, seed=seed, options=options
        )
        self.register_stateful(f"dataloader.{sum(name.startswith('dataloader.') for name in self._stateful)}", loader)
        return loader

    def register_stateful(self, name: str, stateful: Stateful) -> None:
        """Makes the state of an object of yours part of every checkpoint, on each rank its own.

        Such as torchdata's ``StatefulDataLoader``. Register it under the same name before or after
        ``load_checkpoint``. What was saved on another number of ranks is left out with a warning.

        Args:
            stateful: has ``state_dict()`` (of tensors, numbers, strings, and containers of them) and
                ``load_state_dict(state)``.

        Raises:
            ZeroEngineError: it has not, or the name is taken.
        """
        if name in self._stateful:
            raise ZeroEngineError(f"register_stateful(): the name {name!r} is taken")
        if not all(callable(getattr(stateful, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ZeroEngineError(
                f"register_stateful() takes an object with state_dict() and load_state_dict(), found "
                f"{type(stateful).__name__}"
            )
        self._stateful[name] = stateful
        if self._checkpoints is not None:
            self._checkpoints.hand_over(name)

    # -- checkpoints ------------------------------------------------------------------------------

    @explains_arguments
    def save_checkpoint(
        self, directory: str | os.PathLike[str], tag: str | None = None, client_state: Any = None
    ) -> None:
        """Writes a checkpoint, ``directory/tag``, that loads at any stage, world size and precision.

        It is whole or absent: whatever happens meanwhile, the checkpoints before it stay as they are. With
        ``checkpoint.async_save`` it returns once the state is copied to CPU memory, and a failure surfaces on every
        rank at the next save, load, or ``close``. Call it on every rank, between steps.

        Args:
            tag: the checkpoint's name; ``step-<global_steps>`` where None.
            client_state: what else is to be kept: tensors, numbers, strings, and lists, tuples and dicts of them.
                Rank 0's counts. Its tensors come back on the CPU.

        Raises:
            ZeroEngineError: on every rank; there is no such checkpoint then.
            DivergenceError: on every rank, where they name different folders or tags.
        """
        self._backward.end_if_over()
        with self._group.agreeing("to save a checkpoint"):
            self._state_offloader.check_resident("save_checkpoint()")
            self._placement.check_intact()
            self._foreign.check()
            if self._accumulation.has_gradients:
                raise ZeroEngineError(
                    "save_checkpoint() between the micro-steps of a step would lose their gradients: call it after a "
                    "step() that updated. Where the last step of an epoch has fewer micro-steps, write "
                    f"{MANUAL_MODE} in the configuration and end it with step()."
                )
        self._steps.conclude()
        self._settle_parameters()
        self._checkpoint_manager().save(directory, f"step-{self.global_steps}" if tag is None else tag, client_state)

    @returns_one_value(UNPACKED_CLIENT_STATE)
    @explains_arguments
    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        weights_only: bool = False,
        strict: bool = True,
        fallback: bool = False,
    ) -> Any:
        """Takes over a checkpoint, whatever stage, world size and precision it was saved at.

        In the same shape training goes on bit for bit; in another, within the order of reductions. Also reads what
        plain torch Distributed Checkpoint wrote of a model and its optimizer, such as under FSDP2. Call it on every
        rank, between steps.

        Args:
            tag: the checkpoint's name; the newest where None.
            weights_only: parameters and buffers alone; optimizer, schedule and counters stay as they are.
            strict: the checkpoint's model must be this one. False: what both have is loaded.
            fallback: where the checkpoint is damaged, take the newest that is whole.

        Returns:
            The ``client_state`` that was saved; None where none was.

        Raises:
            ZeroEngineError: the call's result is unpacked, ``path, client_state = ...``, and is a dict or None.
            CheckpointError: on every rank; the engine is as it was.
            DivergenceError: on every rank, where they name different folders or tags; the engine is as it was.
        """
        with self._group.agreeing("to load a checkpoint"):
            self._state_offloader.check_resident("load_checkpoint()")
            self._foreign.check()
        self._steps.conclude()
        self._backward.finish()
        self._settle_parameters()
        restored = self._checkpoint_manager().load(
            directory, tag, weights_only=weights_only, strict=strict, fallback=fallback
        )
        meta_init.loaded(self._units, restored.missing)
        counters = restored.counters
        if counters:  # else the weights alone were loaded, and the step in progress goes on
            self._steps.forget_clipping()
            self._backward.drop()
        for name in self._counters():
            setattr(self, name, counters.get(name, getattr(self, name)))
        if counters and not self.config.manual_accumulation:  # another accumulation counts otherwise
            self.micro_steps = (self.global_steps + self.skipped_steps) * int(self.config.gradient_accumulation_steps)
        return restored.client_state

    def wait_for_checkpoint(self) -> None:
        """Returns when no checkpoint is being saved in the background any more. Call it on every rank.

        Raises:
            CheckpointError: on every rank, where the save failed.
        """
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        shard_size: str | int = "5GB",
    ) -> None:
        """Writes parameters and buffers as safetensors with an index, as Hugging Face loads them: as zero-export does.

        Each rank writes what it owns, so no rank ever holds the model. Weights that are in ``directory`` give way, as
        a whole; other files there stay. Call it on every rank.

        Args:
            directory: the same for all ranks, on a disk that they share.
            dtype: what floating tensors are cast to: fp32, bf16 or fp16. None: parameters are the fp32 masters.
            shard_size: bytes of values in a file at most, such as ``5GB``.

        Raises:
            CheckpointError: on every rank; what was in ``directory`` is as it was.
            DivergenceError: on every rank, where they pass different arguments.
        """
        from zeroengine.weights.live_weights import save

        with self._group.agreeing("to save weights"):
            self._foreign.check()
            if self._checkpoints is not None:
                self._checkpoints.check_not_half_loaded("save_weights()")
        self._settle_parameters()
        save(self._parts(), directory, dtype, shard_size)

    def load_weights(self, weights: Weights, *, strict: bool = True) -> LoadResult:
        """Takes over parameters and buffers from files or a state dict; optimizer, schedule and counters stay.

        Each rank reads the parts that it owns, cast to its own dtypes. Masters and the parameters that are computed
        with both get them. A tied parameter may go by any of its names. Call it on every rank.

        Args:
            weights: a ``.safetensors``, ``.bin`` or ``.pt`` file (of tensors alone: pickled code is refused), an index
                of several, a folder with any of these; or a state dict, of which rank 0's counts: the others may pass
                None, and are sent a bounded piece of it at a time.
            strict: every name must be on both sides. False: what both have is loaded.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

        Raises:
            CheckpointError: on every rank, with the names and shapes that differ; the engine is as it was.
            DivergenceError: on every rank, where they name different files; the engine is as it was.
        """
        from zeroengine.weights.live_weights import load

        with self._group.agreeing("to load weights"):
            self._state_offloader.check_resident("load_weights()")
            self._foreign.check()
            if self.gatherer.num_user_gathered:
                raise ZeroEngineError(
                    "load_weights() inside `with zeroengine.gathered(...)`: its end would write the old values back. "
                    "Leave the `with` first."
                )
        self._backward.finish()
        self._settle_parameters()
        found = load(self._parts(), weights, strict)
        meta_init.loaded(self._units, found.missing_keys)
        return found

    def _settle_parameters(self) -> None:
        """Return when nothing reads or writes parameters and masters, and masters are what the model computes with.

        Call it on every rank, before they are saved or replaced.

        Raises:
            DivergenceError: on every rank, where the ranks wrote different values into the model.
        """
        self.gatherer.finish_gathers_and_release()
        self._placement.finish_copies()
        self._writes.compare()
        self.optimizer.reload_masters()
        self._placement.evict()

    def _parts(self) -> EngineParts:
        from zeroengine.checkpoint.snapshot import EngineParts

        return EngineParts(
            self.module,
            self._units,
            self.optimizer,
            self.lr_scheduler,
            self._scaler,
            self.config,
            self._group,
            self._counters,
            self._republish,
            self._stateful,
            bool(self._placement.disks),
            self._placement.evict,
        )

    def _checkpoint_manager(self) -> CheckpointManager:
        if self._checkpoints is None:
            from zeroengine.checkpoint.manager import (
                CheckpointManager,
            )  # torch's own part of it takes 50 MB and a second

            self._checkpoints = CheckpointManager(self._parts())
        return self._checkpoints

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("global_steps", "micro_steps", "skipped_steps")}

    def _republish(self) -> None:
        """The masters were written from outside: everybody computes with their values from now on."""
        self._placement.finish_copies()
        for states in self.optimizer.units:
            if states.mixed:
                populate(states.master)
                populate(states.param, write=True)
                states.param.copy_(states.master)
            self._published(states.grads)
            self._placement.evict(states.param, states.master)
        self._writes.remember()
        self.gatherer.finish_gathers_and_release()
        self._transport.fence()

    def close(self) -> None:
        """Gives back what the engine holds outside of tensors. The model keeps working where it is not partitioned.

        Call it on every rank. On a GPU it also says what became of the last step, where nobody has asked, unless it is
        called because of an error.
        """
        try:
            if self._on_signal is not None:
                self._on_signal.close()
            if self._checkpoints is not None:
                self._checkpoints.close()
            self.gatherer.finish_gathers_and_release()
            if sys.exc_info()[0] is None:  # else the device may never get there
                self._steps.end()
        finally:
            self._steps.close()
            self._transport.close()
            self._placement.close()
