"""Parameters between their construction and ``initialize``: on the meta device, with a trace of their values."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.trace import Trace

_TAPE = "_zeroengine_trace"


def make_meta(param: nn.Parameter, trace: Trace) -> None:
    """``param`` takes no memory from now on: a meta parameter, and the way to its values."""
    meta = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    swap_data(param, meta)
    attach_trace(param, trace)


def attach_trace(param: nn.Parameter, trace: Trace) -> None:
    param.__dict__[_TAPE] = trace
    param.__dict__["__deepcopy__"] = functools.partial(_copied, weakref.ref(param))  # a copy has the same values


def _copied(reference: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
    param = reference()
    assert param is not None
    copied: nn.Parameter = type(param).__deepcopy__(param, memo)  # type: ignore[no-untyped-call]
    attach_trace(copied, param.__dict__[_TAPE])
    return copied


def trace_of(param: nn.Parameter) -> Trace | None:
    return param.__dict__.get(_TAPE)


def take_trace(param: nn.Parameter) -> Trace | None:
    """``trace_of``, and ``param`` has none from now on."""
    trace = param.__dict__.pop(_TAPE, None)
    if trace is not None:
        del param.__dict__["__deepcopy__"]
    return trace


def swap_data(param: nn.Parameter, data: torch.Tensor) -> None:
    """``param``, the same object with its hooks, has the memory, dtype and device of ``data``."""
    assert not has_graph(param)
    other = nn.Parameter(data.data, requires_grad=param.requires_grad)  # .data: writes to ``data`` are not counted here
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(other, hooks, getattr(param, hooks))
    torch._C._swap_tensor_impl(param, other)  # torch.utils.swap_tensors refuses weak references, which an LSTM has


def has_graph(param: nn.Parameter) -> bool:
    """Whether autograd would go on with what ``param`` was."""
    return param._use_count() > 1 or param.grad is not None  # type: ignore[attr-defined]
