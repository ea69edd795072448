"""Tell by the Python calls in progress what kind of backward runs."""

from __future__ import annotations

import threading

import torch

from zeroengine.utils.call_stack import calls_in_progress

# The code of the function through which Python runs every backward.
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def is_autograd_grad() -> bool:
    """Return whether this runs in ``torch.autograd.grad``, if the thread that called it runs the nodes."""
    call = next(calls_in_progress(_RUN_BACKWARD), None)
    return call is not None and call.f_locals["kwargs"].get("accumulate_grad") is False


def is_outermost_backward() -> bool:
    """Return whether the innermost backward is not nested in another. Call it in a callback or hook of that backward.

    A node of the outer backward calls the inner one, in the thread that runs the node. That is either the thread that
    called the outer backward, whose call is then further up the stack, or a thread of autograd, which Python did not
    start.
    """
    num_calls = sum(1 for _ in calls_in_progress(_RUN_BACKWARD))
    # In the thread that called the backward, one frame is the call itself, so only a second frame is an outer backward.
    # In a thread of autograd the first frame is already an outer backward.
    is_autograd_thread = isinstance(threading.current_thread(), threading._DummyThread)
    return num_calls < (1 if is_autograd_thread else 2)
