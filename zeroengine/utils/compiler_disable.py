"""Code that torch.compile and torch.func are to leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_dynamo = torch._C._dynamo.eval_frame
_AS_IT_IS = nullcontext()


def eager(function: F) -> F:
    """``function``, at which torch.compile breaks its graph, and within which it compiles nothing.

    What ``torch.compiler.disable`` does, which would import ``torch._dynamo``: 70 MB and a second at every start.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = _dynamo.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _dynamo.set_eval_frame(compiler)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "zeroengine gathers and releases parameters here. With fullgraph=True compile block by block: "
        "`for block in model.blocks: block.compile(fullgraph=True)`"
    )
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(run.__code__, skip)
    return functools.wraps(function)(run)  # type: ignore[return-value]


def unrecorded() -> AbstractContextManager[Any]:
    """Return a context that a selective checkpoint does not see, which counts operations in forward and recomputation.

    Gathers and hooks are none of the model's operations, and need not be the same in both.
    """
    if torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

        if any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack()):
            return _disable_current_modes()
    return _AS_IT_IS


def untransformed() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, in which no tensor from outside of them may be written."""
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        return temporarily_clear_interpreter_stack()
    return _AS_IT_IS
