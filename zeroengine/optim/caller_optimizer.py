"""Redirect the optimizer object that the caller passed to `initialize` and keeps in the training loop.

[Note: Calls of the caller's optimizer]
The engine updates shards as the optimizer would. The object itself must not update anything: its `step()` and
`zero_grad()` call the engine, whatever wrapped the object before `initialize` or since (LR schedulers, GradScaler,
accelerate).

- `step` is redirected by a step pre-hook, which torch runs even for a bound method that was taken earlier. torch lets
  a pre-hook replace the arguments, including `self`, but not skip the update: so the update runs on a copy of the
  optimizer that has no parameters.
- `zero_grad` and `load_state_dict` have no such hook and are replaced on the instance.

All references to the engine and the optimizer are weak.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.engine_gradient import GRAD_SCALER_REFUSAL
from zeroengine.runtime.released_parameter import drop_gradient_of
from zeroengine.utils.torch_internals import INIT_OPTIMIZER_STATE, STEP_POST_HOOKS, STEP_PRE_HOOKS

# The attributes that wrappers and `redirect_calls` put on an instance.
REPLACED = ("step", "zero_grad", "load_state_dict")
_STEP_HOOKS = (STEP_PRE_HOOKS, STEP_POST_HOOKS)
# The attributes that belong to one optimizer object, where copies of it share the others.
_OWN = frozenset((*REPLACED, *_STEP_HOOKS, "param_groups", "state"))
# The keys of a group that say what the engine was built for. Those of a saved group do not replace them.
FIXED_KEYS = ("params", "algorithm", "num_matrices", "ns_dtype")
# The attribute that marks the pre-hook of `redirect_calls`.
_MARK = "_zeroengine_step"
# Between a call of `step` in torch and here are wrappers of `step`, such as those of torch itself and of schedules.
MAX_FRAMES_TO_TORCH = 12


_decorated = torch.optim.Optimizer.add_param_group
# The decorated one imports torch._dynamo, which costs 70 MB and a second or two at every start.
add_param_group = getattr(_decorated, "__wrapped__", _decorated)


def redirect_calls(
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    zero_grad: Callable[[bool], None] | None,
    undo: ExitStack,
) -> None:
    """Make `optimizer.step()` and `optimizer.zero_grad()` call the engine, and nothing else.

    Args:
        optimizer: The optimizer that was passed to `initialize`.
        step: A bound method, such as of the engine. Only a weak reference to it is kept.
        zero_grad: Likewise. None: the optimizer holds a part of the parameters, whose gradients torch's method drops.
        undo: Makes it an ordinary optimizer again.
    """
    # The caller may keep the optimizer longer than the engine, which holds most of the memory.
    engine_step = weakref.WeakMethod(step)
    engine_zero_grad = None if zero_grad is None else weakref.WeakMethod(zero_grad)
    optimizer_ref = weakref.ref(optimizer)

    def pre_hook(called: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        # A copy of the optimizer has a copy of the hook, and groups of its own. A wrapper that takes over the
        # optimizer's attributes, as Lightning's does, has the same groups: its step is this optimizer's.
        optimizer = optimizer_ref()
        if called is not optimizer and (optimizer is None or called.param_groups is not optimizer.param_groups):
            return None
        check_step_call(called, *args[1:], **kwargs)
        _alive(engine_step())()
        # torch now calls the optimizer's own ``step`` on this copy, which has no parameters to update.
        return (copy_without_parameters(called),), {}

    def zero(set_to_none: bool = True) -> None:
        assert engine_zero_grad is not None
        _alive(engine_zero_grad())(set_to_none)

    def load(state_dict: Mapping[str, Any]) -> None:
        optimizer = optimizer_ref()
        if optimizer is not None:
            load_hyperparameters(optimizer, state_dict)

    setattr(pre_hook, _MARK, True)
    undo.callback(optimizer.register_step_pre_hook(pre_hook).remove)
    undo.callback(
        optimizer.register_state_dict_post_hook(
            lambda called, state: PartitionedStateDict(state) if called is optimizer_ref() else None
        ).remove
    )
    # GradScaler then calls step() instead of asserting that there are gradients, and `check_step_call` explains.
    replaced = {"load_state_dict": load, "_step_supports_amp_scaling": True}
    for name, value in (replaced if zero_grad is None else {"zero_grad": zero, **replaced}).items():
        # ``undo`` restores an attribute that a wrapper put on the instance.
        if name in vars(optimizer):
            undo.callback(setattr, optimizer, name, vars(optimizer)[name])
        else:
            undo.callback(vars(optimizer).pop, name, None)
        setattr(optimizer, name, value)


def _alive(method: Callable[..., None] | None) -> Callable[..., None]:
    if method is None:
        raise ZeroEngineError(
            "the engine that this optimizer was passed to is gone: the optimizer trains nothing itself"
        )
    return method


def check_step_call(optimizer: torch.optim.Optimizer, closure: Any = None, **kwargs: Any) -> None:
    """Refuse the arguments of `optimizer.step()` that the engine cannot honor.

    Raises:
        ZeroEngineError: There is a closure, or a GradScaler that scales the loss in addition to the engine.
    """
    _refuse_initialization_of_state(optimizer)
    # GradScaler passes its scale by an attribute, because the optimizer declares that it supports scaling.
    scaled = "grad_scale" in vars(optimizer)
    # After an error GradScaler does not remove its attributes.
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    if scaled:
        raise ZeroEngineError(GRAD_SCALER_REFUSAL)
    if closure is not None or kwargs:
        arguments = "a closure" if closure is not None else ", ".join(kwargs)
        raise ZeroEngineError(
            f"optimizer.step() was given {arguments}: the engine has to see the backward before the step. Write "
            "engine.backward(loss) and then optimizer.step() without arguments."
        )


def _refuse_initialization_of_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo what torch did before it called `step`, and raise, if it means to create the optimizer's state.

    ``torch.distributed.checkpoint.state_dict`` sets learning rates to 0 and gradients to zeros, calls `step` and sets
    the rates back. After an error it does not set them back, and the training would go on without learning.

    Raises:
        ZeroEngineError: It does.
    """
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES_TO_TORCH):
        if frame.f_code.co_name == INIT_OPTIMIZER_STATE and "lrs" in frame.f_locals:
            break
        if frame.f_back is None:
            return
        frame = frame.f_back
    else:
        return
    rates = iter(frame.f_locals["lrs"])
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = next(rates, group["lr"])
        for param in group["params"]:
            drop_gradient_of(param)
    raise ZeroEngineError(
        "get_optimizer_state_dict(), get_state_dict() or set_optimizer_state_dict() of "
        "torch.distributed.checkpoint.state_dict: the optimizer's state is partitioned by zeroengine, and this object "
        "holds none of it. Use engine.save_checkpoint() and engine.load_checkpoint(), whose files plain "
        "torch.distributed.checkpoint reads, and engine.full_state_dict() for the weights."
    )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that ``closure`` of ``Optimizer.step`` computes, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def copy_without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, attributes and groups, without parameters, state or hooks."""
    # copy.copy would use torch's __getstate__, which leaves attributes out.
    clone = object.__new__(type(optimizer))
    clone.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in REPLACED})
    # With the hooks, the copy would call the engine again and run the caller's hooks twice.
    for hooks in _STEP_HOOKS:
        setattr(clone, hooks, OrderedDict())
    clone.state = defaultdict(dict)
    clone.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return clone


def copy_attributes(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give ``target``, a copy of ``source`` or its original, the attributes of ``source`` besides groups and state."""
    vars(target).update({name: value for name, value in vars(source).items() if name not in _OWN})


