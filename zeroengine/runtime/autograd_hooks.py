"""Hooks for autograd to call, callbacks at the end of a backward, and the outputs that take hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import BACKWARD_HOOKS, current_autograd_node, node_number


class WeakMethod:
    """A method for autograd to call.

    The graph owns its hooks. A hook that owned the method's object would close a cycle through C++ that the garbage
    collector cannot see, so the hook refers to the object weakly. Its arguments live as long as the graph.

    Args:
        owner: The object whose method is called.
        method: The method.
        args: Its arguments.
    """

    def __init__(self, owner: object, method: Callable[..., object], *args: Any) -> None:
        self._owner, self._method, self._args = weakref.ref(owner), method, args

    @disable_compile
    def __call__(self, *_: Any) -> None:
        """Call the method, if the owner is still alive. The arguments of autograd are ignored."""
        owner = self._owner()
        if owner is not None:
            self._method(owner, *self._args)


def register_hook_first(tensor: torch.Tensor, hook: Callable[..., None]) -> None:
    """Register a hook that autograd calls before the earlier hooks of ``tensor``."""
    hook_id = tensor.register_hook(hook).id
    # Autograd calls the hooks in the order of this dict.
    hooks: dict[int, Any] = getattr(tensor, BACKWARD_HOOKS)
    for earlier in [key for key in hooks if key != hook_id]:
        hooks[earlier] = hooks.pop(earlier)


def autograd_outputs(tensors: Iterable[torch.Tensor], first_node: int) -> list[torch.Tensor]:
    """Return those of a module's outputs through which a backward can pass to the module.

    Args:
        tensors: What the module returned.
        first_node: The number of the first node that the forward may have made.
    """
    outputs: list[torch.Tensor] = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
    if len(outputs) < 2:
        return outputs
    # An input that is returned beside new tensors gets its gradient later, and needs nothing of the module.
    return [tensor for tensor in outputs if number_of(tensor) >= first_node] or outputs


def number_of(tensor: Any) -> int:
    """Return the number of the node that made ``tensor``."""
    return node_number(tensor.grad_fn)


def number_of_current_node() -> int | None:
    """Return the number of the node that autograd runs now in this thread; None: it runs none."""
    node = current_autograd_node()
    return None if node is None else node_number(node)
