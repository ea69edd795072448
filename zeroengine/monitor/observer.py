"""What observes a step: the moments of a step, in the order in which they come.

A step consists of micro-steps, each of which is a forward and a backward:

    forward_began, forward_ended        the model computes
    loss_noted                          a backward has run
    micro_step_ended                    ``step()`` ends a micro-step that is not the last one

The last micro-step ends with the step:

    gradients_reduced                   the gradients of all ranks are summed
    micro_step_ended                    micro-steps are counted
    step_ended                          the parameters are updated, or the step was skipped

[Note: Observers and decisions]
``StepLoop`` and ``ModelForwards`` call the moments, each on the observers that override it, in the order of
``build_observers``. That order is the same on all ranks, because a moment may be a collective. An observer changes
nothing that a step computes. What decides about a step is no observer, and ``StepLoop`` calls it by name: accumulation,
clipping, the skip of a step that overflows, the rounds of ``local_steps``.

An error that a moment raises is one of the user's call, such as ``step()``, and later observers do not get that moment.
So an observer may stop a run in which ranks differ, and may end the process by ``SystemExit`` after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Observer:
    """Observes the steps of one engine. Each moment does nothing unless a class overrides it.

    An observer is complete when it is constructed. What it opens it closes by ``EngineSetup.partition_undo``, which
    also runs where ``initialize`` fails. ``Engine.change`` makes new observers, with the states of those before.

    Attributes:
        world_independent: Its state loads on any number of ranks, so it is to be the same on all ranks.
    """

    world_independent = True

    def forward_began(self, args: Any, kwargs: Any) -> None:
        """A forward of training begins with these inputs of the model. An evaluation is none.

        Forwards inside ``gathered``, and recomputations of activation checkpoints, are none either. See "Which forwards
        count" in ``engine/model_forwards.py``.
        """

    def forward_ended(self, completed: bool) -> None:
        """A forward of training has returned, or has raised.

        Args:
            completed: Whether it returned.
        """

    def loss_noted(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        """``Engine.backward`` has run on this loss, or ``Engine.scale`` was given it. It is not scaled.

        Args:
            loss: The loss.
            weight: The weight that it was given, over a number that is the same for all; None: none.
        """

    def gradients_dropped(self) -> None:
        """The step in progress has lost its gradients, by ``zero_grad``, a load or an error: it starts again."""

    def gradients_reduced(self) -> None:
        """All gradients of a step are reduced, and parameters and states are those from before its update.

        No collective is in progress.
        """

    def micro_step_ended(self, ranks_meet: bool) -> None:
        """A micro-step has ended, and is counted.

        Args:
            ranks_meet: Whether the step ends with it, and all ranks take that step together: with ``local_steps`` it is
                the last one of its round. Then this may be a collective, and no other one is in progress.
        """

    def step_ended(self, number: int) -> None:
        """A step has updated the parameters, or was skipped. Its result may not be known yet, and nothing waits for it.

        Args:
            number: The number of the step. Skipped steps count.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints are to hold of this observer: tensors, numbers, strings, and containers of these."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned when a checkpoint was saved, which has been loaded."""
        raise NotImplementedError


def overriding(observers: Sequence[Observer], method: Callable[..., Any]) -> tuple[Observer, ...]:
    """Return the observers that override a method of ``Observer``, in their order.

    Whoever calls a moment keeps them, so that a moment which nothing observes costs nothing.
    """
    return tuple(observer for observer in observers if getattr(type(observer), method.__name__) is not method)
