"""Tells by the Python calls in progress, and by hooks of saved tensors, what kind of forward or backward runs."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch

from zeroengine.utils.call_stack import calls_in_progress
from zeroengine.utils.torch_internals import (
    RUN_BACKWARD_CODE,
    RecomputationHook,
    StopRecomputation,
    is_function_forward,
    next_node_number,
    node_number,
    top_saved_tensors_hooks,
)


def is_autograd_grad() -> bool:
    """Return whether this runs in ``torch.autograd.grad``, if the thread that called it runs the nodes."""
    call = next(calls_in_progress(RUN_BACKWARD_CODE), None)
    return call is not None and call.f_locals["kwargs"].get("accumulate_grad") is False


def is_outermost_backward() -> bool:
    """Return whether the innermost backward is not nested in another. Call it in a callback or hook of that backward.

    A node of the outer backward calls the inner one, in the thread that runs the node. That is either the thread that
    called the outer backward, whose call is then further up the stack, or a thread of autograd, which Python did not
    start.
    """
    num_calls = sum(1 for _ in calls_in_progress(RUN_BACKWARD_CODE))
    # In the thread that called the backward, one frame is the call itself, so only a second frame is an outer backward.
    # In a thread of autograd the first frame is already an outer backward.
    is_autograd_thread = isinstance(threading.current_thread(), threading._DummyThread)
    return num_calls < (1 if is_autograd_thread else 2)


def is_in_checkpoint() -> bool:
    """Return whether this runs in the forward, or the recomputation, of a non-reentrant activation checkpoint."""
    return _hooks_of_checkpoint() != ""


def is_in_recomputation() -> bool:
    """Return whether this runs in the recomputation of a non-reentrant activation checkpoint."""
    return _hooks_of_checkpoint().startswith(RecomputationHook.__name__)


def _hooks_of_checkpoint() -> str:
    """Return the name of what a checkpoint does with saved tensors now; empty: none does."""
    hooks = top_saved_tensors_hooks(True)
    return "" if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint" else hooks[0].__qualname__


def is_raising() -> bool:
    """Return whether the forward whose hook calls this has raised.

    An activation checkpoint ends a recomputation that has reached the last saved tensor by an exception. It counts as
    an ordinary end.
    """
    error = sys.exc_info()[1]
    return error is not None and not isinstance(error, StopRecomputation)


def function_node_number() -> int | None:
    """Return the number of the node of the outermost ``torch.autograd.Function`` in whose forward this runs.

    A reentrant checkpoint is such a Function. None: this runs in none.
    """
    forward: FrameType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_function_forward(frame.f_code):
            forward = frame
        frame = frame.f_back
    if forward is None:
        return None
    contexts = (value for value in forward.f_locals.values() if isinstance(value, torch.autograd.function.FunctionCtx))
    context: Any = next(contexts, None)
    # A Function with ``setup_context`` has no context yet. Its node was the latest one when its forward began.
    return next_node_number() - 1 if context is None else node_number(context)
