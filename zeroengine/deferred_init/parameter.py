"""Parameters between ``meta_init`` and ``initialize``: on the meta device, with a trace of their values."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.trace import Trace
from zeroengine.utils.torch_internals import (
    BACKWARD_HOOKS,
    POST_ACCUMULATE_GRAD_HOOKS,
    swap_tensor_impl,
    tensor_use_count,
)

_TRACE = "_zeroengine_trace"


def make_meta(param: nn.Parameter, trace: Trace, meta: torch.Tensor) -> None:
    """Make ``param`` a parameter on the meta device, which takes no memory, and attach the way to its values.

    Args:
        param: The parameter.
        trace: The way to its values.
        meta: A tensor of its shape on the meta device, whose storage shows what it shares memory with.
    """
    swap_data(param, meta)
    attach_trace(param, trace)


def attach_trace(param: nn.Parameter, trace: Trace) -> None:
    """Attach the way to its values to ``param``, and to deep copies that are made of it."""
    param.__dict__[_TRACE] = trace
    # ``Parameter.__deepcopy__`` copies no attributes. The reference is weak, because the parameter owns this dict.
    param.__dict__["__deepcopy__"] = functools.partial(_deepcopy, weakref.ref(param))


def _deepcopy(reference: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
    param = reference()
    assert param is not None
    copy: nn.Parameter = type(param).__deepcopy__(param, memo)
    attach_trace(copy, param.__dict__[_TRACE])
    return copy


def trace_of(param: nn.Parameter) -> Trace | None:
    """Return the trace of ``param``, or None where it has memory, or never had values."""
    trace: Trace | None = param.__dict__.get(_TRACE)
    return trace


def take_trace(param: nn.Parameter) -> Trace | None:
    """Detach the trace of ``param`` and return it."""
    trace: Trace | None = param.__dict__.pop(_TRACE, None)
    if trace is not None:
        # From now on the parameter has values, and an ordinary copy has them, too.
        del param.__dict__["__deepcopy__"]
    return trace


def swap_data(param: nn.Parameter, data: torch.Tensor) -> None:
    """Give ``param`` the memory, dtype and device of ``data``. It stays the same object and keeps its hooks."""
    assert not has_graph(param)
    # `.data` has a version counter of its own, so that writes to ``data`` do not count as writes to the parameter.
    other = nn.Parameter(data.data, requires_grad=param.requires_grad)
    for hooks in (BACKWARD_HOOKS, POST_ACCUMULATE_GRAD_HOOKS):
        if getattr(param, hooks):
            setattr(other, hooks, getattr(param, hooks))
    # torch.utils.swap_tensors does the same, but refuses parameters with weak references, which an LSTM holds.
    swap_tensor_impl(param, other)


def has_graph(param: nn.Parameter) -> bool:
    """Return whether autograd holds a graph or a gradient of ``param``, and would go on with its old memory."""
    # In C++ a parameter without a graph has one owner, which is its Python object.
    return tensor_use_count(param) > 1 or param.grad is not None
