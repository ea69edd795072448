"""The backward in progress: where it begins and ends, and whether its loss is scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from .accumulation import Accumulation
from .errors import ZeroEngineError
from .optim import LossScaler
from .runtime import Gatherer, Reducer, eager

BY_ENGINE = -1  # no number of autograd's


class Backward:
    """The backward in progress, whoever began it: ``Engine.backward``, or a plain ``loss.backward()`` that met a hook.

    Args:
        scales: whether the loss must be scaled.
        accumulation: counts backwards, and knows when one has raised in the middle of a step.
        begins: called as one begins, before anything else happens, with whether any gradient is wanted of it.

    Attributes:
        gatherer, reducer: set when they are made, for they call ``entering``, ``arriving`` and ``enter_forward``.
    """

    gatherer: Gatherer
    reducer: Reducer

    def __init__(
        self, scaler: LossScaler, scales: bool, accumulation: Accumulation, begins: Callable[[bool], None]
    ) -> None:
        self._scaler, self._scales = scaler, scales
        self._accumulation, self._begins = accumulation, begins
        self._in_progress = False
        self._scaled: int | None = None  # autograd's number of the backward whose loss is scaled

    def run(
        self, loss: torch.Tensor, retain_graph: bool, create_graph: bool, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """``loss.backward``, of the scaled loss."""
        self.abandon()
        self._begin()
        self._scaled = BY_ENGINE
        (loss if self._scaler.scale == 1 else self._times_scale(loss)).backward(
            retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )
        self._end()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a plain ``backward()``, which tells by it that it is scaled."""
        scaled = self._times_scale(loss)
        me = weakref.ref(self)

        def starts(_: torch.Tensor) -> None:
            backward = me()
            if backward is not None:
                backward._scaled = torch._C._current_graph_task_id()

        if scaled.requires_grad:
            scaled.register_hook(starts)
        return scaled

    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._scaler.scale

    def entering(self) -> None:
        """Hooks that a backward runs into come here; the first one begins it where it is a plain ``loss.backward``.

        A callback belongs to the innermost backward, such as that of a reentrant checkpoint: ``run`` does without.
        """
        if not self._in_progress:
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def arriving(self) -> None:
        """A parameter has a gradient.

        Raises:
            ZeroEngineError: of a loss that is not scaled.
        """
        if self._scales and self._scaled is None:
            raise ZeroEngineError(
                "loss.backward() without the loss scale that fp16 needs: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )

    def enter_forward(self) -> None:
        """A forward of the whole model begins outside of any backward."""
        self.abandon()
        if torch.is_grad_enabled():
            self._accumulation.begin_forward()

    def _begin(self) -> None:
        wanted = self.reducer.wanted()
        self._begins(wanted)
        boundary = wanted and self._accumulation.begin_backward(stays_local=not self.reducer.syncing)
        self._in_progress = True  # only now: a backward that is refused above has not begun
        if wanted:
            self.reducer.boundary = boundary
            self.reducer.begin_backward()

    @eager
    def _end(self) -> None:
        if torch._C._current_graph_task_id() == self._scaled:  # else of a checkpoint within it
            self._scaled = None
        if self.reducer.in_backward:  # else of another model's loss, with all parameters here frozen meanwhile
            self.reducer.end_backward()
            self._accumulation.end_backward()
        self.gatherer.end_backward()
        self._in_progress = False  # only now: if anything above raises, this backward has failed

    def abandon(self) -> None:
        """Drop the gradients of this step if the last backward raised: part of its own are there and part are not.

        Where the step had gradients of earlier backwards it cannot go on without them: ``Accumulation`` refuses it.
        """
        self._scaled = None
        if self._in_progress:
            self._in_progress = False
            self._accumulation.fail_backward()
            self.reducer.abandon()
            self.gatherer.end_backward()

    def drop(self) -> None:
        """Drop the gradients of the step in progress, and start it anew."""
        self._accumulation.drop()
        self.reducer.abandon()
