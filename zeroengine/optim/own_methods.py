"""Forward the methods of the caller's optimizer class to the optimizer that holds the state.

[Note: Methods of an optimizer's own]
An optimizer may have methods that read or change its state and the parameters, such as ``eval()`` and ``train()`` of
schedule-free optimizers. The object that was passed to ``initialize`` has no state, and its parameters may be away. So
until the engine ends its class is a subclass, in which every public method and property that torch's ``Optimizer`` does
not have runs over the shards of the masters instead (``UpdateBackend.run``), with the parameters up to date on both
sides (``engine/optimizer_methods.py``). Copies of the optimizer, on which ``step`` itself calls such methods, have
groups of their own and keep the plain methods.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import REPLACED, deep_copy, refuse_copy
from zeroengine.utils.tensors import map_tensors

# Runs a member of the optimizer's class over the shards, on every rank, and returns what the member returns. It takes
# - the member as it is written in an error, such as "eval()",
# - a function that calls the member of the optimizer that it is given,
# - whether the member is a property that is read, which changes nothing and is no collective.
CallOverShards = Callable[[str, Callable[[torch.optim.Optimizer], Any], bool], Any]


def forward_own_methods(optimizer: torch.optim.Optimizer, call: CallOverShards, undo: ExitStack) -> None:
    """Let the public methods and properties of the optimizer's own class run by ``call``.

    Args:
        optimizer: The optimizer that was passed to ``initialize``.
        call: A bound method of the engine. Only a weak reference to it is kept.
        undo: Gives the optimizer its plain class again.
    """
    cls = type(optimizer)
    # The caller may keep the optimizer longer than the engine, which holds most of the memory.
    call_ref, optimizer_ref = weakref.WeakMethod(call), weakref.ref(optimizer)

    def run(called: Any, name: str, act: Callable[[torch.optim.Optimizer], Any], *, reads: bool = False) -> Any:
        optimizer = optimizer_ref()
        # A wrapper that takes over the optimizer's attributes, as Lightning's does, has the same groups.
        if called is not optimizer and (optimizer is None or called.param_groups is not optimizer.param_groups):
            return act(called)
        call = call_ref()
        if call is None:
            raise ZeroEngineError(
                f"{cls.__name__}.{name}: the engine that this optimizer was passed to is gone, and its state with it"
            )
        return call(name, act, reads)

    members = {name: _forwarded(name, member, run) for name, member in _own_members(cls)}
    members |= {
        "__reduce_ex__": refuse_copy,
        "__deepcopy__": deep_copy,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    optimizer.__class__ = type(cls.__name__, (cls,), members)
    undo.callback(setattr, optimizer, "__class__", cls)


def _own_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of ``cls`` that torch's ``Optimizer`` does not have."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members |= vars(base)
    for name, member in members.items():
        if name.startswith("_") or name in REPLACED or hasattr(torch.optim.Optimizer, name):
            continue
        is_property = isinstance(member, (property, functools.cached_property))
        # Static methods and class methods do not see an optimizer.
        if is_property or (inspect.isroutine(member) and not isinstance(member, (staticmethod, classmethod))):
            yield name, member


def _forwarded(name: str, member: Any, run: Callable[..., Any]) -> Any:
    """Return what takes the place of ``member`` in the class."""
    if isinstance(member, functools.cached_property):
        member = property(member.func)
    if isinstance(member, property):
        getter, setter = member.fget, member.fset
        return property(
            None if getter is None else lambda self: run(self, name, getter, reads=True),
            None
            if setter is None
            else lambda self, value: run(self, f"{name} = ...", lambda over_shards: setter(over_shards, value)),
            doc=member.__doc__,
        )

    @functools.wraps(member)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inspect.isgeneratorfunction(member):
            # Its body would run when the parameters have changed again.
            return run(self, f"{name}()", lambda over_shards: iter(list(member(over_shards, *args, **kwargs))))
        _check_arguments(type(self).__name__, name, args, kwargs)
        return run(self, f"{name}()", lambda over_shards: member(over_shards, *args, **kwargs))

    return method


def _check_arguments(kind: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse tensors among the arguments of a method, unless they are numbers.

    Raises:
        ZeroEngineError: There is one.
    """

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() != 1:
            raise ZeroEngineError(
                f"{kind}.{name}() was given a {type(tensor).__name__} of shape {tuple(tensor.shape)}: it runs on each "
                "rank's part of the parameters, which are other tensors. Pass numbers. Read and write the state of a "
                "parameter with zeroengine.full_optimizer_state() and set_full_optimizer_state(), and its values with "
                "full_master() and set_full_master()."
            )
        return tensor

    map_tensors(check, (args, kwargs))
