"""Registers the hooks by which ``Forward`` learns when the forwards of modules begin and end.

[Note: Hooks are hints]
Hooks on modules, and on the tensors that come out, say when a unit is about to be needed and when it may be released.
The order of collectives of a list depends on them, and values never do:
- A use of a released parameter calls ``Forward._gather_for_use`` through its class (see ``released_parameter.py``). A
  backward that reads a saved view of a parameter calls ``Forward._restore_saved_view`` (see ``saved_views.py``). Both
  gather the unit.
- A full buffer that other tensors alias is not freed (see ``deferred_frees.py``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.scheduling import ModuleNumbers
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint
from zeroengine.utils.torch_internals import StopRecomputation, is_function_forward, next_node_number, node_number

VISIBLE = nullcontext()


class ForwardListener(Protocol):
    """Is notified when forwards begin and end, with the ``args``, ``kwargs`` and ``output`` of the module."""

    def observes(self, module: nn.Module) -> bool:
        """Return whether the hooks were registered on ``module`` itself, rather than on the original of a copy."""

    def pre_model_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a forward of the whole model begins."""

    def post_model_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a forward of the whole model has ended or raised."""

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a forward of a module that needs units, or holds lists of units, begins."""

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Note that such a forward has ended or raised. Return its output."""


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


def check_hooks_allowed(modules: Iterable[nn.Module]) -> None:
    """Check that hooks can be registered on ``modules``.

    Raises:
        ZeroEngineError: One is a ScriptModule.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ZeroEngineError(
                f"torch allows no hooks on a ScriptModule, such as {module.original_name} here: pass the model as "
                "it was before torch.jit. torch.compile serves instead."
            )


def register_hooks(
    listener: ForwardListener, model: nn.Module, units: Sequence[Unit], numbers: ModuleNumbers
) -> list[Any]:
    """Notify ``listener`` of the forwards of ``model``, and of modules that need units or hold lists of units.

    Args:
        listener: Is notified.
        model: The whole model.
        units: All units, by number.
        numbers: The modules that need them.

    Returns:
        The handles of the hooks.
    """
    # The model owns the hooks. A strong reference would keep the full buffers alive as long as the model.
    listener_ref = weakref.ref(listener)

    def hook_for(method: str, is_hidden: bool = True) -> UncopiedHook:
        def hook(module: nn.Module, *args: Any) -> Any:
            listener = listener_ref()
            # A shallow copy of the model has the same hooks. They must do nothing there.
            if listener is not None and listener.observes(module):
                with hidden_from_activation_checkpoint() if is_hidden else VISIBLE:
                    return getattr(listener, method)(module, *args)
            return None

        return UncopiedHook(hook)

    # By module: whether the end of its forward matters. Where each rank updates a part of a unit that is never
    # released, the next forward must wait for the all-gather of the step, so such modules need hooks as well.
    modules: dict[nn.Module, bool] = {}
    for module, number in numbers.number_of.items():
        needed = [units[unit] for unit in numbers.units_of[number]]
        if any(unit.offloaded_shards is not None or unit.degrees.optimizer > 1 for unit in needed):
            modules[module] = any(unit.is_releasable for unit in needed)
        if number in numbers.lists:
            modules[module] = True
    handles: list[Any] = []
    # Pre-forward hooks are prepended, so that the user's hooks find the parameters gathered. Forward hooks are called
    # even if the forward raised (``always_call``), because otherwise its units would never be released.
    for module, has_end in modules.items():
        handles.append(module.register_forward_pre_hook(hook_for("pre_forward"), prepend=True, with_kwargs=True))
        if has_end:
            handles.append(module.register_forward_hook(hook_for("post_forward"), with_kwargs=True, always_call=True))
    # A list of the model itself is completed before the forward of the model ends, so this hook comes later. The
    # listener hides its work on the whole model itself, because it may enter a mode that outlives the hook.
    end = hook_for("post_model_forward", is_hidden=False)
    handles.append(model.register_forward_hook(end, always_call=True))
    # The forward of the whole model begins before any of its modules gathers, the model itself included.
    begin = hook_for("pre_model_forward", is_hidden=False)
    handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
    return handles
