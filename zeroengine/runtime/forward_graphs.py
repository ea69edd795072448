"""The graphs of the whole model's forwards, and which of them the backward in progress contains.

[Note: Which forwards a backward contains]
Usually a backward follows each forward, and contains it alone. But a loss may be of several forwards, as in contrastive
learning; several losses may be computed before the first of them is run backward; and a loss may never be run backward,
such as that of an evaluation without ``torch.no_grad()``. The loss then decides which modules' backwards are to come.
``Engine.backward`` has it, and the graph is searched for the forwards. That takes a few microseconds for each node, so
it is done only if there is a choice. A plain ``loss.backward()`` is noticed only while it runs. Then autograd knows
which nodes it will run, and is asked for an inner node of each forward, one below an output of the model. Where neither
answers, such as for a model whose outputs are hidden in objects, three rules apply:

- Autograd runs the nodes that are ready in the reverse order of their creation. When it has come to a forward, it runs
  no later forward that has not begun.
- A forward that a backward has run is not run again after another forward. (A caller who keeps a loss keeps its graph.)
- A forward that a backward has passed over, because it contained later ones alone, is not part of such a backward.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from zeroengine.utils.compiler_disable import disable_compile

# The most nodes of a graph that are searched. In a larger graph the rules decide.
MAX_NODES = 20_000


class InnerNode:
    """A node of a forward's graph, one below an output of the model: autograd runs it if it runs the output's node.

    It is a hook of the output's node, which so owns it, and with it the inner node, which the graph owns as well.
    """

    def __init__(self, node: Node, output_reached: Callable[[], None]) -> None:
        self.node, self._output_reached = node, output_reached

    @disable_compile
    def __call__(self, *_: Any) -> None:
        """Report that autograd has come to the output."""
        self._output_reached()


class ForwardGraph:
    """One forward of the whole model with gradients. Its graph owns it, through the calls of modules.

    Attributes:
        number: Counts forwards.
        first_node: The sequence number of the first node that it adds to the graph.
        end_node: The sequence number of the first node after it.
        has_run: Whether a backward has begun that contains it.
        is_retained: Whether such a backward retained the graph, so that another one may come.
        is_missed: Whether a backward of later forwards alone has ended before any that contains it.
        operations: Its parts that have backwards.
        thread: The thread that it began in.
        has_one_order: Whether autograd runs its parts in the reverse order of their sequence numbers.
        inner_nodes: One for each output whose graph is alive.
    """

    def __init__(self, number: int, first_node: int) -> None:
        self.number, self.first_node, self.end_node = number, first_node, sys.maxsize
        self.has_run = self.is_retained = self.is_missed = False
        self.operations: list[Any] = []
        self.thread, self.has_one_order = threading.get_ident(), True
        self.inner_nodes: weakref.WeakSet[InnerNode] = weakref.WeakSet()


class ForwardGraphs:
    """Tells which forwards may still run in the backward in progress.

    Args:
        output_reached: Called when autograd comes to an output of the model. The graph owns it.

    Attributes:
        latest: The latest forward.
    """

    def __init__(self, output_reached: Callable[[], None]) -> None:
        self._output_reached = output_reached
        self.latest = ForwardGraph(0, 0)
        self._alive = weakref.WeakSet([self.latest])
        # Whether the backward in progress contains them, as far as this is known.
        self._is_contained: dict[ForwardGraph, bool] = {}
        # Those that the backward in progress has come to.
        self._begun: set[ForwardGraph] = set()
        # Whether that backward makes a graph.
        self._makes_graph = False

    def begin(self, first_node: int) -> None:
        """Note that a forward begins. ``first_node``: the next sequence number."""
        # The end of a forward that raised was not reported, and its graph may be alive.
        self.latest.end_node = min(self.latest.end_node, first_node)
        self.latest = ForwardGraph(self.latest.number + 1, first_node)
        self._alive.add(self.latest)

    def end(self, end_node: int, outputs: Iterable[torch.Tensor]) -> None:
        """Note that the forward has ended. ``end_node``: the next sequence number."""
        self.latest.end_node = end_node
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            below = (inner for inner, _ in node.next_functions if inner is not None)
            # All forwards share the nodes of parameters.
            inner = next((inner for inner in below if inner.name() != "torch::autograd::AccumulateGrad"), None)
            if inner is not None:
                hook = InnerNode(inner, self._output_reached)
                node.register_prehook(hook)
                self.latest.inner_nodes.add(hook)

    def continue_latest(self, first_node: int) -> None:
        """Note that a module is called outside of a forward of the whole model, as a part of the latest one.

        After a backward of the latest one it is a part of a new one. ``first_node``: the next sequence number.
        """
        if self.latest.has_run and not self.latest.is_retained:
            self.begin(first_node)
        self.latest.end_node = sys.maxsize

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Find the forwards that the backward of ``loss`` contains."""
        self._is_contained = {}
        others = [
            forward
            for forward in self._alive
            if forward is not self.latest and (forward.is_retained or not forward.has_run)
        ]
        if others:
            self._is_contained = self._forwards_in_graph(loss)

    def enter_plain_backward(self) -> None:
        """Ask autograd which forwards the plain backward contains that runs now and is not nested in another."""
        self._is_contained = {}
        if len(self._alive) > 1:
            is_contained = {
                forward: any(torch._C._will_engine_execute_node(inner.node) for inner in forward.inner_nodes)
                for forward in self._alive
                if forward.inner_nodes
            }
            # A backward that does not come from outputs, but from tensors inside of a forward, shows nothing.
            self._is_contained = is_contained if any(is_contained.values()) else {}

    def note_begun(self, forward: ForwardGraph) -> None:
        """Note that autograd has come to ``forward``."""
        self._begun.add(forward)
        self._makes_graph = self._makes_graph or torch.is_grad_enabled()
        forward.has_run = True
        retains = torch._C._autograd._get_current_graph_task_keep_graph()
        forward.is_retained = forward.is_retained or retains

    def end_backward(self) -> None:
        """Forget the backward that has ended."""
        if self._begun:
            oldest_begun = self._oldest_begun()
            for forward in self._alive:
                if forward.number < oldest_begun and not forward.has_run:
                    forward.is_missed = True
        if self._makes_graph:
            # A thread of autograd may have made it.
            for forward in self._begun:
                forward.has_one_order = False
        self._makes_graph = False
        self._begun.clear()
        self._is_contained = {}

    def alive(self) -> list[ForwardGraph]:
        """Return the forwards whose graphs are alive, and the latest one."""
        return list(self._alive)

    def contains(self, forward: ForwardGraph) -> bool | None:
        """Return whether the backward in progress contains ``forward``; None: unknown."""
        return self._is_contained.get(forward)

    def is_in_backward(self, forward: ForwardGraph) -> bool:
        """Return whether the backward in progress contains ``forward``, or has come to it."""
        return self._is_contained.get(forward, forward in self._begun)

    def may_run(self, forward: ForwardGraph, *, has_begun: bool, has_run: bool) -> bool:
        """Return whether the backward in progress may come to an operation of ``forward``.

        Args:
            forward: The forward that the operation belongs to.
            has_begun: Whether autograd has come to a part of the operation.
            has_run: Whether it has run in an earlier backward.
        """
        is_contained = self._is_contained.get(forward)
        if is_contained is not None:
            return is_contained or has_begun
        oldest_begun = self._oldest_begun()
        if forward.number > oldest_begun and not has_begun:
            return False
        if forward.is_missed and forward.number < oldest_begun < sys.maxsize:
            return False
        return not (has_run and forward is not self.latest)

    def _oldest_begun(self) -> int:
        """Return the number of the first forward that the backward in progress has come to, or ``sys.maxsize``."""
        return min((forward.number for forward in self._begun), default=sys.maxsize)

    def _forwards_in_graph(self, loss: torch.Tensor) -> dict[ForwardGraph, bool]:
        candidates = sorted(self._alive, key=lambda forward: forward.number)
        first_node = candidates[0].first_node
        reached: set[ForwardGraph] = set()
        nodes: list[Any] = [get_gradient_edge(loss).node]
        visited = set(nodes)
        while nodes and len(reached) < len(candidates):
            node = nodes.pop()
            number = node._sequence_nr()
            # What is older than all forwards leads to none of them.
            if number < first_node:
                continue
            reached.update(forward for forward in candidates if forward.first_node <= number < forward.end_node)
            for next_node, _ in node.next_functions:
                if next_node is not None and next_node not in visited:
                    visited.add(next_node)
                    nodes.append(next_node)
            if len(visited) > MAX_NODES:
                return {}
        return {forward: forward in reached for forward in candidates}
