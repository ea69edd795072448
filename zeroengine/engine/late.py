"""What the host learns of a step after it has gone on.

[Note: Late verdicts]
On a GPU ``Engine.step`` issues a step and returns ("A step without waiting" in ``optim/backends/device_adam.py``).
Its verdict is taken in where it is asked for (``global_steps`` and the like, the truth value of what ``step``
returned), when the next backward begins, before checkpoints, and at the end. In each of these the device still has
the update before it, and at the next backward the forward, too: it does not run dry.

- Taking it in is a matter of one rank, for a rank may ask alone. What is collective, the name of the parameter whose
  gradient was not finite, comes when the next backward begins: on every rank, and before gradients are overwritten.
- The LR schedule is stepped at once. Where the step turns out to have been skipped, schedule and hyperparameters are
  what they were before, save what somebody has written since.
- fp16 waits at the end of the step: the loss scale of the next backward depends on the verdict, and an overflow at the
  smallest scale is an error of the very step. So does a schedule without ``state_dict``, which cannot be taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

if TYPE_CHECKING:
    from zeroengine.engine.engine import Engine

T = TypeVar("T")


class Settled(Generic[T]):
    """An attribute of an engine that depends on the verdict of its last step. Looking at it waits for that.

    Args:
        name: of the attribute of ``Steps`` that it is.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, engine: None, owner: type) -> Settled[T]: ...

    @overload
    def __get__(self, engine: Engine, owner: type) -> T: ...

    def __get__(self, engine: Engine | None, owner: type) -> Settled[T] | T:
        if engine is None:
            return self
        engine._steps.settle()
        value: T = getattr(engine._steps, self._name)
        return value

    def __set__(self, engine: Engine, value: T) -> None:
        engine._steps.settle()
        setattr(engine._steps, self._name, value)


def can_be_taken_back(schedule: Any) -> bool:
    return schedule is None or all(hasattr(schedule, name) for name in ("state_dict", "load_state_dict"))


def reversibly(step: Callable[[], None], schedule: Any, groups: Sequence[dict[str, Any]]) -> Callable[[], None]:
    """Calls ``step``, which steps ``schedule``, which drives ``groups``; what is returned takes that back."""
    if schedule is None:
        step()
        return lambda: None
    state, before = copy.deepcopy(schedule.state_dict()), _values(groups)
    step()
    after = _values(groups)

    def take_back() -> None:
        schedule.load_state_dict(state)
        for group, old, new in zip(groups, before, after, strict=True):
            for key, value in old.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)  # a schedule writes it in place
                elif group[key] == new[key]:
                    group[key] = value

    return take_back


def _values(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]
