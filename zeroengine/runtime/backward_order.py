"""Finds what the backward of a rank passes over, because its loss does not depend on it, while other ranks run it.

[Note: Modules that a backward passes over]
A model may call two heads, and the loss of each rank be of one. The backward of a rank then runs one head, and another
rank's the other. Each of these gathers units, and a gather takes all ranks. So every rank gathers the units of both,
at the place of its backward where the other ranks do.

Autograd shows this place. Of the nodes that are ready it runs the latest, and a node that is not ready waits for later
ones. So it runs the nodes in the reverse order of their creation. When it comes to the output of a module, it has
passed over all modules whose outputs were made later and that it has not come to. Their units are gathered then, and
those of the modules that are left at the end of the backward. They count as past (see ``module_backwards.py``).

    forward             trunk   left   right
    backward, rank 0    gathers right for others, then left, then trunk
    backward, rank 1    gathers right, then left for others, then trunk

What no rank runs, such as a branch that is detached, is gathered for nothing. Run it under ``torch.no_grad()`` instead.

A backward that accumulates no gradients, of ``torch.autograd.grad``, passes over nothing. Nor does one through a
forward part of whose graph has another order: it was made in several threads, or by a backward with
``create_graph=True``. There all ranks must run the same modules. The same holds for what a reentrant checkpoint runs
again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zeroengine.runtime.forward_graphs import ForwardGraph, ForwardGraphs

# The most operations of one forward that are followed: the latest ones.
MAX_OPERATIONS = 10_000

Key = tuple[int, int, int]


class Operation(Protocol):
    """A part of a forward of the whole model that has a backward: a call of a module, or a forward that holds lists.

    The forward owns it, whether or not a tensor that leads to it is alive, which may differ between ranks.

    Attributes:
        order_key: Sorts operations in the order in which autograd comes to them. None: it is part of a recomputation.
    """

    order_key: Key | None

    @property
    def model_forward(self) -> ForwardGraph:
        """The forward that it belongs to."""


class BackwardOrder:
    """The order in which a backward comes to operations.

    Args:
        forwards: The forwards of the whole model.
        accumulates: Whether the backward in progress accumulates gradients.
        pass_over: Called with an operation that the backward has passed over, or has begun.
    """

    def __init__(
        self, forwards: ForwardGraphs, accumulates: Callable[[], bool], pass_over: Callable[[Operation], None]
    ) -> None:
        self._forwards, self._accumulates, self._pass_over = forwards, accumulates, pass_over
        self._numbers = itertools.count()
        # Those that the backward in progress has not come to or passed over, the next one last. None: it has not begun.
        self._remaining: list[tuple[Key, Operation, ForwardGraph]] | None = None

    def expect(self, operation: Operation, outputs: Sequence[torch.Tensor], *, holds_lists: bool = False) -> None:
        """Note an operation that has ended in forward, outside of any backward.

        Args:
            operation: The operation.
            outputs: Its outputs with gradients.
            holds_lists: Whether it is the forward of a module that holds lists.
        """
        node_number = max(tensor.grad_fn._sequence_nr() for tensor in outputs if tensor.grad_fn is not None)
        number = next(self._numbers)
        # Modules may return one tensor. Of its hooks, those of modules that hold lists come first, the outermost first.
        operation.order_key = (-node_number, 0, -number) if holds_lists else (-node_number, 1, number)
        forward = operation.model_forward
        forward.operations.append(operation)
        # Outside of forwards of the whole model, modules may be called for ever without a backward.
        del forward.operations[:-MAX_OPERATIONS]
        # Each thread counts its nodes.
        forward.has_one_order = forward.has_one_order and forward.thread == threading.get_ident()

    def reach(self, operation: Operation) -> None:
        """Note that autograd has come to ``operation``, and pass over those that come before it."""
        self._forwards.note_begun(operation.model_forward)
        key = operation.order_key
        if key is None:
            return
        if self._remaining is None:
            expected = ((op, forward) for forward in self._forwards.alive() for op in forward.operations)
            entries = [(op.order_key, op, forward) for op, forward in expected if op.order_key is not None]
            self._remaining = sorted(entries, key=lambda entry: entry[0], reverse=True)
        while self._remaining and self._remaining[-1][0] <= key:
            self._pass_over_next(self._remaining, operation)

    def pass_over_remaining(self) -> None:
        """Pass over all operations that autograd has not come to. Call it at the end of a backward."""
        while self._remaining:
            self._pass_over_next(self._remaining, None)

    def end_backward(self) -> None:
        """Forget the backward that has ended."""
        self._remaining = None

    def _pass_over_next(self, remaining: list[tuple[Key, Operation, ForwardGraph]], reached: Operation | None) -> None:
        _, operation, forward = remaining.pop()
        is_passed_over = operation is not reached and forward.has_one_order and self._forwards.is_in_backward(forward)
        if is_passed_over and self._accumulates():
            self._pass_over(operation)
