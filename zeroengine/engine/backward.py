"""The backward in progress: where it begins and ends, and whether its loss is scaled."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zeroengine.engine.accumulation import Accumulation
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.runtime.autograd_tracking import queue_callback
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.reducer import Reducer
from zeroengine.utils.compiler_disable import eager

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # by which all calls of autograd go
BY_ENGINE = -1  # no number of autograd's


class Backward:
    """The backward in progress, whoever began it: ``Engine.backward``, or a plain ``loss.backward()`` that met a hook.

    Args:
        scales: whether the loss must be scaled.
        accumulation: counts backwards, and knows when one has raised in the middle of a step.
        begins: called as one begins, before anything else happens, with whether any gradient is wanted of it.

    Attributes:
        gatherer, reducer: set when they are made, for they call ``arriving`` and ``enter_forward``.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(
        self, scaler: LossScaler, scales: bool, accumulation: Accumulation, begins: Callable[[bool], None]
    ) -> None:
        self._scaler, self._scales = scaler, scales
        self._accumulation, self._begins = accumulation, begins
        self._by_engine = False  # whether ``run`` is under way
        self._run_raised = False
        self._ended_graph_tasks: set[int] = set()  # of those, since the first gradient came
        self._num_calls = 0  # of these, that are within no other backward
        self._graph_tasks: set[int] = set()  # of autograd: plain backwards that brought gradients and have not ended
        self._scaled: int | None = None  # autograd's number of the backward whose loss is scaled

    def run(
        self, loss: torch.Tensor, retain_graph: bool, create_graph: bool, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """``loss.backward``, of the scaled loss."""
        self.finish()
        self._begin()
        self._by_engine, self._scaled = True, BY_ENGINE
        try:
            (loss if self._scaler.scale == 1 else self._times_scale(loss)).backward(
                retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
            )
        except BaseException:
            self._run_raised = True
            raise
        finally:
            self._by_engine = False
        self._scaled = None
        self._end()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for a plain ``backward()``, which tells by it that it is scaled."""
        scaled = self._times_scale(loss)
        me = weakref.ref(self)

        def starts(_: torch.Tensor) -> None:
            backward = me()
            if backward is not None:
                backward._scaled = torch._C._current_graph_task_id()
                queue_callback(backward._scaled_ended)

        if scaled.requires_grad:
            scaled.register_hook(starts)
        return scaled

    def _scaled_ended(self) -> None:
        self._scaled = None

    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._scaler.scale

    def arriving(self) -> None:
        """A parameter has a gradient: of ``run``, or of a plain ``loss.backward()``, which begins with its first one.

        Nothing tells when a plain backward ends: what is queued with autograd comes at the end of the innermost one,
        such as that of a reentrant checkpoint. So it is ended where its gradients are needed, or by the next forward.

        Raises:
            ZeroEngineError: the gradient is of a loss that is not scaled.
        """
        if not self._by_engine:
            graph_task = torch._C._current_graph_task_id()
            if graph_task not in self._graph_tasks:
                self._graph_tasks.add(graph_task)  # if the backward is refused below it has failed, for it has begun
                queue_callback(partial(self._end_graph_task, graph_task))
        if not self.reducer.in_backward:
            self._begin()
        if self._scales and self._scaled is None:
            raise ZeroEngineError(
                "loss.backward() without the loss scale that fp16 needs: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )

    def _end_graph_task(self, graph_task: int) -> None:
        self._graph_tasks.discard(graph_task)
        self._ended_graph_tasks.add(graph_task)
        self._num_calls += _is_outermost()

    def enter_forward(self) -> None:
        """A forward of the whole model begins outside of any backward."""
        self.finish()
        if torch.is_grad_enabled():
            self._accumulation.begin_forward()

    def _begin(self) -> None:
        wanted = self.reducer.needs_gradients()
        self._begins(wanted)
        self._ended_graph_tasks.clear()
        self._num_calls = 0
        boundary = wanted and self._accumulation.begin_backward(stays_local=not self.reducer.sync_enabled)
        if wanted:
            self.reducer.is_last_microbatch = boundary
            self.reducer.begin_backward()

    def _end(self) -> None:
        if not self.reducer.in_backward:
            return  # of another model's loss, with all parameters here frozen meanwhile
        try:
            with torch.inference_mode(False), torch.no_grad():  # a forward may end it, in whatever mode that is
                self.reducer.end_backward()
        except BaseException:
            self._run_raised = True
            raise
        self._accumulation.end_backward(self._num_calls)

    @property
    def _raised(self) -> bool:
        return self._run_raised or bool(self._graph_tasks)

    @eager
    def end_if_over(self) -> None:
        """End the last backward where that has not been done yet, unless it raised or is still under way."""
        inside = self._by_engine or torch._C._current_graph_task_id() >= 0
        if self.reducer.in_backward and not inside and not self._raised:
            self._end()

    @eager
    def finish(self) -> None:
        """End the last backward where that has not been done yet, unless it is still under way.

        If it raised, part of its gradients has come and part has not, so all of this step are dropped. Where the step
        had gradients of earlier backwards it cannot go on without them: ``Accumulation`` refuses it.
        """
        if self._by_engine or torch._C._current_graph_task_id() >= 0:
            return
        self.end_if_over()
        if self._raised:
            # Autograd numbers backwards as they begin, so one that ended before is no part of the one that raised.
            after_others = any(ended < raised for ended in self._ended_graph_tasks for raised in self._graph_tasks)
            self._run_raised = False
            self._graph_tasks.clear()
            self._scaled = None
            self._accumulation.fail_backward(after_others)
            self.reducer.discard_gradients()
            self.gatherer.abandon_backward()

    def drop(self) -> None:
        """Drop the gradients of the step in progress, and start it anew."""
        self._accumulation.drop()
        self.reducer.discard_gradients()


def _is_outermost() -> bool:
    """Return whether the backward of autograd's that ends now is within no other. Call it as its last callback.

    A backward within another is called by a node of that one, in the thread that runs the node: in the thread that
    called the outer backward, whose call is further up then, or in one of autograd's own, which Python has not started.
    """
    frame, num_calls = sys._getframe(), 0
    while frame is not None:
        num_calls += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
    return num_calls < (1 if is_autograds else 2)
