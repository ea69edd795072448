"""Tracks the backward in progress: when it begins, when it ends, whether it failed, and whether its loss is scaled.

``module_backwards.py`` tracks the backwards of single modules within it.

[Note: When a backward begins and ends]
``Engine.backward`` runs a backward and so knows when it begins and ends. A plain ``loss.backward()`` is noticed when
its first gradient arrives. Autograd does not report its end: a queued callback runs at the end of the innermost
backward, which may be a reentrant checkpoint's. So the tracker ends it when its gradients are needed, or at the next
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from zeroengine.errors import LossScaleError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.backward_calls import is_autograd_grad, is_outermost_backward
from zeroengine.runtime.module_backwards import Hook, queue_callback
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import disable_compile

# Stands for the backward of ``run`` in place of autograd's id of a backward.
_RUN_BY_ENGINE = -1


class BackwardListener:
    """The events of a backward. Subclasses override the events that concern them; the others do nothing.

    Listeners are called in the order in which they subscribed; at the end of a backward in the reverse order.
    """

    def begin_forward(self) -> None:
        """A forward of the whole model begins with autograd enabled, outside of any backward."""

    def end_forward(self) -> None:
        """A forward of the whole model has ended or raised, outside of any backward."""

    def check_backward(self, wants_gradients: bool) -> None:
        """A backward is about to begin. Raise to refuse it: no listener has seen ``begin_backward`` yet.

        Args:
            wants_gradients: False if all parameters are frozen, such as those of a GAN's discriminator while the
                loss of the generator passes through it. Then no further event of this backward follows.
        """

    def begin_backward(self) -> None:
        """A backward begins."""

    def call_began(self) -> None:
        """A call of ``Engine.backward`` or ``loss.backward()`` has begun, and every listener knows its backward."""

    def unit_held(self, unit: Unit) -> None:
        """``unit``, which is trainable, must not be reduced before ``unit_not_held``, or the end of the backward."""

    def unit_not_held(self, unit: Unit) -> None:
        """``unit`` may be reduced once its gradients are complete."""

    def unit_past(self, unit: Unit) -> None:
        """No further gradient of ``unit``, which is trainable, comes in the backward in progress."""

    def unit_complete(self, unit: Unit) -> None:
        """Every trainable parameter of ``unit`` has its gradient."""

    def end_call(self) -> None:
        """A plain ``loss.backward()`` has ended. Before ``end_backward`` others may follow, as of a second loss."""

    def end_backward(self, num_calls: int) -> None:
        """A backward has ended.

        Args:
            num_calls: The number of plain ``loss.backward()`` calls that it consists of; 0 for ``Engine.backward``.
        """

    def fail_backward(self, after_others: bool) -> None:
        """A backward raised, so some of its gradients are missing: drop all gradients of the step in progress.

        Args:
            after_others: Whether other backwards produced gradients that ``end_backward`` has not reported yet.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress, which starts again."""


class BackwardTracker:
    """Tells its listeners when a backward begins, ends or fails, whether the engine or the user began it.

    Args:
        params: The trainable parameters; any of them may be frozen temporarily.
        requires_scaled_loss: Whether a loss that was not multiplied by the loss scale is refused.
        timer: Times backwards.

    Attributes:
        in_progress: Whether a backward that wants gradients has begun and has not been ended.
        reduces_gradients: Whether gradients are reduced over the ranks; False inside ``no_sync``.
        is_last_microbatch: Whether the backward in progress is probably the last one before the update.
        run_by_engine: Whether ``Engine.backward`` is running the backward in progress.
        loss: What ``Engine.backward`` was given, while it runs; None in a plain backward.
        num_ended_calls: The number of plain ``loss.backward()`` calls of the backward in progress that have ended.
    """

    def __init__(self, params: Sequence[nn.Parameter], requires_scaled_loss: bool, timer: Timer) -> None:
        self._params, self._requires_scaled_loss, self._timer = params, requires_scaled_loss, timer
        # The timer's span of a plain backward in progress.
        self._plain_span = -1
        self._listeners: list[BackwardListener] = []
        self.in_progress = False
        self.reduces_gradients = True
        self.is_last_microbatch = True
        self.run_by_engine = False
        self.loss: torch.Tensor | None = None
        self._run_raised = False
        # Plain backwards, by autograd's ids, that have ended since ``_begin``.
        self._ended_graph_tasks: set[int] = set()
        # Those of them that were nested in another backward do not count here.
        self.num_ended_calls = 0
        # Whether a plain call that produced gradients is in progress. The backwards of reentrant checkpoints within it
        # begin and end meanwhile.
        self._is_in_call = False
        # Plain backwards that produced gradients and have not ended. Autograd reports no end of one that raised.
        self._graph_tasks: set[int] = set()
        # The plain backward, not nested in another, that has come to an output of the model.
        self._outer_graph_task: int | None = None
        # The backward whose loss is known to be scaled.
        self._scaled_graph_task: int | None = None

    def subscribe(self, listener: BackwardListener) -> None:
        """Call the methods of ``listener`` from now on."""
        self._listeners.append(listener)

    def run(
        self, loss: torch.Tensor, retain_graph: bool, create_graph: bool, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Run ``loss.backward``. If a scaled loss is required, ``loss`` is scaled already."""
        # An earlier plain backward may not have been ended yet.
        self.finish()
        span = self._timer.begin("backward")
        self.loss = loss
        try:
            # The listeners, too, ask who runs the backward that begins.
            self.run_by_engine = True
            try:
                self._begin()
                self._scaled_graph_task = _RUN_BY_ENGINE
                try:
                    loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
                except BaseException:
                    # The next ``finish`` tells the listeners, as it does for a plain backward that raised.
                    self._run_raised = True
                    raise
            finally:
                self.run_by_engine = False
            self._scaled_graph_task = None
            self._end()
        finally:
            self.loss = None
            self._timer.end(span)
            self._timer.note_training()

    def mark_scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, marked so that a plain ``backward()`` of it is known to be scaled."""
        if loss.requires_grad:
            loss.register_hook(Hook(self, BackwardTracker._begin_scaled))
        return loss

    def _begin_scaled(self) -> None:
        self._scaled_graph_task = torch._C._current_graph_task_id()
        # The mark holds for this backward alone: the next loss must be marked as well. Autograd drops the callback of a
        # backward that raises, and then ``finish`` removes the mark.
        queue_callback(partial(setattr, self, "_scaled_graph_task", None))

    def watch_output(self, output: torch.Tensor) -> None:
        """Time a plain backward through ``output``, of the model's forward, from its beginning.

        Without this it would be timed from its first gradient of a parameter.
        """
        # A parameter that the model returns would keep the hook, and get another one in each forward.
        if output.grad_fn is not None:
            output.register_hook(Hook(self, BackwardTracker._begin_plain_span))

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

    # -- events -----------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Note a forward of the whole model that begins outside of any backward: the previous backward has ended."""
        self.finish()
        if torch.is_grad_enabled():
            for listener in self._listeners:
                listener.begin_forward()

    def leave_forward(self) -> None:
        """Note that a forward of the whole model has ended or raised outside of any backward."""
        for listener in self._listeners:
            listener.end_forward()

    def note_reached(self) -> None:
        """Note that autograd has come to an output of the model, or of one of its modules.

        Where reentrant checkpoints have all trainable parameters, gradients come in nested backwards alone, and nothing
        else shows that the outer one has ended, or has raised.
        """
        if not self.run_by_engine and is_outermost_backward():
            graph_task = torch._C._current_graph_task_id()
            if graph_task != self._outer_graph_task:
                self._outer_graph_task = graph_task
                queue_callback(partial(self._end_graph_task, graph_task))
                # Units that this rank does not use may be reduced before it has a gradient, as on other ranks.
                if self._will_produce_gradients():
                    self.note_gradient()

    def _will_produce_gradients(self) -> bool:
        """Return whether the backward in progress, unlike ``torch.autograd.grad``, accumulates gradients."""
        if torch._C._are_functorch_transforms_active() or is_autograd_grad():
            return False
        trained = (param for param in self._params if param.requires_grad)
        # Otherwise a released parameter would be gathered.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return any(torch._C._will_engine_execute_node(get_gradient_edge(param).node) for param in trained)
            except RuntimeError:
                # ``torch.autograd.grad`` was asked for the gradient of the parameter.
                return False

    def note_gradient(self) -> None:
        """Note that a parameter has a gradient, or will have one. The first one begins a plain ``loss.backward()``.

        Raises:
            LossScaleError: The gradient is of a loss that is not scaled.
            ZeroEngineError: A listener refuses the backward.
        """
        if not self.run_by_engine:
            # Nested backwards, such as those of reentrant checkpoints, have different ids.
            graph_task = torch._C._current_graph_task_id()
            is_next_call, self._is_in_call = self.in_progress and not self._is_in_call, True
            if graph_task not in self._graph_tasks:
                # This comes before anything can refuse the backward, because a refused backward counts as failed.
                self._graph_tasks.add(graph_task)
                self._begin_plain_span()
                if graph_task != self._outer_graph_task:
                    queue_callback(partial(self._end_graph_task, graph_task))
            if self._outer_graph_task is not None:
                self._graph_tasks.add(self._outer_graph_task)
            if is_next_call:
                self._report_call()
        if not self.in_progress:
            self._begin()
        if self._requires_scaled_loss and self._scaled_graph_task is None:
            raise LossScaleError(
                "Loss scaling is required in fp16, and loss.backward() has no scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )

    def note_unit_held(self, unit: Unit) -> None:
        """Tell the listeners not to reduce ``unit`` yet."""
        for listener in self._listeners:
            listener.unit_held(unit)

    def note_unit_not_held(self, unit: Unit) -> None:
        """Tell the listeners that ``unit`` may be reduced once its gradients are complete."""
        if self.is_producing_gradients:
            for listener in self._listeners:
                listener.unit_not_held(unit)

    def note_unit_past(self, unit: Unit) -> None:
        """Tell the listeners that no further gradient of ``unit`` comes in the backward in progress."""
        if self.is_producing_gradients:
            for listener in self._listeners:
                listener.unit_past(unit)

    def note_unit_complete(self, unit: Unit) -> None:
        """Tell the listeners that every trainable parameter of ``unit`` has its gradient."""
        for listener in self._listeners:
            listener.unit_complete(unit)

    def _end_graph_task(self, graph_task: int) -> None:
        if graph_task == self._outer_graph_task:
            self._outer_graph_task = None
        # The gradients that ``torch.autograd.grad`` returns are none of parameters.
        if graph_task not in self._graph_tasks:
            return
        self._graph_tasks.remove(graph_task)
        self._ended_graph_tasks.add(graph_task)
        if not is_outermost_backward():
            return
        self._is_in_call = False
        if self.in_progress:
            try:
                for listener in self._listeners:
                    listener.end_call()
            except BaseException:
                self._run_raised = True
                raise
            self.num_ended_calls += 1

    def _begin(self) -> None:
        wants_gradients = any(param.requires_grad for param in self._params)
        # Every listener may refuse before the first of them changes its state.
        for listener in self._listeners:
            listener.check_backward(wants_gradients)
        self._ended_graph_tasks.clear()
        self.num_ended_calls = 0
        if wants_gradients:
            for listener in self._listeners:
                listener.begin_backward()
            self.in_progress = True
            self._report_call()

    def _report_call(self) -> None:
        for listener in self._listeners:
            listener.call_began()

    def _end(self) -> None:
        # If all parameters are frozen, the backward belongs to the loss of another model.
        if not self.in_progress:
            return
        try:
            # The next forward may be what ends the backward, and it may run in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                for listener in reversed(self._listeners):
                    listener.end_backward(self.num_ended_calls)
        except BaseException:
            # Only some listeners have ended the backward, so the gradients of the step cannot be used.
            self._run_raised = True
            raise
        self.in_progress = self._is_in_call = False

    # -- ends that autograd does not report --------------------------------------------------------

    @property
    def is_producing_gradients(self) -> bool:
        """Whether the backward that runs now accumulates gradients."""
        # Between two plain calls ``torch.autograd.grad`` may run, which says nothing about the second one.
        return self.in_progress and (self.run_by_engine or self._is_in_call)

    @property
    def _is_running(self) -> bool:
        # Outside of a backward autograd's id is -1.
        return self.run_by_engine or torch._C._current_graph_task_id() >= 0

    @property
    def _raised(self) -> bool:
        # Read this only while no backward runs. A plain backward whose end was not reported has raised, because then
        # autograd drops its callbacks.
        return self._run_raised or bool(self._graph_tasks)

    @disable_compile
    def end_if_over(self) -> None:
        """End the last backward if it is over and has not been ended yet, unless it raised."""
        if self.in_progress and not self._is_running and not self._raised:
            self._end()

    @disable_compile
    def finish(self) -> None:
        """End the last backward if it is over and has not been ended yet.

        If it raised, some of its gradients are missing, so the listeners drop all gradients of the step.
        """
        if self._is_running:
            return
        self._end_plain_span()
        self.end_if_over()
        # One that remains has raised.
        self._outer_graph_task = None
        # A mark that remains belongs to a backward that raised, perhaps before it produced a gradient.
        self._scaled_graph_task = None
        if self._raised:
            # Ids grow, so a backward with a lower id that has ended was not nested in the one that raised.
            after_others = any(ended < raised for ended in self._ended_graph_tasks for raised in self._graph_tasks)
            self._run_raised = False
            self._graph_tasks.clear()
            self.in_progress = self._is_in_call = False
            for listener in self._listeners:
                listener.fail_backward(after_others)

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress, which starts again."""
        self.in_progress = self._is_in_call = False
        for listener in self._listeners:
            listener.drop_gradients()
