"""Contexts and decorators that keep torch.compile, torch.func and selective checkpoints out of the engine's code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from zeroengine.utils.torch_internals import (
    COMPILE_DISABLED,
    COMPILE_DISABLED_REASON,
    FrameAction,
    FrameExecStrategy,
    disable_dispatch_modes,
    dispatch_modes,
    functorch_active,
    leave_functorch,
    num_dispatch_modes,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])

_NO_CHANGE = nullcontext()


def disable_compile(function: F) -> F:
    """Make torch.compile break its graph at ``function`` and compile nothing inside.

    ``torch.compiler.disable`` does the same, but imports ``torch._dynamo``, which costs every start 70 MB and a second,
    and puts another function around it, which costs every call some microseconds.
    """
    # torch.compile reads these attributes to break its graph here, and to explain why.
    setattr(function, COMPILE_DISABLED, True)
    setattr(
        function,
        COMPILE_DISABLED_REASON,
        "zeroengine gathers and releases parameters here. With fullgraph=True compile block by block: "
        "`for block in model.blocks: block.compile(fullgraph=True)`",
    )
    # The compiler skips the function, and all that it calls.
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


def hidden_from_activation_checkpoint() -> AbstractContextManager[Any]:
    """Return a context whose operations a selective checkpoint does not count.

    Such a checkpoint compares the operations of the forward with those of the recomputation. Gathers and hooks are not
    operations of the model, and may differ between the two.
    """
    # This check is cheap, and the stack is almost always empty.
    if num_dispatch_modes() and any(type(mode).__module__ == "torch.utils.checkpoint" for mode in dispatch_modes()):
        return disable_dispatch_modes()
    return _NO_CHANGE


def outside_torch_func() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, which forbid writes to tensors that existed before them."""
    return leave_functorch() if functorch_active() else _NO_CHANGE
