"""Counts each forward of the whole model by hooks, so that ``model(...)`` is the same as ``engine(...)``.

[Note: Which forwards count]
Frameworks call the model itself, so the engine learns of a forward from the hooks of ``Forward``, and from nothing
else. A forward of training has autograd on and the model in training mode. If the model calls itself, the outermost
call counts. A forward inside a backward is the recomputation of an activation checkpoint. It counts only if the step
has no forward outside of a backward, which is so under a reentrant checkpoint of the whole model: that runs the first
forward without autograd. A forward that raises does not count.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.memory import explain_if_out_of_memory
from zeroengine.monitor.flops import is_anything_compiled
from zeroengine.monitor.observer import Observer, overriding
from zeroengine.runtime import mixed_precision
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.utils.call_stack import calls_in_progress
from zeroengine.utils.torch_internals import CALL_MODULE_CODE, current_graph_task_id


class ModelForwards:
    """Tells observers of the forwards of the model that count, and explains errors of all of them.

    Args:
        parts: The parts of the engine, complete. Their ``undo`` removes the hooks.
        checkpoint_copy_bytes: Returns the bytes of the copy that a checkpoint is written from.
        observers: The observers, in order.
    """

    def __init__(
        self, parts: EngineParts, checkpoint_copy_bytes: Callable[[], int], observers: Sequence[Observer]
    ) -> None:
        self._parts, self._checkpoint_copy_bytes = parts, checkpoint_copy_bytes
        self._at_begin = overriding(observers, Observer.forward_began)
        self._at_end = overriding(observers, Observer.forward_ended)
        self._model, self._forward = parts.setup.model, parts.passes.forward
        # Whether a forward has begun whose end is not known yet, and whether it counts.
        self._in_progress = self._counts = False
        # An error that was being handled as the forward began.
        self._outer_error: BaseException | None = None
        # Whether this step had a forward of training outside of a backward.
        self._has_plain_forward = False
        self._profile: AbstractContextManager[None] | None = None
        if parts.reports.forward_profiler is not None:
            # A profile leaves out the gathers, so it begins after the engine's hooks and ends before them.
            begin, end = _hook(self, ModelForwards._begin_profile), _hook(self, ModelForwards._end_profile)
            parts.setup.partition_undo.hooks.callback(self._model.register_forward_pre_hook(begin).remove)
            parts.setup.partition_undo.hooks.callback(
                self._model.register_forward_hook(end, prepend=True, always_call=True).remove
            )

    def begin(self, args: Any, kwargs: Any) -> None:
        """Begin a forward, unless it is nested in another one.

        Args:
            args: Its positional inputs: tensors in nested containers.
            kwargs: Its other inputs.

        Raises:
            ZeroEngineError: The parameters are offloaded.
        """
        parts = self._parts
        parts.loop.state_offloader.check_resident("the forward", ("parameters",))
        if self._forward.num_model_forwards:
            if not self._has_interrupted_forward():
                return
            self._forward.abandon()
        if self._in_progress:
            self.abandon()
        self._in_progress, self._outer_error = True, sys.exc_info()[1]
        # Inside ``gathered`` ranks may run different numbers of forwards, which belong to no micro-step.
        if not (self._model.training and torch.is_grad_enabled()) or parts.passes.gatherer.num_pins:
            return
        if current_graph_task_id() < 0:
            self._has_plain_forward = True
        elif self._has_plain_forward:
            return
        self._counts = True
        for observer in self._at_begin:
            observer.forward_began(args, kwargs)

    def end_by_hook(self) -> None:
        """End the outermost forward."""
        # torch calls hooks while it handles the error of a forward that raised.
        error = sys.exc_info()[1]
        self.end(None if error is self._outer_error else error)

    def end(self, error: BaseException | None) -> None:
        """End the forward in progress, unless its end is known already.

        Args:
            error: What it raised; None if it returned. The error gets notes on what to change.
        """
        counts = self._counts
        self._in_progress, self._counts, self._outer_error = False, False, None
        if counts:
            self._close_profile(error)
            for observer in self._at_end:
                observer.forward_ended(completed=error is None)
        if isinstance(error, RuntimeError):
            mixed_precision.note_buffers(error, self._model, self._parts.setup.config)
            explain_if_out_of_memory(error, self._parts, self._checkpoint_copy_bytes())

    def abandon(self) -> None:
        """Forget a forward whose end no hook reported, as after Ctrl-C. Call this where none can be in progress."""
        if self._in_progress:
            self.end(KeyboardInterrupt())

    def end_step(self) -> None:
        """Note the end of a step."""
        self.abandon()
        self._has_plain_forward = False

    def _has_interrupted_forward(self) -> bool:
        """Return whether the forward in progress is the one that begins now, and the earlier one was Ctrl-C's.

        torch calls no hook at the end of a forward that Ctrl-C has ended.
        """
        # The stack of a backward's thread does not show the forward that called the backward, and that of compiled code
        # does not show modules.
        if current_graph_task_id() >= 0 or is_anything_compiled():
            return False
        return sum(call.f_locals["self"] is self._model for call in calls_in_progress(CALL_MODULE_CODE)) == 1

    # -- the profile of one forward ---------------------------------------------------------------

    def _begin_profile(self, args: Any) -> None:
        # The engine's hook has counted this forward, so a nested one is not the first.
        if not self._counts or self._profile is not None or self._forward.num_model_forwards != 1:
            return
        parts = self._parts
        assert parts.reports.forward_profiler is not None
        issued = parts.loop.step_runner.issued_step
        num_steps = parts.loop.step_runner.num_updates if issued is None else issued.number
        self._profile = parts.reports.forward_profiler.observe(num_steps)
        self._profile.__enter__()

    def _end_profile(self, args: Any, output: Any) -> None:
        if self._forward.num_model_forwards == 1:
            error = sys.exc_info()[1]
            self._close_profile(None if error is self._outer_error else error)

    def _close_profile(self, error: BaseException | None) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None if error is None else type(error), error, None)


def _hook(forwards: ModelForwards, method: Callable[..., None]) -> UncopiedHook:
    """Return a hook of the model that calls ``method`` with what follows the module."""
    # The model owns the hook. A strong reference would keep the engine's parts alive as long as the model.
    forwards_ref = weakref.ref(forwards)

    def hook(module: nn.Module, *inputs: Any) -> None:
        forwards = forwards_ref()
        # A shallow copy of the model has the same hooks. They must do nothing there.
        if forwards is not None and module is forwards._model:
            method(forwards, *inputs)

    return UncopiedHook(hook)
