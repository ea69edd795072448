"""Code that torch.compile and torch.func are to leave alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_dynamo = torch._C._dynamo.eval_frame


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


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Run what is within unseen by a selective checkpoint, which counts operations in forward and in recomputation.

    Gathers and hooks are none of the model's operations, and need not be the same in both.
    """
    if torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

        if any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack()):
            with _disable_current_modes():
                yield
            return
    yield


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """Outside of the transforms of torch.func in progress, under which no tensor from outside may be written."""
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            yield
    else:
        yield
