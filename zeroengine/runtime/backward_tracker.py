"""Tracks the backward in progress: when it begins, when it ends, whether it failed, and whether its loss is scaled.

[Note: When a backward begins and ends]
``Engine.backward`` runs a backward and so knows both ends of it. A plain ``loss.backward()`` is noticed when its first
gradient arrives. Nothing tells when it ends: what is queued with autograd runs at the end of the innermost backward,
such as that of a reentrant checkpoint. So the tracker ends it where its gradients are needed, or at the next forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.autograd_tracking import Hook, queue_callback
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import disable_compile

# The code of the function through which every call of autograd runs a backward. It is looked for on the stack.
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
# Stands for the backward of ``run`` where otherwise autograd's number of a backward stands.
_RUN_BY_ENGINE = -1


class BackwardListener:
    """The events of a backward. Override those of interest; the others do nothing.

    Listeners are called in the order in which they subscribed; at the end of a backward in the reverse order.
    """

    def begin_forward(self) -> None:
        """A forward of the whole model begins with autograd enabled, outside of any backward."""

    def check_backward(self, wants_gradients: bool) -> None:
        """A backward is about to begin. Raise to refuse it: no listener has seen ``begin_backward`` yet.

        Args:
            wants_gradients: False where all parameters are frozen, as those of a GAN's discriminator while the loss
                of the generator passes through it. No further event of this backward follows then.
        """

    def begin_backward(self) -> None:
        """A backward begins."""

    def unit_complete(self, unit: Unit) -> None:
        """Every trainable parameter of ``unit`` has its gradient."""

    def end_backward(self, num_calls: int) -> None:
        """A backward has ended.

        Args:
            num_calls: The calls of a plain ``loss.backward()`` that it consists of; 0 for ``Engine.backward``.
        """

    def fail_backward(self, after_others: bool) -> None:
        """A backward raised, so part of its gradients is missing: drop all gradients of the step in progress.

        Args:
            after_others: Whether other backwards brought gradients that ``end_backward`` has not reported yet.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress, which starts anew."""


class BackwardTracker:
    """Tells its listeners when a backward begins, ends or fails, whoever began it.

    Args:
        params: The trainable parameters; each may be frozen for a while.
        requires_scaled_loss: Whether a loss that was not multiplied by the loss scale is refused.

    Attributes:
        in_progress: Whether a backward has begun that wants gradients and has not been ended.
        sync_enabled: Whether gradients are reduced; False inside ``no_sync``.
        is_last_microbatch: Whether the backward in progress is the last one before the update, as far as is known.
    """

    def __init__(self, params: Sequence[nn.Parameter], requires_scaled_loss: bool) -> None:
        self._params, self._requires_scaled_loss = params, requires_scaled_loss
        self._listeners: list[BackwardListener] = []
        self.in_progress = False
        self.sync_enabled = True
        self.is_last_microbatch = True
        self._run_by_engine = False
        self._run_raised = False
        # Plain backwards, by autograd's numbers, that have ended since ``_begin``.
        self._ended_graph_tasks: set[int] = set()
        # How many of these were within no other backward.
        self._num_calls = 0
        # Plain backwards that brought gradients and have not ended. Autograd reports no end of one that raised.
        self._graph_tasks: set[int] = set()
        # The backward whose loss is known to be scaled.
        self._scaled_graph_task: int | None = None

    def subscribe(self, listener: BackwardListener) -> None:
        """Call the methods of ``listener`` from now on."""
        self._listeners.append(listener)

    def run(
        self, loss: torch.Tensor, retain_graph: bool, create_graph: bool, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Run ``loss.backward``. ``loss`` is scaled already where that is required."""
        # The end of an earlier plain backward may not have been noticed yet. Its listeners hear of it first.
        self.finish()
        self._begin()
        self._run_by_engine, self._scaled_graph_task = True, _RUN_BY_ENGINE
        try:
            loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
        except BaseException:
            # The next ``finish`` tells the listeners, as it does for a plain backward that raised.
            self._run_raised = True
            raise
        finally:
            self._run_by_engine = False
        self._scaled_graph_task = None
        self._end()

    def mark_scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, of which a plain ``backward()`` will be known to be scaled."""
        if loss.requires_grad:
            loss.register_hook(Hook(self, BackwardTracker._begin_scaled))
        return loss

    def _begin_scaled(self) -> None:
        self._scaled_graph_task = torch._C._current_graph_task_id()
        # The mark holds for this backward alone: the next loss must be marked as well. Autograd drops the callback of a
        # backward that raises, and ``finish`` takes the mark back instead.
        queue_callback(partial(setattr, self, "_scaled_graph_task", None))

    # -- events -----------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Note a forward of the whole model that begins outside of any backward: the backward before it has ended."""
        self.finish()
        if torch.is_grad_enabled():
            for listener in self._listeners:
                listener.begin_forward()

    def note_gradient(self) -> None:
        """Note that a parameter has a gradient. A plain ``loss.backward()`` begins with its first one.

        Raises:
            ZeroEngineError: The gradient is of a loss that is not scaled, or a listener refuses the backward.
        """
        if not self._run_by_engine:
            # Autograd's number tells apart backwards that are within each other, such as those of reentrant
            # checkpoints.
            graph_task = torch._C._current_graph_task_id()
            if graph_task not in self._graph_tasks:
                # Noted before anything can refuse the backward below: a refused backward counts as one that failed.
                self._graph_tasks.add(graph_task)
                queue_callback(partial(self._end_graph_task, graph_task))
        if not self.in_progress:
            self._begin()
        if self._requires_scaled_loss and self._scaled_graph_task is None:
            raise ZeroEngineError(
                "loss.backward() without the loss scale that fp16 needs: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )

    def note_unit_complete(self, unit: Unit) -> None:
        """Tell the listeners that every trainable parameter of ``unit`` has its gradient."""
        for listener in self._listeners:
            listener.unit_complete(unit)

    def _end_graph_task(self, graph_task: int) -> None:
        self._graph_tasks.discard(graph_task)
        self._ended_graph_tasks.add(graph_task)
        self._num_calls += _is_outermost()

    def _begin(self) -> None:
        wants_gradients = any(param.requires_grad for param in self._params)
        # Every listener may refuse before the first of them changes its state.
        for listener in self._listeners:
            listener.check_backward(wants_gradients)
        self._ended_graph_tasks.clear()
        self._num_calls = 0
        if wants_gradients:
            for listener in self._listeners:
                listener.begin_backward()
            self.in_progress = True

    def _end(self) -> None:
        # Where all parameters are frozen, the backward belongs to the loss of another model.
        if not self.in_progress:
            return
        try:
            # A forward may end the backward before it, in whatever mode that forward runs.
            with torch.inference_mode(False), torch.no_grad():
                for listener in reversed(self._listeners):
                    listener.end_backward(self._num_calls)
        except BaseException:
            # Some listeners have ended the backward and others have not, so the gradients of the step cannot be used.
            self._run_raised = True
            raise
        self.in_progress = False

    # -- ends that nobody announces ---------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        # Outside of a backward autograd's number is -1.
        return self._run_by_engine or torch._C._current_graph_task_id() >= 0

    @property
    def _raised(self) -> bool:
        # This is asked while no backward runs. A plain backward whose end was not reported has raised, for autograd
        # calls no callback of a backward that raised.
        return self._run_raised or bool(self._graph_tasks)

    @disable_compile
    def end_if_over(self) -> None:
        """End the last backward where that has not been done yet, unless it raised or is still running."""
        if self.in_progress and not self._is_running and not self._raised:
            self._end()

    @disable_compile
    def finish(self) -> None:
        """End the last backward where that has not been done yet, unless it is still running.

        If it raised, part of its gradients has come and part has not, so the listeners drop those of the whole step.
        """
        if self._is_running:
            return
        self.end_if_over()
        # No backward is running. A mark that is left is of one that raised, perhaps before it brought a gradient.
        self._scaled_graph_task = None
        if self._raised:
            # Autograd numbers backwards as they begin, so one that ended before is no part of the one that raised.
            after_others = any(ended < raised for ended in self._ended_graph_tasks for raised in self._graph_tasks)
            self._run_raised = False
            self._graph_tasks.clear()
            self.in_progress = False
            for listener in self._listeners:
                listener.fail_backward(after_others)

    def drop_gradients(self) -> None:
        """Drop the gradients of the step in progress, which starts anew."""
        self.in_progress = False
        for listener in self._listeners:
            listener.drop_gradients()


def _is_outermost() -> bool:
    """Return whether the backward of autograd that ends now is within no other. Call it as its last callback.

    A node of the outer backward calls the inner one, in the thread that runs the node. That is either the thread that
    called the outer backward, whose call is then further up the stack, or a thread of autograd, which Python has not
    started.
    """
    frame, num_calls = sys._getframe(), 0
    while frame is not None:
        num_calls += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    # The callback runs inside the call that it belongs to. In the thread of that call one frame is therefore the call's
    # own, and only a second one is an outer backward. In a thread of autograd's the first one is an outer backward.
    is_autograd_thread = isinstance(threading.current_thread(), threading._DummyThread)
    return num_calls < (1 if is_autograd_thread else 2)
