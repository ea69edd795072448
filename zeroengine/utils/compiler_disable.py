"""Contexts and decorators that keep torch.compile, torch.func and selective checkpoints out of the engine's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_dynamo = torch._C._dynamo.eval_frame
_NO_CHANGE = nullcontext()


def disable_compile(function: F) -> F:
    """Make torch.compile break its graph at ``function`` and compile nothing inside.

    ``torch.compiler.disable`` does the same, but imports ``torch._dynamo``, which costs every start 70 MB and a second.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # None switches the compiler off for this thread until the call ends.
        compiler = _dynamo.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _dynamo.set_eval_frame(compiler)

    # torch.compile reads these attributes to break its graph here, and to explain why.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "zeroengine gathers and releases parameters here. With fullgraph=True compile block by block: "
        "`for block in model.blocks: block.compile(fullgraph=True)`"
    )
    # The compiler must skip the wrapper itself, but treat the functions that it calls as usual.
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(run.__code__, skip)
    return functools.wraps(function)(run)  # type: ignore[return-value]


def hidden_from_activation_checkpoint() -> AbstractContextManager[Any]:
    """Return a context whose operations a selective checkpoint does not count.

    Such a checkpoint compares the operations of the forward with those of the recomputation. Gathers and hooks are not
    operations of the model, and may differ between the two.
    """
    # This check is cheap, and the stack is almost always empty.
    if torch._C._len_torch_dispatch_stack():
        # This module is imported here because it is slow to import, and few programs need it.
        from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

        if any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack()):
            return _disable_current_modes()
    return _NO_CHANGE


def outside_torch_func() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, which forbid writes to tensors that existed before them."""
    # The import is needed only inside of torch.func, where the module has been imported already.
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        return temporarily_clear_interpreter_stack()
    return _NO_CHANGE
