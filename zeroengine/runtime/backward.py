"""The backward in progress: when it begins and ends, and when its gradients are reduced.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from zeroengine.errors import LossScaleError, ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.autograd_hooks import WeakMethod
from zeroengine.runtime.backward_listener import BackwardListener
from zeroengine.runtime.cursor import Cursor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.traversal import Traversal
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    functorch_active,
    queue_callback,
    will_engine_execute_node,
)

# Stands for the backward of ``run`` in place of autograd's number of a backward.
_RUN_BY_ENGINE = -1


class Backward:
    """The backwards of the model, whether the engine or the user runs them: when they begin and end.

    Args:
        units: All units.
        units_of_items: The units of items of lists, which are released after each visit.
        gatherer: Gathers units.
        reducer: Takes the gradients.
        is_in_forward: Whether a forward of the whole model is in progress.
        requires_scaled_loss: Whether a loss that was not multiplied by the loss scale is refused.
        timer: Times backwards.

    Attributes:
        traversal: Where the backwards are that autograd runs.
        listener: Counts the backwards of a step, once there are steps.
        in_progress: Whether a backward that wants gradients has begun and has not been ended.
        run_by_engine: Whether ``Engine.backward`` is running the backward in progress.
        hook_handles: The handles of the hooks on parameters.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        units_of_items: set[Unit],
        gatherer: Gatherer,
        reducer: Reducer,
        is_in_forward: Callable[[], bool],
        requires_scaled_loss: bool,
        timer: Timer,
    ) -> None:
        self._gatherer, self._reducer = gatherer, reducer
        self.traversal = Traversal(units_of_items, gatherer, self, is_in_forward)
        self._is_in_forward, self._requires_scaled_loss, self._timer = is_in_forward, requires_scaled_loss, timer
        self._params = [param for unit in units if unit.trainable for param in unit.params]
        self._units_with_visits = [unit for unit in units if unit.trainable and unit.is_releasable]
        self.listener = BackwardListener()
        # The timer's span of a plain backward in progress.
        self._plain_span = -1
        self.in_progress = self.run_by_engine = self._run_raised = False
        # See "What is known of plain backwards".
        self._producing: set[int] = set()
        self._ended: set[int] = set()
        self._is_in_call = False
        self._scaled_task: int | None = None
        # The parameter owns its hook in C++, so the hook takes indices and nothing that owns the parameter.
        self.hook_handles = [
            param.register_post_accumulate_grad_hook(WeakMethod(self, Backward._post_accumulate_grad, number, *indices))
            for number, (param, indices) in enumerate(zip(self._params, _indices(reducer), strict=True))
        ]
        # By the parameter's number: its hooks, in the order in which autograd calls them, and the number of this one.
        self._hooks = [(handle.hooks_dict_ref(), handle.id) for handle in self.hook_handles]

    # -- calls of the engine ----------------------------------------------------------------------

    def run(
        self, loss: torch.Tensor, retain_graph: bool, create_graph: bool, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Run ``loss.backward``. If a scaled loss is required, ``loss`` is scaled already."""
        # An earlier plain backward may not have been ended yet.
        self.finish()
        span = self._timer.begin("backward")
        # Autograd comes to the loss first.
        handle = loss.register_hook(WeakMethod(self.traversal, Traversal.follow_backward))
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
            self._end()
        finally:
            handle.remove()
            self._timer.end(span)
            self._timer.note_training()

    def mark_scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, marked so that a plain ``backward()`` of it is known to be scaled."""
        if loss.requires_grad:
            loss.register_hook(WeakMethod(self, Backward._begin_scaled))
        return loss

    def _begin_scaled(self) -> None:
        self._scaled_task = current_graph_task_id()
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
        self.traversal.abandon()
        self.finish()
        if torch.is_grad_enabled():
            self.listener.begin_forward()
        # The forward is to find the parameters with their own class.
        self._reducer.user_gradients.pause()

    def leave_forward(self) -> None:
        """Note that a forward of the whole model has ended or raised outside of any backward."""
        self._reducer.user_gradients.resume()

    # -- gradients --------------------------------------------------------------------------------

    def _close_unused(self) -> None:
        """Let units be reduced that this backward does not use."""
        if self.traversal.is_running:
            self.reduce_if_over(self._units_with_visits)

    def note_begin(self, cursor: Cursor) -> None:
        """Note that autograd has begun the backward of ``cursor``."""
        if self.run_by_engine:
            if cursor is self.traversal.cursors[0]:
                self._close_unused()
        elif cursor.is_outermost and cursor.accumulates:
            if self._will_produce_gradients():
                # Units that this rank does not use may be reduced before it has a gradient, as on other ranks.
                self._note_gradient()
            elif not self._wants_gradients():
                self.listener.check_frozen_backward()

    def note_end(self, cursor: Cursor) -> None:
        """Note that autograd has ended the backward of ``cursor``, which has not raised."""
        # The gradients that ``torch.autograd.grad`` returns are none of parameters.
        if cursor.number not in self._producing:
            return
        self._producing.remove(cursor.number)
        self._ended.add(cursor.number)
        if cursor.is_outermost:
            self._is_in_call = False
            if self.in_progress:
                try:
                    self._reducer.end_call()
                except BaseException:
                    self._run_raised = True
                    raise

    def reduce_if_over(self, units: Iterable[Unit]) -> None:
        """Let those of ``units`` be reduced that the backwards use no more."""
        if not self.is_producing_gradients:
            return
        closed = [unit for unit in units if self.traversal.is_over(unit) and self._reducer.complete_with_zeros(unit)]
        for unit in closed:
            self._note_complete(unit)
        if closed:
            self.advance()

    def advance(self) -> None:
        """Let units be reduced of which no visit is pending any more."""
        if self.is_producing_gradients:
            self._reducer.advance(self.traversal.is_pending)

    def _note_complete(self, unit: Unit) -> None:
        self._timer.name_backward(unit.name)
        # A forward in progress, such as a recomputation, may use the unit again before it ends.
        if not self._is_in_forward():
            self._gatherer.release_unhooked_use(unit)

    def _post_accumulate_grad(self, number: int, unit_index: int, index: int) -> None:
        unit_grads, (hooks, own_number) = self._reducer.gradients[unit_index], self._hooks[number]
        param = unit_grads.unit.params[index]
        # Autograd also calls the hook if a Function returned None instead of a gradient.
        gradient, param.grad = param.grad, None
        is_last_hook = next(reversed(hooks)) == own_number
        # This may begin the backward, which resets the counts of arrived gradients, and takes what is in ``grad``.
        self.traversal.follow_backward()
        self._note_gradient()
        if not is_last_hook:
            # This gradient has begun the backward, which puts the hooks of the user first, but too late for this one.
            # The end of the backward takes what they leave.
            param.grad = gradient
            return
        if self._reducer.add(unit_grads, index, gradient):
            self._note_complete(unit_grads.unit)
            self.advance()
        self._reducer.progress()

    def _note_gradient(self) -> None:
        """Note that a parameter has a gradient, or will have one. The first one begins a plain ``loss.backward()``.

        Raises:
            LossScaleError: The gradient is of a loss that is not scaled.
            ZeroEngineError: The listener refuses the backward.
        """
        if not self.run_by_engine:
            number = self.traversal.current().number
            is_next_call, self._is_in_call = self.in_progress and not self._is_in_call, True
            if number not in self._producing:
                # This comes before anything can refuse the backward, because a refused backward counts as failed.
                self._producing.add(number)
                self._begin_plain_span()
            first = self.traversal.cursors[0]
            if first.is_outermost:
                self._producing.add(first.number)
            if is_next_call:
                self._begin_call()
        if not self.in_progress:
            self._begin()
        if self._requires_scaled_loss and self._scaled_task is None:
            raise LossScaleError(
                "Loss scaling is required in fp16, and loss.backward() has no scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )

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
            self.listener.check_frozen_backward()
        self.listener.check_backward(wants_gradients)
        self._ended.clear()
        if wants_gradients:
            self.listener.begin_backward()
            self._reducer.begin_backward(by_engine=self.run_by_engine)
            self.in_progress = True
            self._begin_call()

    def _begin_call(self) -> None:
        self._reducer.begin_call()
        for hooks, own_number in self._hooks:
            # A hook that the user registered since ``initialize`` is to find the gradient, so it comes first.
            if len(hooks) > 1:
                hooks[own_number] = hooks.pop(own_number)
        self._close_unused()

    def _end(self) -> None:
        # If all parameters are frozen, the backward belongs to the loss of another model.
        if not self.in_progress:
            return
        try:
            # The next forward may be what ends the backward, and it may run in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                num_calls = self._reducer.end_backward()
                self.listener.end_backward(num_calls)
        except BaseException:
            # The gradients of the step cannot be used.
            self._run_raised = True
            raise
        self.in_progress = self._is_in_call = False

    @property
    def is_producing_gradients(self) -> bool:
        """Whether the backward that runs now accumulates gradients."""
        # Between two plain calls ``torch.autograd.grad`` may run, which says nothing about the second one.
        return self.in_progress and (self.run_by_engine or self._is_in_call)

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
        self._scaled_task = None
        if self._raised:
            # Numbers grow, so a backward with a lower one that has ended was not nested in the one that raised.
            after_others = any(ended < raised for ended in self._ended for raised in self._producing)
            self._run_raised = False
            self._producing.clear()
            self.in_progress = self._is_in_call = False
            self.traversal.abandon()
            self._reducer.drop_gradients()
            self.listener.fail_backward(after_others)

    def check_ended(self) -> None:
        """Raise ``ZeroEngineError`` if a backward is in progress, or if the last one raised."""
        if self.in_progress:
            raise ZeroEngineError(
                "a gradient can be read and replaced after a backward, not during one, nor after one that raised"
            )

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress so far."""
        self.in_progress = self._is_in_call = False
        self._reducer.drop_gradients()
        self.listener.drop_gradients()


def _indices(reducer: Reducer) -> Iterator[tuple[int, int]]:
    """Yield for each trainable parameter the index of its unit's gradients and its own in the unit."""
    for unit_index, unit_grads in enumerate(reducer.gradients):
        for index in range(len(unit_grads.unit.params)):
            yield unit_index, index
