"""What user code does to ``param.grad`` outside of a backward.

[Note: Who owns param.grad]
Within a backward ``param.grad`` belongs to autograd, and to the Functions and hooks of the user: it is this rank's
gradient of that backward. The reducer takes it from there. So outside of a backward ``param.grad`` is None, and
whatever is found there is the user's:

    an assigned value      becomes the mean gradient of the step so far, as in plain PyTorch after a backward. Each rank
                           takes its shard of the value. Digests in the sum of the step show ranks that assigned
                           different ones (``OutsideWrites``).
    None                   drops the gradient of the step so far, likewise
    a read                 finds None, and a warning says what to call instead
    ``zero_grad()``        drops it
    before ``initialize``  is dropped by it, with a notice

Values are taken over when the next backward begins, and when a step ends. To notice a read and an assigned None, the
parameters have the class of released ones from the end of a backward to the next backward or step, except in forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.runtime.released_parameter import stop_watching_gradient, watch_gradient
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients


@dataclass(frozen=True, eq=False)
class AssignedGradient:
    """What user code has assigned to ``param.grad``."""

    unit_grads: UnitGradients  # those of the parameter's unit
    index: int  # index of the parameter in its unit
    value: torch.Tensor | None  # in the parameter's shape; None drops the gradient


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
        self._is_watching = self._is_paused = False
        # The parameters whose gradient the user has assigned to, perhaps None, since the last backward, and the handles
        # of hooks that run before autograd adds to what was assigned.
        self._touched: set[nn.Parameter] = set()
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Notice reads of gradients, and assignments, from now on."""
        self._is_paused = False
        if not self._is_watching:
            self._is_watching = True
            for param, _, _ in self._trained:
                watch_gradient(param)

    def stop_watching(self) -> None:
        """Give the parameters their own class again."""
        self._is_paused = False
        if self._is_watching:
            self._is_watching = False
            for param, _, _ in self._trained:
                stop_watching_gradient(param)

    def pause(self) -> None:
        """Stop watching until ``resume``."""
        is_paused = self._is_watching or self._is_paused
        self.stop_watching()
        self._is_paused = is_paused

    def resume(self) -> None:
        """Go on watching after ``pause``, unless something else has stopped it."""
        if self._is_paused:
            self.watch()

    def note_assigned(self, param: nn.Parameter, take_first: Callable[..., None]) -> None:
        """Note that user code has assigned to the gradient of ``param``, if that is watched.

        Args:
            param: The parameter.
            take_first: Called before autograd adds a gradient to the assigned one. Most backwards are noticed earlier.
        """
        if self._is_watching and param not in self._touched:
            self._touched.add(param)
            if param.requires_grad:
                self._handles.append(param.register_hook(take_first))

    @property
    def has_assigned(self) -> bool:
        """Whether something has been assigned since ``take``."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(self._touched) or any(param.grad is not None for param, _, _ in self._trained)

    def take(self) -> list[AssignedGradient]:
        """Return what has been assigned since the last call, and set ``param.grad`` to None."""
        # Otherwise each read of a released parameter's gradient would be reported as one by the user.
        with torch._C.DisableTorchFunctionSubclass():
            assigned = [
                AssignedGradient(unit_grads, index, param.grad)
                for param, unit_grads, index in self._trained
                if param.grad is not None or param in self._touched
            ]
            for gradient in assigned:
                gradient.unit_grads.unit.params[gradient.index].grad = None
            self._forget()
        return assigned

    def of_frozen(self) -> dict[nn.Parameter, str]:
        """Return the parameters that were frozen at ``initialize`` and have a gradient, with their names."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, _ in self._frozen:
                if param.requires_grad:
                    # It was unfrozen since. The step refuses that, and frozen again it is to have no gradient.
                    param.grad = None
            return {param: name for param, name in self._frozen if param.grad is not None}

    def _forget(self) -> None:
        self._touched.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drop(self) -> list[str]:
        """Set every ``param.grad`` to None, and return the names of the parameters that had one."""
        self._forget()
        named = [(param, unit_grads.unit.layout.slots[index].name) for param, unit_grads, index in self._trained]
        with torch._C.DisableTorchFunctionSubclass():
            dropped = [(param, name) for param, name in named + self._frozen if param.grad is not None]
            for param, _ in dropped:
                param.grad = None
        return [name for _, name in dropped]
