"""What forwards of the whole model have returned, by which autograd tells which of them a backward contains.

See "Which logs a backward contains" in ``schedule/visits.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from zeroengine.schedule.visits import VisitLog
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import will_engine_execute_node


class InnerNode:
    """A node of a forward's graph, one below an output of the model: autograd runs it if it runs the output's node.

    It is a hook of the output's node, which so owns it, and with it the inner node and the log, which the graph owns as
    well.
    """

    def __init__(self, node: Node, log: VisitLog, output_reached: Callable[[], None]) -> None:
        self.node, self.log, self._output_reached = node, log, output_reached

    @disable_compile
    def __call__(self, *_: Any) -> None:
        """Report that autograd has come to the output."""
        self._output_reached()


class GraphOutputs:
    """The inner nodes of the forwards whose graphs are alive.

    Args:
        output_reached: Called when autograd comes to an output of the model. The graph owns it.
    """

    def __init__(self, output_reached: Callable[[], None]) -> None:
        self._output_reached = output_reached
        self._nodes: weakref.WeakSet[InnerNode] = weakref.WeakSet()

    def add(self, log: VisitLog, outputs: Iterable[torch.Tensor]) -> bool:
        """Note what the forward of ``log`` returned. Return whether it tells which backwards contain the forward."""
        shows = False
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            below = (inner for inner, _ in node.next_functions if inner is not None)
            # All forwards share the nodes of parameters.
            inner = next((inner for inner in below if inner.name() != "torch::autograd::AccumulateGrad"), None)
            if inner is not None:
                hook = InnerNode(inner, log, self._output_reached)
                node.register_prehook(hook)
                self._nodes.add(hook)
                shows = True
        return shows

    def of_backward(self) -> list[VisitLog]:
        """Return the logs that the backward which runs now is known to contain."""
        contained = (inner.log for inner in list(self._nodes) if will_engine_execute_node(inner.node))
        return list(dict.fromkeys(contained))
