"""Checks of the engine's public calls: their arguments, and where they come. Each raises ``ZeroEngineError``."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed

# The number of parameters that an error names.
NUM_SHOWN = 5


def check_trains(reducer: Reducer, call: str) -> None:
    """Check that some parameter was to get gradients when the engine was made."""
    if not reducer.gradients:
        raise ZeroEngineError(
            f"{call}: all parameters are frozen (requires_grad=False), as they are without an optimizer, so this "
            "engine runs forwards alone. Let some of them require gradients before initialize(), with an optimizer"
        )


def check_loss(loss: Any, reducer: Reducer) -> None:
    """Check that ``Engine.backward`` can compute gradients of ``loss``."""
    if not isinstance(loss, torch.Tensor):
        raise ZeroEngineError(f"backward() takes the loss tensor, found {type(loss).__name__}")
    if loss.numel() != 1:
        raise ZeroEngineError(
            f"backward() takes a scalar loss, found shape {tuple(loss.shape)}: reduce it first, such as loss.mean()"
        )
    if not loss.requires_grad:
        check_trains(reducer, "backward()")
        raise ZeroEngineError(
            "backward(): the loss is detached from the parameters. Compute it from engine(...), outside "
            "torch.no_grad(), without .detach() or .item()"
        )


def check_logged_values(values: Mapping[str, Any], call: str = "log()") -> None:
    """Check that ``values`` are such as ``Engine.log`` takes."""
    for name, value in values.items():
        is_one_element = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        # NumPy's scalars are real numbers, too.
        if not (isinstance(value, numbers.Real) or is_one_element):
            raise ZeroEngineError(
                f"{call}: {name} is {type(value).__name__}; write a number or a tensor of one element, such as "
                f"{name}=values.mean()"
            )


def forbid_forward_while_unset(model: nn.Module, units: Sequence[Unit], undo: ExitStack) -> None:
    """Make a forward of ``model`` raise ``ZeroEngineError`` as long as some of its parameters have no values.

    The hook that checks this removes itself when all parameters are set; ``undo`` removes it before that.
    """
    # A hook costs time at every forward, and almost every model has all its values.
    if not any(unit.originals.unset for unit in units):
        return

    def check_all_set(module: nn.Module, args: Any) -> None:
        names = unset_names(units)
        if not names:
            handle.remove()
        # A shallow copy of the model has the same hook.
        elif module is model:
            raise ZeroEngineError(
                f"these parameters were built under meta_init(values=False) and have no values yet: "
                f"{listed(names, NUM_SHOWN)}. Load them with engine.load_weights(path) or "
                "engine.load_checkpoint(directory)."
            )

    handle = model.register_forward_pre_hook(UncopiedHook(check_all_set), prepend=True)
    undo.callback(handle.remove)


def unset_names(units: Sequence[Unit]) -> list[str]:
    """Return the names of the parameters that have no values yet, in the order of registration."""
    return [slot.name for unit in units for slot in unit.layout.slots if slot.name in unit.originals.unset]
