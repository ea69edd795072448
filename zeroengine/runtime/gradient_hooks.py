"""The hook of a parameter that takes its gradient, and the unit whose gradients arrive now.

[Note: The fast path of a gradient]
The gradients of a unit mostly arrive one after another, and what is true of the first of them is true of the others:
which backward computes them, where they are copied to, and that the schedule does nothing before the last one. So the
first one takes the slow path, with all checks (``Backward``), and opens the unit (``Reducer.add``). The hooks of the
other parameters only copy their gradients. The schedule learns of all of them in one event: with the last one that it
waits for, or before the next event of any kind (``Executor.tell``), which also closes the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroengine.runtime.gradient_buffers import CastCopies
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import current_graph_task_id

# The number of no unit, and of no backward.
NONE = -2


class ArrivingGradients:
    """The unit whose gradients arrive now. It is open or closed. See the note above.

    Attributes:
        task: Autograd's number of the backward whose latest gradient was noted; ``NONE``: the next one may begin
            something.
        unit: The number of the unit that is open; ``NONE``: none is.
        views: By the parameter's index: where its gradient is copied to.
        filled: By the parameter's index: whether there is one already, which it is added to.
        has_grad: ``UnitGradients.has_grad``.
        copies: Collects the copies. None: they are made at once.
        progress: Lets reduces in progress proceed.
        arrived: The indices of the parameters whose gradients the schedule does not know of yet.
        num_pending: The number of further gradients that the schedule waits for.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "copies",
        "filled",
        "has_grad",
        "num_pending",
        "progress",
        "task",
        "unit",
        "views",
    )

    def __init__(self) -> None:
        self.task = NONE
        self.arrived: dict[int, None] = {}
        self._forget_unit()

    def _forget_unit(self) -> None:
        self.unit, self.num_pending = NONE, 0
        self.views: Sequence[torch.Tensor] = ()
        self.filled: list[bool] = []
        self.has_grad: list[bool] = []
        self.copies: CastCopies | None = None
        self.progress: Callable[[], None] = _do_nothing

    def open(
        self,
        unit: int,
        views: Sequence[torch.Tensor],
        filled: list[bool],
        has_grad: list[bool],
        copies: CastCopies | None,
        progress: Callable[[], None],
        num_pending: int,
    ) -> None:
        """Open a unit. See the attributes."""
        self.views, self.filled, self.has_grad, self.copies = views, filled, has_grad, copies
        self.progress, self.num_pending, self.unit = progress, num_pending, unit

    def close(self) -> tuple[int, tuple[int, ...]]:
        """Close the unit. Return its number, and the parameters that the schedule has to be told of."""
        unit, arrived = self.unit, tuple(self.arrived)
        self._forget_unit()
        self.arrived.clear()
        return unit, arrived


def _do_nothing() -> None:
    return


class GradientHook:
    """Takes the gradient of one parameter when autograd has accumulated it.

    The parameter owns it in C++, so it refers to nothing that owns the parameter.

    Args:
        arriving: The unit whose gradients arrive now.
        unit: The number of the parameter's unit.
        index: The index of the parameter in the unit.
        slow_path: Takes the gradient with all checks.
        report: Reports the gradients of the open unit to the schedule, which waits for no further one.

    Attributes:
        hooks: All hooks of the parameter, in the order in which autograd calls them.
    """

    __slots__ = ("_arriving", "_index", "_report", "_slow_path", "_unit", "hooks")

    def __init__(
        self,
        arriving: ArrivingGradients,
        unit: int,
        index: int,
        slow_path: Callable[[], object],
        report: Callable[[], object],
    ) -> None:
        # What is open when a backward raises is to end with the engine.
        self._arriving, self._unit, self._index = weakref.ref(arriving), unit, index
        self._slow_path, self._report = slow_path, report
        self.hooks: Mapping[int, Any] = {}

    @disable_compile
    def __call__(self, param: torch.Tensor) -> None:
        """Take the gradient of ``param``."""
        arriving, index = self._arriving(), self._index
        if arriving is None:
            return
        if arriving.unit != self._unit or arriving.task != current_graph_task_id() or len(self.hooks) != 1:
            self._slow_path()
            return
        gradient, view = param.grad, arriving.views[index]
        if (
            gradient is None
            or index in arriving.arrived
            or gradient.shape != view.shape
            # A backward with create_graph=True gives the gradient a history.
            or gradient.requires_grad
            or gradient.is_sparse
        ):
            self._slow_path()
            return
        param.grad, progress = None, arriving.progress
        if arriving.copies is not None:
            arriving.copies.follow_stream()
            arriving.copies.copy(gradient, view, accumulate=arriving.filled[index])
        elif arriving.filled[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        arriving.filled[index] = arriving.has_grad[index] = True
        arriving.arrived[index] = None
        arriving.num_pending -= 1
        if not arriving.num_pending:
            self._report()
        # Peers may have become ready for a sum since this rank launched it.
        progress()
