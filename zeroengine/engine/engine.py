"""The engine, as users see it. Its parts do the work: ``parts``, ``step_loop`` and ``checkpointing``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from zeroengine.checkpoint.load_plan import LoadOptions
from zeroengine.engine import call_checks, change, ending, temporary_offload
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.average_weights import average_weights
from zeroengine.engine.dataloader import ResumableLoader
from zeroengine.engine.gathered import ParameterOwner
from zeroengine.engine.memory import Memory, explain_out_of_memory, measure_memory
from zeroengine.engine.metric_means import mean_over_ranks
from zeroengine.engine.optimizer_methods import call_over_shards
from zeroengine.engine.parts import EngineCalls
from zeroengine.engine.split_models import explain_layer_error
from zeroengine.engine.step import StepRunner
from zeroengine.engine.step_loop import StepLoop
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.migration import messages
from zeroengine.migration.names import UNPACKED_ENGINE
from zeroengine.optim.state_digests import check_words
from zeroengine.optim.step_result import StepResult
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.runtime.step_losses import weighted
from zeroengine.runtime.unit import Unit
from zeroengine.sequence.batches import shard_sequence
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.host_memory import trim_heap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.data import Dataset

    from zeroengine.config import ConfigLike
    from zeroengine.engine.out_of_memory import MicroStepRetaker
    from zeroengine.runtime.pass_listener import PassListener
    from zeroengine.weights.changes import WeightsToken
    from zeroengine.weights.live_loads import LoadResult, Weights
    from zeroengine.weights.stream import PlanBuckets, WeightStream
    from zeroengine.weights.vllm_source import VllmWeightSource

log = logging.getLogger("zeroengine")


class Engine:
    """Trains a partitioned model. ``initialize`` makes one.

        loss = engine(*batch)
        engine.backward(loss)
        engine.step()

    On a GPU, with Adam, ``global_steps``, ``skipped_steps`` and ``grad_norm`` wait for the norm of the last step;
    ``micro_steps`` does not. See "Asynchronous steps" in ``engine/step.py``.

    Attributes:
        module: The model that was passed to ``initialize``.
        optimizer: A ``torch.optim.Optimizer`` over the model's parameters, for LR schedules and hyperparameters.
        base_optimizer: The optimizer that was passed to ``initialize``, or was built there.
        loss_scaler: The loss scale, and the counters by which a dynamic one adapts.
        config: The resolved configuration, with the batch sizes of the next step.
        device: The device that the model computes on.
        rank: The number of this rank among all ranks of the engine.
        world_size: The number of these ranks.
        sequence_group: The ranks that share each sample with this one (``sequence_parallel_size``).
        sample_group: The number of that group among all groups; without sequence parallelism that of this rank. A
            sampler of the user's own takes it as its rank.
        num_sample_groups: The number of groups: such a sampler's number of replicas.
        group: These ranks: exchanges objects between them, and makes an error of one rank an error of all.
        gatherer: Gathers parameters before they are used and releases them afterwards.
        reducer: Collects gradients in buffers and reduces them.

    Args:
        make_parts: Builds the parts of the engine, for what they call of it.
    """

    def __init__(self, make_parts: Callable[[EngineCalls], EngineParts]) -> None:
        self._retaker: MicroStepRetaker | None = None
        self._use_steps(StepLoop(lambda listener: make_parts(self._calls(listener))))
        if self.config.on_out_of_memory == "lower":
            from zeroengine.engine.out_of_memory import MicroStepRetaker

            # The methods of this object would keep it in memory.
            engine = weakref.proxy(self)
            self._retaker = MicroStepRetaker(
                lambda: engine._parts,
                lambda *args, **kwargs: engine._run_forward(*args, **kwargs),
                lambda *args, **kwargs: engine._run_backward(*args, **kwargs),
                lambda: engine._steps.end_micro_step(),
                lambda config: engine.change(config),
            )
        ending.engines.add(self)

    def _calls(self, listener: PassListener) -> EngineCalls:
        return EngineCalls(self._end_step_by_optimizer, self.zero_grad, self._call_optimizer, listener)

    def _use_steps(self, steps: StepLoop) -> None:
        self._steps, self._parts = steps, steps.parts
        parts = steps.parts
        self._checkpoints = steps.checkpoints
        # Parameters refer to their owner weakly.
        self._owner: ParameterOwner | None = ParameterOwner(parts, weakref.ref(self))
        self.module, self.config, self.group = parts.setup.model, parts.setup.config, parts.ranks.group
        self.device, self.rank, self.world_size = self.group.device, self.group.rank, self.group.world_size
        self.gatherer, self.reducer, self.loss_scaler = parts.passes.gatherer, parts.passes.reducer, parts.passes.scaler
        self.optimizer, self.base_optimizer = parts.states.optimizer, parts.states.base_optimizer
        self.sequence_group = parts.loop.sequences
        self.sample_group, self.num_sample_groups = self.sequence_group.number, self.sequence_group.num_groups

    # These two methods are hidden from type checkers, which then report unknown attributes and indexing.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError. If another library's engine has ``name``, say which name to use instead."""
            if hasattr(type(self), name):
                # A property raised AttributeError. Reading it again raises the original error.
                object.__getattribute__(self, name)
            raise AttributeError(messages.engine_attribute(name, self))

        def __getitem__(self, index: object) -> NoReturn:
            """Raise TypeError, because DeepSpeed's ``initialize`` returns four values and users may unpack them."""
            raise TypeError(UNPACKED_ENGINE)

    # -- training ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. On a GPU, inputs that are in CPU memory are copied to it first.

        ``engine.module(...)`` is the same: all that the engine does for a forward is done by hooks of the model.
        """
        retaker = self._retaker
        if retaker is not None and torch.is_grad_enabled() and not self._parts.passes.forward.num_model_forwards:
            return retaker.forward(args, kwargs)
        return self._run_forward(*args, **kwargs)

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        is_nested = self._parts.passes.forward.num_model_forwards
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            # torch calls no hooks on Ctrl-C, nor if a compiled model raises. Otherwise this changes nothing.
            if not is_nested:
                self._parts.passes.forward.abandon()
                if isinstance(error, DivergenceError):
                    messages.end_traceback_in_callers_code(error)
                self._steps.forwards.end(error)
                explain_layer_error(error, self._parts)
            raise

    forward = __call__

    @disable_compile
    @messages.explains_arguments
    @explain_out_of_memory
    def backward(
        self,
        loss: torch.Tensor,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Compute gradients, and reduce them if this micro-step requires it.

        The loss is scaled by ``loss_scale`` first. The mean over ranks and over ``gradient_accumulation_steps``
        micro-steps is taken in the update. Several calls before one ``step`` add up.

        Where ranks or micro-steps have different numbers of tokens or samples, that is a mean of means. With
        ``weight=n`` it is the mean over all of them: the sum of ``n`` times gradient, over the sum of ``n``. A step
        whose weights add up to 0 is skipped.

        Args:
            loss: A tensor of one element that depends on the parameters.
            retain_graph: As of ``Tensor.backward``.
            create_graph: As of ``Tensor.backward``.
            inputs: As of ``Tensor.backward``.
            weight: What ``loss`` is the mean of: the number of its tokens or samples, at least 0, or a tensor of one
                element, for which nothing waits. Give one to all losses of a step, on all ranks, or to none.

        Raises:
            ZeroEngineError: ``loss`` is not a scalar tensor, or is detached; or ``weight`` is no such number, or other
                losses of the step have none.
        """
        options: dict[str, Any] = {
            "retain_graph": retain_graph,
            "create_graph": create_graph,
            "inputs": inputs,
            "weight": weight,
        }
        if self._retaker is not None:
            self._retaker.backward(loss, options)
        else:
            self._run_backward(loss, **options)

    def _run_backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor] | None,
        weight: float | torch.Tensor | None,
    ) -> None:
        call_checks.check_loss(loss, self._parts.passes.reducer)
        self._parts.passes.gatherer.check_has_weights("backward()")
        # Offloaded gradients have no memory that the reduction could write into.
        self._parts.loop.state_offloader.check_resident("backward()", ("parameters", "gradients"))
        if weight is not None and inputs is not None:
            raise ZeroEngineError(
                "backward(weight=..., inputs=...): the weight of a loss counts once, for the gradients of all "
                "parameters; leave inputs out, or freeze the other parameters (requires_grad_(False))"
            )
        factor = self._steps.factor_of(weight)
        scaled = loss if factor is None else weighted(loss, factor)
        # Multiplying by a scale of 1 would cost a kernel and change nothing.
        scaled = scaled if self.loss_scaler.scale == 1 else self.loss_scaler.scaled(scaled)
        try:
            self._parts.passes.backward.run(scaled, retain_graph, create_graph, inputs, factor)
        except RuntimeError as error:
            explain_layer_error(error, self._parts)
            raise
        # A backward that raises is no part of the step, so this comes after it.
        self._steps.note_loss(loss, factor)

    def scale(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Return ``loss`` times ``loss_scale``, at least in fp32, for a plain ``engine.scale(loss).backward()``.

        Args:
            loss: A tensor of one element.
            weight: As of ``backward``. It counts when that backward begins.

        Raises:
            ZeroEngineError: As ``backward`` raises it for ``weight``.
        """
        factor = self._steps.factor_of(weight)
        self._steps.note_loss(loss, factor)
        scaled = self.loss_scaler.scaled(loss if factor is None else weighted(loss, factor))
        return self._parts.passes.backward.mark_scaled(scaled, factor)

    @property
    def loss_scale(self) -> float:
        """The factor that ``backward`` multiplies the loss by: 1 unless gradients may be fp16.

        Assign to it to start a dynamic scale elsewhere, or to change a static one.
        """
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not self.config.scales_loss:
            raise ZeroEngineError(
                'loss_scale: only fp16 scales the loss; enable it with "fp16": {"enabled": true} in the configuration'
            )
        # The check below does not count a plain backward that has not been ended.
        self._parts.passes.backward.end_if_over()
        if self._parts.loop.accumulation.has_gradients:
            raise ZeroEngineError(
                "loss_scale: the gradients of this step so far have another scale. Assign to it after the step() that "
                "ends one, before the next backward."
            )
        self.loss_scaler.set(scale)

    @property
    def _counters(self) -> StepRunner:
        """What counts steps, when the result of the last one is known and counted."""
        self._parts.loop.step_runner.await_result()
        return self._parts.loop.step_runner

    @property
    def global_steps(self) -> int:
        """The number of updates."""
        return self._counters.num_updates

    @global_steps.setter
    def global_steps(self, steps: int) -> None:
        self._counters.num_updates = steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped.

        The gradient was not finite, the weights of the losses added up to 0, or ``skip_steps`` found an outlier.
        """
        return self._counters.num_skipped

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self._counters.num_skipped = steps

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's mean gradient before clipping; None before the first, and after a load.

        It is of the parameters that the optimizer holds. Others count as frozen, and no gradients are computed for
        them, which ``torch.nn.utils.clip_grad_norm_(model.parameters())`` in plain PyTorch would include.
        """
        return self._counters.grad_norm

    @property
    def micro_steps(self) -> int:
        """The number of calls of ``step``. ``optimizer.step()`` counts as ``gradient_accumulation_steps`` calls."""
        return self._parts.loop.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, micro_steps: int) -> None:
        self._parts.loop.accumulation.micro_steps = micro_steps

    @property
    def backwards_in_step(self) -> int:
        """The number of backwards since the last update, whose gradients the next one uses."""
        self._parts.passes.backward.end_if_over()
        return self._parts.loop.accumulation.backwards

    @property
    def lr_scheduler(self) -> Any:
        """The LR schedule that each update steps, or None."""
        return self._parts.states.lr_schedule.current

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        # The result of the last step may still revert the previous schedule.
        self._parts.loop.step_runner.await_result()
        self._parts.states.lr_schedule.replace(schedule)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far, such as those that another model's loss left here.

        This is the same as setting ``grad`` of each parameter to None. A micro-step counts although its gradients were
        dropped. After a backward that raised in the middle of a step, the step starts again. Directly after a step this
        does nothing: a step's first gradients overwrite those of the previous step.

        Args:
            set_to_none: As in torch. With False the gradients of the step so far become zero, by which weights and
                moments decay.
        """
        self._steps.zero_grad(set_to_none)
        if self._retaker is not None:
            self._retaker.forget_step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-step in progress ends with an update."""
        self._parts.passes.backward.end_if_over()
        return self._parts.loop.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None, *, override: bool = False) -> None:
        """Declare before a backward whether it is the last one of the step, with manual accumulation.

        After True the gradients are reduced while that backward computes, rather than in ``step``; they are the same
        either way. After False ``step`` ends a micro-step and does not update, as in DeepSpeed. This holds until an
        update.

        Args:
            is_boundary: Whether the next backward is the last one before an update. None takes back what was declared.
            override: Whether this also holds where the engine counts micro-steps, as in DeepSpeed. The mean is still
                over ``gradient_accumulation_steps`` micro-steps.

        Raises:
            ZeroEngineError: The engine counts micro-steps, and ``override`` is false.
        """
        self._parts.passes.backward.end_if_over()
        self._parts.loop.accumulation.set_boundary(is_boundary, override)

    def set_gradient_accumulation_steps(self, steps: int, micro_batch_size: int | None = None) -> None:
        """Let each step have ``steps`` micro-steps from now on, as while the batch grows. Call it on every rank.

        Gradients accumulate in the dtype that ``initialize`` chose, and a warning says where that is too coarse.

        Args:
            steps: The number of micro-steps, the same on every rank.
            micro_batch_size: The samples of a micro-step on one rank, for what counts samples; None: as before.

        Raises:
            ZeroEngineError: A number is no positive whole one, a step is in progress, or accumulation is manual.
        """
        micro_batch = self.config.train_micro_batch_size_per_gpu if micro_batch_size is None else micro_batch_size
        for number in (steps, micro_batch):
            if type(number) is not int or number < 1:
                raise ZeroEngineError(
                    f"set_gradient_accumulation_steps() takes positive whole numbers, found {number!r}"
                )
        self._parts.passes.backward.end_if_over()
        self._parts.loop.accumulation.set_micro_steps_per_step(steps)
        self._parts.passes.reducer.micro_steps_in_mean = steps
        if self.rank == 0 and (notice := self._parts.setup.config.coarse_sums_notice(steps)):
            log.warning("%s", notice)
        sizes = {
            "gradient_accumulation_steps": steps,
            "train_micro_batch_size_per_gpu": micro_batch,
            "train_batch_size": steps * micro_batch * self.num_sample_groups,
        }
        # Checkpoints take it from the parts, which an engine that has ended lacks.
        self.config = self._parts.setup.state_memory.config = self.config.model_copy(update=sizes)

    @property
    def gradient_clipping(self) -> float:
        """The largest global norm of the gradient; 0 disables clipping. Assign the same value on every rank."""
        return self._parts.loop.clipping.max_norm

    @gradient_clipping.setter
    def gradient_clipping(self, max_norm: float) -> None:
        self._parts.loop.clipping.set(max_norm)

    @disable_compile
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient of this step to ``max_norm``, in place of ``torch.nn.utils.clip_grad_norm_``.

        Reduce the gradients that are not reduced yet, return the global norm of the mean gradient before clipping, and
        make the next ``step`` clip to ``max_norm`` (or to ``gradient_clipping``, if that is smaller). The norm is of
        the parameters that the optimizer holds, see ``grad_norm``. Call it on every rank, between the last backward of
        a step and ``step``.

        Args:
            max_norm: A number above 0. ``math.inf`` clips nothing and returns the norm.

        Returns:
            The norm, 0-d float64, on the engine's device. Nothing waits for it before its value is read.

        Raises:
            ZeroEngineError: There was no backward, or this step needs further backwards.
        """
        return self._steps.clip(max_norm, "clip_grad_norm_()")

    @disable_compile
    @messages.explains_arguments
    @explain_out_of_memory
    def step(self) -> bool | StepResult:
        """End a micro-step; at the accumulation boundary clip, update and step the LR schedule.

        Call it on every rank. If the gradient's norm is not finite the step is skipped: nothing changes,
        ``skipped_steps`` counts it, and a dynamic loss scale falls. With ``check_grad_overflow`` false, bf16 and fp32
        update even so.

        Returns:
            Whether parameters were updated. On a GPU this is an object, and reading its truth value waits for the norm.

        Raises:
            ZeroEngineError: There was no backward since the last call, or ``optimizer.step()`` has ended this step, or
                it is called inside ``gathered``, ``no_sync`` or the capture of a CUDA graph, or a backward of this
                step has raised, or gradients overflow at the smallest loss scale, or the model or the optimizer has
                parameters that ``initialize`` was not given.
            DivergenceError: On every rank, where the ranks ran different collectives, or wrote different values into
                the parameters.
        """
        if self._retaker is not None:
            self._retaker.note_step()
        result = self._steps.end_micro_step()
        if self._retaker is not None:
            if self._parts.loop.accumulation.ended_micro_steps:
                self._retaker.note_end_of_micro_step()
            else:
                self._retaker.end_step()
        return result

    @disable_compile
    @explain_out_of_memory
    def _end_step_by_optimizer(self) -> None:
        if self._retaker is not None:
            self._retaker.note_step()
        self._steps.end_by_optimizer()
        if self._retaker is not None:
            self._retaker.end_step()

    @disable_compile
    @explain_out_of_memory
    def _call_optimizer(self, name: str, act: Callable[[torch.optim.Optimizer], Any], reads: bool) -> Any:
        """Run a method of the optimizer that was passed to ``initialize`` on the optimizer that holds the state."""
        self._checkpoints.check_not_half_loaded(f"optimizer.{name}")
        return call_over_shards(self._parts, name, act, reads)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on this rank. The next backward outside reduces their sum.

        It works at every stage. At stages 2 and 3 each rank holds whole gradients meanwhile.
        """
        backward, accumulation = self._parts.passes.backward, self._parts.loop.accumulation
        # A plain backward before the ``with`` must end under the previous setting, and one inside under this setting.
        backward.end_if_over()
        reduces_before, accumulation.reduces_gradients = accumulation.reduces_gradients, False
        try:
            yield
        finally:
            # If ending the backward raises, the flag must still be restored, or every later step would be refused.
            try:
                backward.end_if_over()
            finally:
                accumulation.reduces_gradients = reduces_before

    @disable_compile
    @explain_out_of_memory
    def average_replicas(self) -> bool:
        """End the round of ``local_steps`` now, and begin the next: give all replicas the result of an outer step.

        A round also ends after its last step, and in ``save_checkpoint``, ``save_weights``, ``release`` and ``close``.
        Everything else that reads parameters, such as an evaluation, reads those of the rank's own replica: call this
        first. Call it on every rank, between steps.

        Returns:
            Whether parameters have changed: False without ``local_steps``, and where the round has had no step yet.

        Raises:
            ZeroEngineError: On every rank: between the micro-steps of a step, inside ``gathered``, or while states are
                offloaded.
            DivergenceError: On every rank, where replicas have taken different numbers of steps.
        """
        return self._steps.average_replicas()

    @disable_compile
    def round_masters(self) -> None:
        """Let the master weights take the rounded values that the model computes with, in mixed precision.

        Training then goes on as if the model had been cast before ``initialize``. Call it on every rank, between steps.
        With ``local_steps`` it ends the round.

        Raises:
            ZeroEngineError: States are offloaded, or this is called inside ``gathered`` or a backward.
        """
        self._steps.round_masters()

    @contextlib.contextmanager
    def average_weights(self) -> Iterator[None]:
        """Let the model compute with the moving averages of the weights (``ema``) inside the ``with``.

        Forwards, ``gathered`` and ``full_state_dict`` find the averages there. Nothing is gathered for it. Parameters
        without master weights change places with averages of their dtype where they are partitioned, and are copied
        otherwise. Buffers, such as the statistics of BatchNorm, are those of the model. Enter and leave it on every
        rank, between steps or micro-steps. All ranks wait for one another at the end.

        Raises:
            ZeroEngineError: On every rank: no averages are kept, states are offloaded, or this is inside of
                ``gathered``, a forward or a backward. Inside: a backward, a step, a save or a load. At the end: a
                parameter was written inside; it has its weights again.
        """
        with average_weights(self._parts, "average_weights()"):
            yield

    def train(self, mode: bool = True) -> Engine:
        """Set training mode, as ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    @messages.ends_in_callers_code
    def change(self, config: ConfigLike) -> None:
        """Go on with another configuration: another stage, degrees, offload, batch or precision of states.

            engine.change({"zero_optimization": {"stage": 1}})

        The model, the optimizer, the schedule and loaders stay the same objects, and the next step has the bits of a
        run that was started with this configuration and loaded the states. States move from rank to rank, a unit at a
        time, without a disk; at most one unit is whole beyond the larger of both partitionings. Other attributes of the
        engine, such as ``reducer``, are new objects. Call it on every rank, between steps.

        Args:
            config: A file or a dict with the keys that change. Other keys of the top level stay as they are; a section
                is replaced as a whole. See ``docs/training.md`` for the keys that can change.

        Raises:
            ZeroEngineError: On every rank, and the engine goes on as before: a key cannot change, a value is wrong,
                states would not fit (with numbers), or this is between the micro-steps of a step, or inside of
                ``gathered``, a forward or a backward. If moving itself fails, such as on a full disk, the engine ends:
                load the last checkpoint into a new one.
        """
        # The model is to be trained, so its tensors are made outside of inference mode.
        with torch.inference_mode(False):
            planned = change.plan_change(self._parts, self._checkpoints, config)
            group = self.group
            progress, lasting, earlier = change.take_apart(planned, self._steps)
            # Parts refer to one another in cycles, and hold the states until they are collected.
            self._replace_parts(ending.ended_in_change(self._parts))
            gc.collect()
            try:
                self._use_steps(
                    StepLoop(
                        lambda listener: change.put_together(planned, lasting, earlier, self._calls(listener)), progress
                    )
                )
            except BaseException as error:
                error.add_note(
                    "engine.change() failed while states moved, and the engine has ended: load a checkpoint."
                )
                # The other ranks wait for this one.
                group.divergence.error(f"rank {group.rank} failed in change(): {type(error).__name__}: {error}")
                planned.setup.undo.__exit__(type(error), error, error.__traceback__)
                raise
            change.report_change(planned, self._parts)

    # -- offloading for a while -------------------------------------------------------------------

    @messages.explains_arguments
    def offload_states(
        self,
        include: str | Iterable[str] | None = None,
        *,
        device: Literal["cpu", "nvme"] = "cpu",
        nvme_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Free the device's memory for another job, such as generation, until ``reload_states``.

        Call it on every rank, between steps or micro-steps. A call that needs a state which is away raises an error. If
        the engine computes on the CPU, ``device="cpu"`` frees nothing, and the same calls raise.

        Args:
            include: One or several of "parameters"; "masters"; "moments", with their scales; "averages" (those of
                ``ema``, and what the outer step of ``local_steps`` keeps); "optimizer", which is the last three;
                "gradients", with the buffers that they are reduced from; or "all". None is "optimizer" and "gradients",
                as far as their memory can be freed.
            device: The kind of memory that the states move to. That of the CPU is page-locked for a GPU.
            nvme_path: A folder on a disk, for device "nvme". None: the folder in the configuration.

        Raises:
            ZeroEngineError: On every rank, and all states are where they were: a state is unknown, its memory cannot be
                freed, or too little is available; the folder cannot be used; states are away already; or this is inside
                of ``gathered``, a forward or a backward.
        """
        temporary_offload.offload(self._parts, include, device, nvme_path)

    @messages.explains_arguments
    def reload_states(self) -> None:
        """Bring back the states that ``offload_states`` moved. Call it on every rank.

        If the device has too little memory for them, this raises and they stay away: free some, and call it again.
        """
        temporary_offload.reload(self._parts)

    @contextlib.contextmanager
    def offloaded(
        self,
        include: str | Iterable[str] | None = None,
        *,
        device: Literal["cpu", "nvme"] = "cpu",
        nvme_path: str | os.PathLike[str] | None = None,
    ) -> Iterator[None]:
        """Keep states off the device inside: ``offload_states`` at the begin, and ``reload_states`` at the end.

        Enter and leave it on every rank. Arguments and errors are those of ``offload_states``.
        """
        self.offload_states(include, device=device, nvme_path=nvme_path)
        try:
            yield
        finally:
            # An engine that was closed inside has brought them back.
            if not self._parts.has_ended:
                self.reload_states()

    # -- looking inside ---------------------------------------------------------------------------

    @property
    def units(self) -> Sequence[Unit]:
        """The parameters that are gathered and released together, in the order of the cut (``partition.cut``)."""
        return self._parts.partition.units

    def log(self, **values: float | torch.Tensor) -> None:
        """Add numbers of your own to the record of a step: ``engine.log(accuracy=0.9)``.

        From the first forward of training or backward of a step until that of the next one they belong to this step, so
        also after ``step()``. Rank 0's values count, and the last value of a name. Without a monitor this does nothing:
        see the section ``monitor`` of the configuration.

        Args:
            values: Numbers, or tensors of one element, which are read once the device has computed them.

        Raises:
            ZeroEngineError: A value is something else.
        """
        call_checks.check_logged_values(values)
        if self._parts.reports.monitor is not None:
            self._parts.reports.monitor.log(values)

    @messages.ends_in_callers_code
    def reduce(self, values: Mapping[str, float | torch.Tensor], weight: float | torch.Tensor = 1.0) -> dict[str, Any]:
        """Return the mean of numbers over the ranks: ``engine.reduce({"accuracy": hits / n}, weight=n)``. A collective.

        Args:
            values: Numbers, or tensors of one element, by the same names on every rank.
            weight: What this rank's values are means of: the number of tokens or samples. 0: they do not count.

        Returns:
            The sum of weight times value over the sum of the weights, by name: 0-d float64 tensors on ``device``, which
            may still be computing; NaN where no rank has weight.

        Raises:
            ZeroEngineError: A value or the weight is something else, or the names differ between ranks.
        """
        return mean_over_ranks(values, weight, self.group)

    def memory(self) -> Memory:
        """Return the bytes that each state holds on this rank now."""
        return measure_memory(self._parts, self._checkpoints.copy_bytes)

    @messages.ends_in_callers_code
    def state_digests(self) -> dict[str, dict[str, str]]:
        """Return digests of the parameters and moments of each unit: equal digests mean equal bits. A collective.

        They do not depend on the stage, the degrees, the number of ranks or where states are. Of parameters those of
        the masters count. Moments are all that the optimizer keeps, without step counts.

        Returns:
            For "parameters" and "moments", by the name of the unit, 16 hexadecimal digits. 0: it has no such state.

        Raises:
            DivergenceError: On every rank: ranks that hold copies of a state have different values.
            ZeroEngineError: On every rank: a parameter is split within 8 bytes. The message names it.
        """
        self._parts.loop.state_offloader.check_resident("state_digests()")
        if self._parts.setup.is_split:
            with self._parts.ranks.group.collective_errors("to take digests"):
                check_words(self._parts.setup.plans, self.config)
        self._parts.states.master_weights.settle()
        return {
            kind: self._checkpoints.digests.by_unit(digests)
            for kind, digests in self._checkpoints.digests.now().items()
        }

    @messages.ends_in_callers_code
    def full_state_dict(
        self,
        *,
        names: str | Iterable[str] | None = None,
        merge: Literal["peft"] | None = None,
        trainable_only: bool = False,
        rank0_only: bool = False,
    ) -> dict[str, Any]:
        """Return ``model.state_dict()`` as it would be without partitioning, on the CPU. Call it on every rank.

        The model's own ``state_dict()`` runs, so the keys and values of its hooks and the extra state of its modules
        are part of the result. Units without any of the requested names are not gathered, except for hooks that read
        values.

        Args:
            names: Names, or patterns such as ``"*.lora_A.*"`` (as of ``fnmatch``), of the values to return, the same on
                every rank. None returns all.
            merge: "peft" returns the values of the base model of a peft model, with the active adapters merged.
            trainable_only: Whether to return parameters alone, and not those that were frozen at ``initialize``.
            rank0_only: Whether the other ranks return an empty dict. Then they hold only one unit at a time.

        Raises:
            ZeroEngineError: On every rank, if the model has parameters that ``initialize`` was not given, or if one of
                ``names`` matches nothing.
            DivergenceError: On every rank, if the ranks ask for different names.
        """
        from zeroengine.engine.weight_stream import collect_state_dict

        flags = {"trainable_only": trainable_only, "rank0_only": rank0_only}
        return collect_state_dict(self._parts, self._checkpoints.tensors, names, merge, **flags)

    @messages.ends_in_callers_code
    def stream_weights(
        self,
        dtype: str | torch.dtype | None = None,
        bucket_bytes: int | str = "256MiB",
        names: str | Iterable[str] | None = None,
        ranks: Literal["all"] | int = "all",
        device: str | torch.device | None = None,
        *,
        since: WeightsToken | None = None,
        merge: Literal["peft"] | None = None,
        buffers: bool = False,
        layout: Literal["model", "files"] = "model",
    ) -> WeightStream:
        """Return an iterator over whole tensors, for a sampling engine, an evaluation or an export.

            with engine.stream_weights("bf16", ranks=0) as stream:
                for name, values in stream:  # on every rank, and the values come on rank 0
                    print(name, values.sum())

        The tensors come unit by unit, each once, in buckets of bounded size. A rank holds two buckets and one unit at
        most, and what one part of a conversion takes; one that gets no values holds its shards alone. A tensor that is
        larger than a bucket comes in pieces of rows (``WeightPiece``). A bucket that something refers to is not used
        again. Call it on every rank, between steps or micro-steps, and take the whole stream; until then other calls
        are refused.

        Args:
            dtype: The dtype that floating tensors are cast to: fp32, bf16 or fp16. None: the one of the model.
            bucket_bytes: The largest size of a bucket in bytes, or a text such as ``256MiB``.
            names: Names, or patterns such as ``"*.mlp.*"`` (as of ``fnmatch``), of the tensors to yield. None: all.
            ranks: "all", or the only rank that gets values. The loops of the others yield nothing.
            device: Where the tensors are: "cpu", or None for the engine's device.
            since: The ``token`` of an earlier stream, or ``WeightsToken()``. Tensors that have not changed since are
                left out, and ``stream.token`` is for the next stream. Each shard is read once more for that.
            merge: "peft" yields the tensors of the base model of a peft model, with the active adapters merged.
            buffers: Whether persistent buffers, and tensors that hooks of the state dict compute, are yielded as well.
            layout: "files" yields the tensors of a transformers model with the names and the layout of its files,
                which inference engines load, such as each expert of a mixture by itself.

        Raises:
            ZeroEngineError: On every rank: an argument is wrong, ``since`` is the token of another engine, or this is
                called inside ``gathered``, a forward, a backward or another stream. In the loop: another rank has left
                the stream, with its reason.
            DivergenceError: On every rank: they pass different arguments.
        """
        from zeroengine.engine.weight_stream import StreamArguments, open_stream

        arguments = StreamArguments(dtype, bucket_bytes, names, ranks, device, since, merge, buffers, layout)
        return open_stream(self._parts, self._checkpoints.tensors, arguments)

    def send_weights(
        self,
        target: ProcessGroup | Store | None,
        *,
        receivers: int = 1,
        timeout: float = 20.0,
        start_timeout: float = 300.0,
        **stream_arguments: Any,
    ) -> WeightsToken | None:
        """Send the weights from rank 0 to other processes, which call ``zeroengine.receive_weights``.

        Call it on every training rank. Buckets go to all receivers at once; each is filled while they take the one
        before. After an error the engine trains on. If a broadcast has failed, as when a receiver was killed inside of
        it, the group is of no more use.

        Args:
            target: A torch process group of training rank 0 and the receivers, for broadcasts; or a store, such as
                ``torch.distributed.TCPStore``, for shared memory on one host. The other training ranks may pass None.
            receivers: The number of receivers at a store.
            timeout: Seconds that a receiver may take for a bucket.
            start_timeout: Seconds to wait for the receivers.
            stream_arguments: Those of ``stream_weights``, except ``ranks`` and ``device``.

        Returns:
            With ``since``, the token for the next call.

        Raises:
            ZeroEngineError: On every rank, as ``stream_weights``; or a receiver has not come, has failed, has ended or
                does not answer. Names the receiver.
        """
        from zeroengine.engine.weight_stream import send_weights

        sender_arguments = target, receivers, timeout, start_timeout, self.device
        return send_weights(self._parts, self._checkpoints.tensors, sender_arguments, stream_arguments)

    def weight_source(self, *, ranks: Literal["all"] | int = "all", **stream_arguments: Any) -> VllmWeightSource:
        """Return the weights as what vLLM 0.28 to 0.33 calls a ``WeightSource``, for its own trainer engines.

        Args:
            ranks: "all", or the only rank that gets whole tensors: 0 takes less memory where vLLM broadcasts by NCCL.
            stream_arguments: Those of ``stream_weights``, except ``since``. ``layout`` is "files", whose names vLLM
                loads, and ``bucket_bytes`` vLLM's ``packed_buffer_size_bytes``.
        """
        from zeroengine.engine.weight_stream import StreamArguments, open_stream
        from zeroengine.weights.vllm_source import VllmWeightSource

        passed = {"layout": "files"} | stream_arguments
        arguments = StreamArguments.of("weight_source()", passed, ranks=ranks, since=None)

        def open_planned(plan: PlanBuckets, in_pieces: bool) -> WeightStream:
            """Open a stream with a plan of its own."""
            planned = dataclasses.replace(arguments, plan=plan, in_pieces=in_pieces)
            return open_stream(self._parts, self._checkpoints.tensors, planned)

        own, receiver, is_split = self._parts.ranks, None if ranks == "all" else ranks, self._parts.setup.is_split
        # All ranks of a split model have the same whole tensors, none of which has a part of one for itself.
        replicas = ReplicaLayout(own.group.rank, 1, own.group.world_size) if is_split else own.replica_layout
        return VllmWeightSource(open_planned, replicas, receiver, in_pieces=not is_split)

    # -- data -------------------------------------------------------------------------------------

    def dataloader(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        repeat_samples: bool | None = None,
        **options: Any,
    ) -> ResumableLoader:
        """Return a loader of this rank's share of ``dataset``, whose position is part of every checkpoint.

        After a checkpoint is loaded on another number of ranks, the epoch continues at the same place.

        Args:
            dataset: A data set with ``__len__`` and ``__getitem__``, the same on every rank.
            batch_size: The samples of a micro-batch on one rank. None: ``train_micro_batch_size_per_gpu``.
            shuffle: Whether each epoch has another order.
            seed: The seed of these orders.
            drop_last: Whether the samples that do not fill a micro-batch on every rank are left out of an epoch. False:
                they are a smaller one.
            repeat_samples: Whether some samples are repeated so that all ranks have as many, as in DistributedSampler;
                otherwise some are left out. None: where `drop_last` is false.
            options: Further arguments of ``torch.utils.data.DataLoader``, such as ``num_workers``. Where
                ``pin_memory`` is left out, it is True for batches that workers make for a GPU.

        Raises:
            ZeroEngineError: ``dataset`` has no length, or too few samples.
        """
        micro_batch = self.config.train_micro_batch_size_per_gpu if batch_size is None else batch_size
        # A copy from page-locked memory to a GPU does not make the host wait. Samples that this process makes may be on
        # the GPU, where memory cannot be page-locked.
        options.setdefault("pin_memory", self.device.type == "cuda" and bool(options.get("num_workers")))
        group = self.sequence_group
        sharing = group.number, group.num_groups
        loader = ResumableLoader(dataset, *sharing, micro_batch, shuffle, seed, options, drop_last, repeat_samples)
        loader.cut = partial(shard_sequence, engine=self)
        # The name depends on the order of the calls, so a resumed run finds the position under the same name.
        self._checkpoints.register_stateful(self._checkpoints.unused_name("dataloader"), loader)
        return loader

    def register_stateful(self, name: str, stateful: Stateful) -> None:
        """Make the state of an object, such as torchdata's ``StatefulDataLoader``, part of every checkpoint.

        Each rank saves and loads the state of its own object. Register it under the same name before or after
        ``load_checkpoint``. A state that was saved on another number of ranks is ignored with a warning.

        Args:
            name: The name of the state in checkpoints.
            stateful: An object that has ``state_dict()`` (of tensors, numbers, strings, and containers of these) and
                ``load_state_dict(state)``.

        Raises:
            ZeroEngineError: The object lacks one of these methods, or the name is taken.
        """
        self._checkpoints.register_stateful(name, stateful)

    # -- checkpoints ------------------------------------------------------------------------------

    @messages.explains_arguments
    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Any = None,
        *,
        frozen: bool = True,
        inside_step: bool = False,
    ) -> None:
        """Write a checkpoint, ``directory/tag``, that loads at any stage, world size and precision.

        The checkpoint is whole or absent, and a failure leaves earlier checkpoints intact. With
        ``checkpoint.async_save`` this returns once the state is copied to CPU memory, and a failure surfaces on every
        rank at the next save, load, or ``close``. Call it on every rank, between steps.

        Args:
            directory: The folder of checkpoints, the same for all ranks, on a disk that they share.
            tag: The checkpoint's name. None: ``step-<global_steps>``.
            client_state: Anything else to save: tensors, numbers, strings, and lists, tuples and dicts of these. Only
                rank 0's is saved. Its tensors are loaded on the CPU.
            frozen: Whether parameters that were frozen at ``initialize`` are saved. A checkpoint without them loads
                into a model that already has their values, such as an adapter's into its base.
            inside_step: Whether this may come between the micro-steps of a step. Their gradients are not saved: a run
                that continues from the checkpoint repeats the step.

        Raises:
            ZeroEngineError: On every rank; then there is no such checkpoint.
            DivergenceError: On every rank, if the ranks name different folders or tags.
        """
        self._checkpoints.save(directory, tag, client_state, frozen, inside_step)

    @messages.refuses_unpacking
    @messages.explains_arguments
    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        weights_only: bool = False,
        optimizer: bool = True,
        strict: bool = True,
        fallback: bool = False,
    ) -> Any:
        """Load a checkpoint that was saved at any stage, world size and precision.

        At the same stage and world size training continues bit for bit; otherwise the order of reductions may differ.
        This also loads checkpoints that plain torch Distributed Checkpoint wrote of a model and its optimizer, such as
        under FSDP2. Call it on every rank, between steps: a step in progress loses its gradients, with a warning.

        Args:
            directory: The folder of checkpoints, the same for all ranks.
            tag: The checkpoint's name. None: the newest checkpoint. Before the first step this is also a newer snapshot
                in memory, as ``resume`` takes it, unless weights alone are loaded.
            weights_only: Whether only parameters and buffers are loaded; optimizer, schedule and counters stay.
            optimizer: Whether the optimizer's state and hyperparameters are loaded. False starts with empty state, so
                that another optimizer may continue; the loaded schedule sets the learning rates.
            strict: Whether the checkpoint's model must have the names of this model. Otherwise common names are loaded.
                Frozen parameters that were not saved keep their values either way.
            fallback: Whether the newest undamaged checkpoint is loaded if the requested one is damaged.

        Returns:
            The ``client_state`` that was saved, or None, as from a snapshot.

        Raises:
            ZeroEngineError: The call's result is unpacked, ``path, client_state = ...``, and is a dict or None.
            CheckpointError: On every rank; the engine is unchanged.
            DivergenceError: On every rank, if the ranks name different folders or tags; the engine is unchanged.
        """
        options = LoadOptions(fallback=fallback, weights_only=weights_only, optimizer=optimizer, strict=strict)
        return self._checkpoints.load(directory, tag, options)

    def resume(self, directory: str | os.PathLike[str] | None = None) -> bool:
        """Go on from the newest snapshot in memory (``snapshots``) or checkpoint on the disk, whichever is newer.

        Call it on every rank, before the first step. Rank 0 logs what was used, how many steps were lost, and which
        files are damaged: what is damaged is passed over. A snapshot has no ``client_state``, and that of a checkpoint
        is not returned: keep such values by ``register_stateful``.

        Args:
            directory: The folder of checkpoints, the same for all ranks; it need not exist. None: snapshots alone.

        Returns:
            Whether there was any. Otherwise the engine is unchanged.

        Raises:
            CheckpointError: On every rank; there are checkpoints, and none is whole or fits. It has the reasons.
        """
        return self._checkpoints.resume(directory)

    def wait_for_checkpoint(self) -> None:
        """Wait until no checkpoint is being saved in the background, and unlock the folders. Call it on every rank.

        Until the next save another job, or another engine, may save into them.

        Raises:
            CheckpointError: On every rank, if the save failed.
        """
        self._checkpoints.wait()

    @messages.ends_in_callers_code
    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        shard_size: str | int = "5GB",
        *,
        names: str | Iterable[str] | None = None,
        merge: Literal["peft"] | None = None,
        trainable_only: bool = False,
        ema: bool = False,
    ) -> None:
        """Write parameters and buffers as safetensors with an index, which Hugging Face loads, as zero-export does.

        Each rank writes its own part, so nothing is gathered and no rank ever holds the model. Weights that are already
        in ``directory`` are replaced as a whole, so write an adapter to another folder than its base; other files there
        stay. A model of transformers is written with the names and the layout of its ``save_pretrained``. Call it on
        every rank.

        Args:
            directory: A folder, the same for all ranks, on a disk that they share.
            dtype: The dtype that floating tensors are cast to: fp32, bf16 or fp16. None writes the fp32 master weights.
            shard_size: The largest size of a file's values in bytes, or a text such as ``5GB``.
            names: Names, or patterns such as ``"*.lora_A.*"`` (as of ``fnmatch``), of the parameters and buffers to
                write. None writes all.
            merge: "peft" writes the base model of a peft model, with the active adapters merged.
            trainable_only: Whether to leave out buffers, and parameters that were frozen at ``initialize``.
            ema: Whether to write the moving averages of the parameters that are trained, in place of their weights.

        Raises:
            ZeroEngineError: On every rank, where one of ``names`` matches nothing.
            CheckpointError: On every rank; what was in ``directory`` is as it was.
            DivergenceError: On every rank, where they pass different arguments.
        """
        self._checkpoints.save_weights(
            directory, dtype, shard_size, names, merge, trainable_only=trainable_only, ema=ema
        )

    @messages.ends_in_callers_code
    def load_weights(self, weights: Weights, *, strict: bool = True) -> LoadResult:
        """Load parameters and buffers from files or a state dict; optimizer, schedule and counters stay.

        Each rank reads its own part and casts it to the engine's dtypes. Both master weights and low-precision
        parameters get the values. A tied parameter may have any of its names. If the layout of a transformers model
        differs from that of its files, such as Mixtral's merged experts, either layout is read. Call it on every rank.

        Args:
            weights: A ``.safetensors``, ``.bin`` or ``.pt`` file (of tensors alone: pickled code is refused), an index
                of several files, or a folder with any of these; or a state dict. Only rank 0's state dict is used: the
                other ranks may pass None, and receive it in pieces of bounded size.
            strict: Whether the weights and the model must have the same names. Otherwise common names are loaded.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` returns them.

        Raises:
            CheckpointError: On every rank, with the names and shapes that differ; the engine is unchanged.
            DivergenceError: On every rank, if the ranks name different files; the engine is unchanged.
        """
        return self._checkpoints.load_weights(weights, strict)

    def begin_replay(self) -> None:
        """Load the checkpoint that zero-replay goes on from, if it has started this process. Call it on every rank."""
        self._checkpoints.begin_replay()

    def call_at_end(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` when the engine ends. Of several functions the last one is called first."""
        self._parts.setup.undo.callback(function, *args)

    def release(self) -> None:
        """End the engine, and leave ``module`` as an ordinary model that can be moved or initialized again.

        Parameters get their whole, trained values, in the dtypes that they had before ``initialize``; frozen ones have
        the values that the engine computed with, which bf16 and fp16 have rounded. Hooks are removed, and the optimizer
        and the schedule that were passed in are ordinary again. Optimizer state, gradients and counters are dropped:
        call ``save_checkpoint`` first to keep them. Call it on every rank, between steps.

        Raises:
            ZeroEngineError: On every rank, if whole parameters do not fit into the memory of some rank, or some have no
                values yet, or if this is called inside ``gathered`` or a backward. The engine is unchanged.
            CheckpointError: On every rank, if a save in the background has failed. The engine is unchanged.
        """
        if not self._parts.has_ended:
            ending.prepare_release(self._parts, self._checkpoints)
            self._end("release()")

    def close(self) -> None:
        """End the engine: free threads, files and memory, and leave an ordinary model, as ``release`` does.

        If whole parameters do not fit into memory, or after an error, partitioned parameters stay partitioned, and each
        use of such a parameter raises. Call it on every rank. On a GPU this also reports an overflow in the last step,
        if nothing has reported it yet. A second call does nothing.
        """
        if not self._parts.has_ended:
            ending.prepare_close(self._parts)
            self._end("close()")

    def _end(self, call: str) -> None:
        try:
            ending.end_parts(self._parts, self._checkpoints, call)
        finally:
            # These are the last references to the parts, so this frees the memory of the states.
            self._replace_parts(ending.ended_by(call, self._parts))
            # The parts refer to one another in cycles.
            gc.collect()
            trim_heap()

    def _replace_parts(self, ended: ending.EndedParts) -> None:
        self._parts = self._checkpoints = self._steps = ended  # type: ignore
        self.optimizer = self.gatherer = self.reducer = self.group = self.sequence_group = ended  # type: ignore
        self._owner = None

    def leave_to_parent(self) -> Any:
        """End this copy of the engine in a forked child, and return what must not be freed there."""
        if self._parts.has_ended:
            return None
        owned = (self._parts, self._checkpoints, self._steps, self._owner)
        self._replace_parts(ending.of_parent(self._parts))
        return owned