def has_own_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` has step hooks besides the one of `redirect_calls`."""
    return any(not hasattr(hook, _MARK) for name in _STEP_HOOKS for hook in getattr(optimizer, name).values())


def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
    """Return an optimizer of its own, as of a deep copy of a schedule to plot: ``__deepcopy__``. It has no state."""
    cls = type(self)
    clone = memo[id(self)] = object.__new__(cls)
    clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
    return clone


def refuse_copy(self: Any, protocol: Any) -> Any:
    """Refuse to pickle or copy an optimizer with partitioned state, or its ``state_dict()``: ``__reduce_ex__``."""
    raise ZeroEngineError(
        "this optimizer's state is partitioned over the ranks: the object and its state_dict() on one of them have "
        "none of it, and cannot be saved or copied. Use engine.save_checkpoint() and engine.load_checkpoint()."
    )


class PartitionedStateDict(dict[str, Any]):
    """The `state_dict()` of an optimizer with partitioned state: hyperparameters that can be read but not saved."""

    __reduce_ex__ = refuse_copy


def load_hyperparameters(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Set the hyperparameters to those of a `state_dict` that has no state. The groups stay the same objects.

    Raises:
        ZeroEngineError: The dict has a state, or other groups.
    """
    if state_dict["state"]:
        raise ZeroEngineError(
            "the optimizer's state is partitioned over the ranks: it cannot be loaded from one dict. Use "
            "engine.load_checkpoint(), and see docs/checkpoints.md for what other libraries wrote."
        )
    # All checks come before any change, so that an error leaves the groups unchanged.
    groups, loaded_groups = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in loaded_groups]:
        raise ZeroEngineError(
            "load_state_dict(): the groups of the optimizer and of the dict differ in their parameters"
        )
    for group, values in zip(groups, loaded_groups, strict=True):
        # Schedulers and the engine refer to these dicts, so they are updated in place.
        group.update({key: value for key, value in values.items() if key not in FIXED_KEYS})
