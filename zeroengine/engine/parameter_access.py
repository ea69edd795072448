"""Public functions that read and write one parameter's gradient, optimizer state and master weights as a whole.

Every function here is a collective: call it on every rank, with the same parameter. An error on one rank is an error on
all ranks, and then nothing has changed.
"""

from __future__ import annotations

import torch
from torch import nn

from zeroengine.engine.full_values import FullValues
from zeroengine.engine.gathered import owner_of
from zeroengine.errors import ZeroEngineError


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the mean gradient of ``param`` over the ranks, from the backwards of this step so far, before clipping.

    It is what ``param.grad`` would be without partitioning and with each loss divided by
    ``gradient_accumulation_steps``. Call it on every rank, between ``backward`` and ``engine.step``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Returns:
        A copy of the parameter's shape on the engine's device, in fp32 or in the parameter's dtype where that is wider;
        None where no rank has a gradient.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or is frozen, or a backward is under way.
    """
    return _owner(param).gradient(param)


def set_full_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value that ``full_gradient`` returns by rank 0's ``value``. Later backwards of the step add to it.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: Of the parameter's shape, in any floating dtype, on any device.

    Raises:
        ZeroEngineError: As for ``full_gradient``, or ``value`` has another shape.
    """
    _owner(param).set_gradient(param, value)


def full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return the optimizer state ``key`` of ``param``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state: ``exp_avg``, ``exp_avg_sq``, ``step``, ...

    Returns:
        A copy of the parameter's shape, in fp32 or in the parameter's dtype where that is wider; 0-d for a number.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine or is frozen, or the optimizer keeps no such state. Most states
            begin with the first step.
    """
    return _owner(param).optimizer_state(param, key)


def set_full_optimizer_state(param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Replace the value that ``full_optimizer_state`` returns by rank 0's ``value``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state.
        value: Of the state's shape.

    Raises:
        ZeroEngineError: As for ``full_optimizer_state``, or ``value`` has another shape.
    """
    _owner(param).set_optimizer_state(param, key, value)


def full_master(param: nn.Parameter) -> torch.Tensor:
    """Return the fp32 master weights of ``param``, or a copy of its values where it has none; of its shape.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine.
    """
    return _owner(param).master(param)


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights of ``param`` by rank 0's ``value``, and the parameter by the same, rounded.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: Of the parameter's shape.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or ``value`` has another shape.
    """
    _owner(param).set_master(param, value)


def _owner(param: nn.Parameter) -> FullValues:
    owner = owner_of(param) if isinstance(param, nn.Parameter) else None
    # `gathered` accepts any owner, but these functions need the states that only FullValues reaches.
    if not isinstance(owner, FullValues):
        raise ZeroEngineError(
            "this takes a parameter of a model that was passed to zeroengine.initialize(), such as "
            "engine.module.head.weight"
        )
    return owner
