"""Tells the schedule of backwards: when they begin and end, where they are, and which gradients have come.

[Note: When a backward begins and ends]
``Engine.backward`` runs a backward and so knows when it begins and ends. A plain ``loss.backward()`` is noticed when it
comes to an output of the model or of a module, or when its first gradient arrives. Autograd does not report its end: a
queued callback runs at the end of the innermost backward, which may be a reentrant checkpoint's. So a plain backward is
ended when its gradients are needed, or at the next forward: others may follow, as of a second loss.

[Note: What is known of plain backwards]
Autograd numbers backwards, and reports no end of one that raised.

    attribute       set by ...                                        cleared by ...
    in_progress     ``_begin``                                        ``_end``, ``finish`` after an error, a drop
    _is_in_call     the first gradient of a call, or the knowledge    the end of the call: reentrant checkpoints within
                    that one will come                                it begin and end backwards of their own
    _producing      that gradient: the numbers of the backwards       their ends; what remains has raised
                    that it came in
    _ended          their ends, since ``_begin``                      the next ``_begin``
    _run_raised     an error of ``run``, or at an end                 ``finish``
    _scaled_task    ``run``, or the loss that ``mark_scaled`` gave    the end of that backward, ``finish``
    _uncounted      the loss of a backward, if it has a weight        its first gradient, its end, ``finish``
    noted task      its first gradient in a call of a backward        whatever ends a call, or that backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from zeroengine.errors import LossScaleError, ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.autograd_hooks import WeakMethod, register_hook_first
from zeroengine.runtime.executor import Executor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.gradient_hooks import NONE, GradientHook
from zeroengine.runtime.graph_outputs import GraphOutputs
from zeroengine.runtime.pass_listener import PassListener
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.running_calls import is_autograd_grad, is_outermost_backward
from zeroengine.runtime.step_losses import MIXED_LOSSES, Weight
from zeroengine.schedule.events import (
    BackwardBegan,
    BackwardEnded,
    BackwardsAbandoned,
    CallBegan,
    Reached,
    ReachedInputs,
)
from zeroengine.schedule.visits import Visit, VisitLog
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    current_graph_task_keeps_graph,
    functorch_active,
    queue_callback,
    will_engine_execute_node,
)

# Stands for the backward of ``run`` in place of autograd's number of a backward.
_RUN_BY_ENGINE = -1


class Backward:
    """The backwards of the model, whether the engine or the user runs them.

    Args:
        executor: Does what the schedule says.
        gatherer: Gathers units.
        reducer: Takes the gradients.
        requires_scaled_loss: Whether a loss that was not multiplied by the loss scale is refused.
        timer: Times backwards.
        listener: Is told of backwards, none of which begins before it is complete.

    Attributes:
        executor: As given.
        in_progress: Whether a backward that wants gradients has begun and has not been ended.
        run_by_engine: Whether ``Engine.backward`` is running the backward in progress.
        hook_handles: The handles of the hooks on parameters.
        refusal: Why no backward may come to a forward that this has seen; "": it may.
    """

    def __init__(
        self,
        executor: Executor,
        gatherer: Gatherer,
        reducer: Reducer,
        requires_scaled_loss: bool,
        timer: Timer,
        listener: PassListener,
    ) -> None:
        self.executor, self._gatherer, self._reducer, self._timer = executor, gatherer, reducer, timer
        self._requires_scaled_loss, self._listener = requires_scaled_loss, listener
        self._residency, self._backwards = executor.schedule.residency, executor.schedule.backwards
        self._logs = executor.schedule.logs
        self._outputs = GraphOutputs(WeakMethod(self, Backward.follow))
        self._params = [param for unit in executor.units if unit.trainable for param in unit.params]
        # The timer's span of a plain backward in progress.
        self._plain_span = -1
        self.in_progress = self.run_by_engine = self._run_raised = False
        self.refusal = ""
        # See "What is known of plain backwards".
        self._producing: set[int] = set()
        self._ended: set[int] = set()
        self._is_in_call = False
        self._scaled_task: int | None = None
        # The number of a backward of a loss that has a weight, and the weight, until the first gradient.
        self._uncounted: tuple[int, Weight] | None = None
        # Its task is the "noted task".
        self._arriving = executor.arriving
        self.hook_handles: list[Any] = []
        # By the parameter's number: its hooks, in the order in which autograd calls them, and the number of this one.
        self._hooks: list[tuple[Any, int]] = []
        self._register_hooks()

    def _register_hooks(self) -> None:
        report = WeakMethod(self.executor, Executor.tell_arrived)
        for number, (param, (unit_index, index)) in enumerate(zip(self._params, _indices(self._reducer), strict=True)):
            slow_path = WeakMethod(self, Backward._take_gradient, number, unit_index, index)
            unit = self._reducer.gradients[unit_index].unit.number
            hook = GradientHook(self._arriving, unit, index, slow_path, report)
            handle = param.register_post_accumulate_grad_hook(hook)
            hook.hooks = handle.hooks_dict_ref()
            self.hook_handles.append(handle)
            self._hooks.append((hook.hooks, handle.id))

    # -- a micro-step that this rank cannot compute -----------------------------------------------

    def begin_without_loss(self) -> None:
        """Begin a backward of which this rank computes nothing, where the other ranks compute theirs."""
        self.finish()
        self.run_by_engine = True
        try:
            self._begin()
        finally:
            self.run_by_engine = False
        self._run_raised = True

    def complete_without_gradients(self) -> None:
        """Launch the reduces that are left of a backward that has raised. Gradients that are missing count as zeros."""
        not_launched = self.executor.not_launched
        self.executor.forget_interrupted()
        if self.in_progress:
            with torch.inference_mode(False), torch.no_grad():
                # Other ranks have launched these before what is left.
                self.executor.repeat(not_launched)
                self._reducer.end_backward()

    # -- calls of the engine ----------------------------------------------------------------------

    def run(
        self,
        loss: torch.Tensor,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor] | None,
        weight: Weight | None = None,
    ) -> None:
        """Run ``loss.backward``. ``loss`` was multiplied by its scale, if one is required, and by ``weight``."""
        # An earlier plain backward may not have been ended yet.
        self.finish()
        span = self._timer.begin("backward")
        # Autograd comes to the loss first.
        handle = loss.register_hook(WeakMethod(self, Backward._reach_loss, weight))
        try:
            # The listener, too, asks who runs the backward that begins.
            self.run_by_engine = True
            try:
                self._begin()
                self._scaled_task = _RUN_BY_ENGINE
                try:
                    loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
                except BaseException:
                    # The next ``finish`` drops the gradients, as it does for a plain backward that raised.
                    self._run_raised = True
                    raise
            finally:
                self.run_by_engine = False
            self._scaled_task = None
            if inputs is None and self.in_progress:
                # No parameter of this rank has a gradient of the loss.
                self._count_weight()
            self._end()
        finally:
            self._uncounted = None
            handle.remove()
            self._timer.end(span)
            self._timer.note_training()

    def _reach_loss(self, weight: Weight | None) -> None:
        self.follow()
        if weight is not None:
            self._uncounted = current_graph_task_id(), weight

    def _count_weight(self) -> None:
        if self._uncounted is not None:
            self._reducer.losses.add(self._uncounted[1])
            self._uncounted = None

    def mark_scaled(self, loss: torch.Tensor, weight: Weight | None) -> torch.Tensor:
        """Return ``loss``, marked so that a plain ``backward()`` of it is known to be scaled, and counts its weight."""
        if loss.requires_grad:
            loss.register_hook(WeakMethod(self, Backward._begin_scaled, weight))
        return loss

    def _begin_scaled(self, weight: Weight | None) -> None:
        self._scaled_task = current_graph_task_id()
        self._uncounted = None if weight is None else (self._scaled_task, weight)
        # The mark holds for this backward alone: the next loss must be marked as well. Autograd drops the callback of a
        # backward that raises, and then ``finish`` removes the mark.
        queue_callback(partial(setattr, self, "_scaled_task", None))

    def _begin_plain_span(self) -> None:
        if not self.run_by_engine and self._plain_span < 0:
            self._plain_span = self._timer.begin("backward")
            # Autograd drops the callback of a backward that raises. ``finish`` ends that span.
            queue_callback(self._end_plain_span)

    def _end_plain_span(self) -> None:
        if self._plain_span >= 0:
            self._timer.end(self._plain_span)
            self._timer.note_training()
            self._plain_span = -1

    # -- forwards ---------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Note a forward of the whole model that begins outside of any backward: the previous backward has ended."""
        # Autograd did not report the end of a backward that raised.
        self._abandon()
        self.finish()
        if torch.is_grad_enabled():
            self._listener.count_forward()
        # The forward is to find the parameters with their own class.
        self._reducer.user_gradients.pause()

    def leave_forward(self) -> None:
        """Note that a forward of the whole model has ended or raised outside of any backward."""
        self._reducer.user_gradients.resume()

    def note_outputs(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Note what the latest forward of the whole model has returned. See ``GraphOutputs.add``."""
        return self._outputs.add(self._logs.latest, tensors)

    # -- where autograd is ------------------------------------------------------------------------

    def follow(self) -> bool:
        """Return whether autograd is running a backward. Tell the schedule, once."""
        task = current_graph_task_id()
        if task < 0:
            return False
        if self.refusal:
            raise ZeroEngineError(self.refusal)
        if self._backwards.is_known(task):
            return True
        is_outermost, accumulates = is_outermost_backward(), not is_autograd_grad()
        contained = self._outputs.of_backward() if is_outermost or not self._backwards.is_running else []
        # Autograd drops the callback if the backward raises. ``_abandon`` then forgets it.
        queue_callback(partial(self._end_task, task, is_outermost))
        self.executor.tell(BackwardBegan(task, is_outermost, accumulates, contained))
        self._note_begin(task, is_outermost and accumulates)
        return True

    def expect(self, log: VisitLog, visit: Visit, outputs: Iterable[torch.Tensor]) -> None:
        """Let autograd report when it comes to ``outputs``, which ``visit`` of ``log`` has returned."""
        for tensor in outputs:
            # Any of the outputs may get its gradient first, and some may get none. So each output carries the hook. A
            # module may return what a module inside of it has returned. The backward comes to the outer one first.
            register_hook_first(tensor, WeakMethod(self, Backward._reach, log, visit))

    def _reach(self, log: VisitLog, visit: Visit) -> None:
        if self.follow():
            keeps_graph, extends_graph = current_graph_task_keeps_graph(), torch.is_grad_enabled()
            self.executor.tell(Reached(current_graph_task_id(), log, visit, keeps_graph, extends_graph))

    def reach_inputs(self, log: VisitLog, visit: Visit) -> None:
        """Tell the schedule that autograd has come to what was made before ``visit`` of ``log`` began."""
        if self.follow():
            self.executor.tell(ReachedInputs(current_graph_task_id(), log, visit))

    def _end_task(self, task: int, is_outermost: bool) -> None:
        """End a backward that has not raised."""
        self.executor.tell(BackwardEnded(task))
        self._end_pass()
        self._note_end(task, is_outermost)

    def _abandon(self) -> None:
        """Forget backwards that raised. Call this where none can be in progress."""
        self.executor.forget_interrupted()
        self.executor.tell(BackwardsAbandoned())
        self._end_pass()

    def _end_pass(self) -> None:
        if not (self._backwards.is_running or self._residency.num_forwards):
            self._gatherer.deferred_frees.warn_of_memory()

    def _note_begin(self, task: int, is_plain: bool) -> None:
        """Note that autograd has begun a backward. ``is_plain``: unless the engine runs it, a ``loss.backward()``."""
        if self.run_by_engine:
            # A backward without gradients, as of a model that is frozen, has nothing to reduce.
            if self.in_progress and self._backwards.is_first(task):
                # Units that it does not use may be reduced now.
                self.executor.tell(CallBegan())
        elif is_plain:
            if self._will_produce_gradients():
                # Units that this rank does not use may be reduced before it has a gradient, as on other ranks.
                self._note_gradient()
            elif not self._wants_gradients():
                self._listener.check_frozen_backward()

    def _note_end(self, task: int, is_outermost: bool) -> None:
        """Note that autograd has ended a backward, which has not raised."""
        # The gradients that ``torch.autograd.grad`` returns are none of parameters.
        if task not in self._producing:
            return
        self._producing.remove(task)
        self._ended.add(task)
        self._arriving.task = NONE
        if is_outermost:
            self._is_in_call = False
            if self.in_progress:
                try:
                    self._reducer.end_call()
                except BaseException:
                    self._run_raised = True
                    raise

    # -- gradients --------------------------------------------------------------------------------

    def _take_gradient(self, number: int, unit_index: int, index: int) -> None:
        unit_grads, (hooks, own_number) = self._reducer.gradients[unit_index], self._hooks[number]
        param = unit_grads.unit.params[index]
        # Autograd also calls the hook if a Function returned None instead of a gradient.
        gradient, param.grad = param.grad, None
        is_last_hook = len(hooks) == 1 or next(reversed(hooks)) == own_number
        task = current_graph_task_id()
        if task != self._arriving.task:
            # This may begin the backward, which resets the counts of arrived gradients, and takes what is in ``grad``.
            self.follow()
            self._note_gradient()
            self._arriving.task = task if task >= 0 else NONE
        if not is_last_hook:
            # This gradient has begun the backward, which puts the hooks of the user first, but too late for this one.
            # The end of the backward takes what they leave.
            param.grad = gradient
            return
        self._reducer.add(unit_grads, index, gradient)
        # Peers may have become ready for a sum since this rank launched it.
        self._reducer.progress()

    def _note_gradient(self) -> None:
        """Note that a parameter has a gradient, or will have one. The first one begins a plain ``loss.backward()``.

        Raises:
            LossScaleError: The gradient is of a loss that is not scaled.
            ZeroEngineError: The listener refuses the backward, or other losses of the step have weights.
        """
        if not self.run_by_engine:
            number = self._backwards.current(current_graph_task_id()).number
            is_next_call, self._is_in_call = self.in_progress and not self._is_in_call, True
            if number not in self._producing:
                # This comes before anything can refuse the backward, because a refused backward counts as failed.
                self._producing.add(number)
                self._begin_plain_span()
            first = self._backwards.cursors[0]
            if first.is_outermost:
                self._producing.add(first.number)
            if is_next_call:
                self._begin_call()
        if not self.in_progress:
            self._begin()
        if self._scaled_task is None and self._requires_scaled_loss:
            raise LossScaleError(
                "Loss scaling is required in fp16, and loss.backward() has no scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        if self._scaled_task is None and self._reducer.losses.is_weighted:
            raise ZeroEngineError(MIXED_LOSSES)
        # A weight counts with the first gradient: the backward may be torch.autograd.grad, or raise before.
        if self._uncounted is not None and self._uncounted[0] == self._backwards.cursors[0].number:
            self._count_weight()
        elif not self._reducer.losses.is_weighted:
            self._reducer.losses.is_plain = True

    def _will_produce_gradients(self) -> bool:
        """Return whether the backward in progress, unlike ``torch.autograd.grad``, accumulates gradients."""
        if functorch_active():
            return False
        trained = (param for param in self._params if param.requires_grad)
        # Otherwise a released parameter would be gathered.
        with DisableTorchFunctionSubclass():
            try:
                return any(will_engine_execute_node(get_gradient_edge(param).node) for param in trained)
            except RuntimeError:
                # ``torch.autograd.grad`` was asked for the gradient of the parameter.
                return False

    # -- begin and end ----------------------------------------------------------------------------

    def _wants_gradients(self) -> bool:
        return any(param.requires_grad for param in self._params)

    def _begin(self) -> None:
        wants_gradients = self._wants_gradients()
        # Both may refuse before anything changes its state.
        if wants_gradients:
            self._gatherer.check_has_weights("a backward")
        else:
            self._listener.check_frozen_backward()
        self._listener.check_backward(wants_gradients)
        self._ended.clear()
        if wants_gradients:
            self.executor.tell(self._listener.begin_backward(by_engine=self.run_by_engine))
            self.in_progress = True
            self._begin_call()

    def _begin_call(self) -> None:
        self._reducer.begin_call()
        # A hook that the user registered since ``initialize`` is to find the gradient, so it comes first.
        for hooks, own_number in self._hooks:
            if len(hooks) > 1:
                hooks[own_number] = hooks.pop(own_number)
        self.executor.tell(CallBegan())

    def _end(self) -> None:
        # If all parameters are frozen, the backward belongs to the loss of another model.
        if not self.in_progress:
            return
        try:
            # The next forward may be what ends the backward, and it may run in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                num_calls = self._reducer.end_backward()
                self._listener.end_backward(num_calls)
        except BaseException:
            # The gradients of the step cannot be used.
            self._run_raised = True
            raise
        self._leave_call()

    def _leave_call(self) -> None:
        """Note that no backward is in progress any more."""
        self.in_progress = self._is_in_call = False
        self._arriving.task = NONE

    @property
    def _is_executing(self) -> bool:
        # Outside of a backward autograd's number is -1.
        return self.run_by_engine or current_graph_task_id() >= 0

    @property
    def _raised(self) -> bool:
        # Read this only while no backward runs. A plain backward whose end was not reported has raised, because then
        # autograd drops its callbacks.
        return self._run_raised or bool(self._producing)

    @disable_compile
    def end_if_over(self) -> None:
        """End the last backward if it is over and has not been ended yet, unless it raised."""
        if self.in_progress and not self._is_executing and not self._raised:
            self._end()

    @disable_compile
    def finish(self) -> None:
        """End the last backward if it is over and has not been ended yet.

        If it raised, some of its gradients are missing, so all gradients of the step are dropped.
        """
        if self._is_executing:
            return
        self._end_plain_span()
        self.end_if_over()
        # A mark that remains belongs to a backward that raised, perhaps before it produced a gradient.
        self._scaled_task = self._uncounted = None
        if self._raised:
            # Numbers grow, so a backward with a lower one that has ended was not nested in the one that raised.
            after_others = any(ended < raised for ended in self._ended for raised in self._producing)
            self._run_raised = False
            self._producing.clear()
            self._leave_call()
            self._abandon()
            self._reducer.drop_gradients()
            self._listener.fail_backward(after_others)

    def check_ended(self) -> None:
        """Raise ``ZeroEngineError`` if a backward is in progress, or if the last one raised."""
        if self.in_progress:
            raise ZeroEngineError(
                "a gradient can be read and replaced after a backward, not during one, nor after one that raised"
            )

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress so far."""
        self._leave_call()
        self._reducer.drop_gradients()
        self._listener.drop_gradients()


def _indices(reducer: Reducer) -> Iterator[tuple[int, int]]:
    """Yield for each trainable parameter the index of its unit's gradients and its own in the unit."""
    for unit_index, unit_grads in enumerate(reducer.gradients):
        for index in range(len(unit_grads.unit.params)):
            yield unit_index, index
