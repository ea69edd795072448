"""What is told of the forwards and the backwards of the whole model, such as the loop of steps."""

from __future__ import annotations

from typing import Any, Protocol

from zeroengine.schedule.events import GradientsBegan


class PassListener(Protocol):
    """The events of forwards and backwards, for ``StepLoop``."""

    def begin_model_forward(self, args: Any, kwargs: Any) -> None:
        """A forward of the whole model begins with these inputs, perhaps nested in another one."""

    def end_model_forward(self) -> None:
        """The outermost forward of the whole model has returned or raised."""

    def count_forward(self) -> None:
        """A forward of the whole model has begun with autograd enabled, outside of any backward."""

    def check_backward(self, wants_gradients: bool) -> None:
        """A backward is about to begin. Raise to refuse it, before anything has changed its state.

        Args:
            wants_gradients: False if all parameters are frozen, such as those of a GAN's discriminator while the
                loss of the generator passes through it. Then no further event of this backward follows.
        """

    def check_frozen_backward(self) -> None:
        """A backward begins while all parameters are frozen. Raise to refuse it."""

    def begin_backward(self, *, by_engine: bool) -> GradientsBegan:
        """A backward begins. Return what the schedule is told of it. ``by_engine``: see ``GradientsBegan``."""

    def end_backward(self, num_calls: int) -> None:
        """A backward has ended, and the reducer has its gradients.

        Args:
            num_calls: The number of plain ``loss.backward()`` calls that it consists of; 0 for ``Engine.backward``.
        """

    def fail_backward(self, after_others: bool) -> None:
        """A backward raised, so some of its gradients are missing: drop all gradients of the step in progress.

        Args:
            after_others: Whether other backwards produced gradients that ``end_backward`` has not reported yet.
        """

    def drop_gradients(self) -> None:
        """All gradients of the step in progress so far are dropped."""
