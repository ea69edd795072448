"""What user code does to ``param.grad`` outside of a backward.

[Note: Who owns param.grad]
Within a backward ``param.grad`` belongs to autograd, and to the Functions and hooks of the user: it is this rank's
gradient of that backward. The reducer takes it from there. So outside of a backward no tensor is in ``param.grad``, and
whatever is found there is the user's:

    an assigned value      becomes the mean gradient of the step so far, as in plain PyTorch after a backward. Each rank
                           takes its shard of the value. Digests in the sum of the step show ranks that assigned
                           different ones (``OutsideWrites``).
    None                   drops the gradient of the step so far, likewise
    a read                 finds an ``EngineGradient`` if the step has gradients, by which every ``zero_grad`` of torch
                           drops or zeroes the gradient of the step so far. See "Every way to drop a gradient" there
    ``Engine.zero_grad``   drops all of them
    before ``initialize``  is dropped by it, with a notice

Values are taken over when the next backward begins, and when a step ends. To notice a read and an assigned None, the
parameters have the class of released ones from the end of a backward to the next backward or step, except in forwards.

Which parameters a read finds a gradient of must not depend on the rank, since all ranks must drop the same. So after a
backward every trained parameter has one, until it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.runtime.engine_gradient import EngineGradient
from zeroengine.runtime.released_parameter import GradientWatch
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass


@dataclass(frozen=True, eq=False)
class AssignedGradient:
    """What user code has assigned to ``param.grad``."""

    unit_grads: UnitGradients  # those of the parameter's unit
    index: int  # index of the parameter in its unit
    value: torch.Tensor | None  # in the parameter's shape; None drops the gradient, or sets it to zero
    is_zero: bool = False  # whether a gradient that there is becomes zero


class UserGradients:
    """Finds what user code has assigned to ``param.grad``.

    Args:
        units: All units.
        gradients: The gradients of those that are trainable.
    """

    def __init__(self, units: Iterable[Unit], gradients: Sequence[UnitGradients]) -> None:
        self._trained = [
            (param, unit_grads, index) for unit_grads in gradients for index, param in enumerate(unit_grads.unit.params)
        ]
        self._frozen = [
            (param, slot.name)
            for unit in units
            if not unit.trainable
            for param, slot in zip(unit.params, unit.layout.slots, strict=True)
        ]
        self._watch, self._is_paused = GradientWatch(param for param, _, _ in self._trained), False
        self._units = [unit_grads.unit for unit_grads in gradients]
        self._names = {param: grads.unit.layout.slots[index].name for param, grads, index in self._trained}
        # The parameters whose gradient the user has assigned to, perhaps None, since the last backward, with whether it
        # was set to zero; and the handles of hooks that run before autograd adds to what was assigned.
        self._touched: dict[nn.Parameter, bool] = {}
        # Those whose gradient was dropped since the last backward.
        self._dropped: set[nn.Parameter] = set()
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Notice reads of gradients, and assignments, from now on."""
        self._is_paused = False
        if not self._watch.is_on:
            self._watch.switch(self._params_with_values(), on=True)

    def stop_watching(self) -> None:
        """Give the parameters their own class again."""
        self._is_paused = False
        if self._watch.is_on:
            self._watch.switch(self._params_with_values(), on=False)

    def _params_with_values(self) -> Iterator[nn.Parameter]:
        return (param for unit in self._units if unit.is_gathered for param in unit.params)

    def pause(self) -> None:
        """Stop watching until ``resume``."""
        is_paused = self._watch.is_on or self._is_paused
        self.stop_watching()
        self._is_paused = is_paused

    def resume(self) -> None:
        """Go on watching after ``pause``, unless something else has stopped it."""
        if self._is_paused:
            self.watch()

    def note_assigned(self, param: nn.Parameter, take_first: Callable[..., None], is_zero: bool) -> None:
        """Note that user code has assigned to the gradient of ``param``, if that is watched.

        Args:
            param: The parameter.
            take_first: Called before autograd adds a gradient to the assigned one. Most backwards are noticed earlier.
            is_zero: Whether the gradient was set to zero in place.

        Raises:
            ZeroEngineError: The gradient that the engine held earlier was assigned, which has no values.
        """
        if not self._watch.is_on or param not in self._names:
            return
        with DisableTorchFunctionSubclass():
            gradient = param.grad
            if isinstance(gradient, EngineGradient):
                param.grad = None
                if gradient.param_name == self._names[param] and param not in self._dropped:
                    # ``param.grad = param.grad`` changes nothing.
                    return
                gradient.refuse("an assignment")
        if param not in self._touched and param.requires_grad:
            self._handles.append(param.register_hook(take_first))
        self._touched[param] = is_zero
        if gradient is not None or is_zero:
            self._dropped.discard(param)
        else:
            self._dropped.add(param)

    def is_dropped(self, param: nn.Parameter) -> bool:
        """Return whether the gradient of ``param`` was dropped since the last backward, or it is not trained."""
        return param in self._dropped or param not in self._names

    def engine_gradient(self, param: nn.Parameter, set_to_zero: Callable[[], None]) -> EngineGradient | None:
        """Return what a read of ``param.grad`` finds after a backward, where the user has assigned no tensor.

        Args:
            param: The parameter.
            set_to_zero: Sets the gradient to zero.
        """
        if self.is_dropped(param):
            return None
        return EngineGradient.of_parameter(param, self._names[param], set_to_zero)

    @property
    def has_assigned(self) -> bool:
        """Whether something has been assigned since ``take``."""
        with DisableTorchFunctionSubclass():
            return bool(self._touched) or any(param.grad is not None for param, _, _ in self._trained)

    @property
    def drops_all(self) -> bool:
        """Whether every gradient was dropped, or set to zero, since the last backward, and no tensor was assigned."""
        with DisableTorchFunctionSubclass():
            return all(param in self._touched and param.grad is None for param, _, _ in self._trained)

    def take(self) -> list[AssignedGradient]:
        """Return what has been assigned since the last call, and set ``param.grad`` to None.

        Raises:
            ZeroEngineError: A gradient that the engine held earlier was assigned, which has no values.
        """
        # Otherwise each read of a released parameter's gradient would be taken for one by the user.
        touched = self._touched
        with DisableTorchFunctionSubclass():
            assigned = [
                AssignedGradient(unit_grads, index, param.grad, touched.get(param, False) and param.grad is None)
                for param, unit_grads, index in self._trained
                if param.grad is not None or (touched and param in touched)
            ]
            for assignment in assigned:
                assignment.unit_grads.unit.params[assignment.index].grad = None
            self._forget_assigned()
        for assignment in assigned:
            # It was assigned where gradients are not watched, as after a step.
            if isinstance(assignment.value, EngineGradient):
                assignment.value.refuse("an assignment")
        return assigned

    def of_frozen(self) -> dict[nn.Parameter, str]:
        """Return the parameters that were frozen at ``initialize`` and have a gradient, with their names."""
        with DisableTorchFunctionSubclass():
            for param, _ in self._frozen:
                if param.requires_grad:
                    # It was unfrozen since. The step refuses that, and frozen again it is to have no gradient.
                    param.grad = None
            return {param: name for param, name in self._frozen if param.grad is not None}

    def restart(self) -> None:
        """Note that a backward begins, or that the gradients of a step are gone: none of the next ones is dropped."""
        self._dropped.clear()

    def _forget_assigned(self) -> None:
        self._touched.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drop(self) -> list[str]:
        """Set every ``param.grad`` to None, and return the names of the parameters that had one."""
        self._forget_assigned()
        named = [(param, unit_grads.unit.layout.slots[index].name) for param, unit_grads, index in self._trained]
        with DisableTorchFunctionSubclass():
            dropped = [(param, name) for param, name in named + self._frozen if param.grad is not None]
            for param, _ in dropped:
                param.grad = None
        return [name for _, name in dropped]
