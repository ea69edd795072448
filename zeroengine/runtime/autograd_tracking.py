"""Forwards of holders, and the hooks by which autograd tells how far their backward is.

[Note: Backward]
A holder's outputs carry a hook: when the first of their gradients is there, the backward of that call begins. It is
through when every trainable parameter of the holder's units has its gradient and the gradients of the holder's inputs
are done, for until then some operation is likely to read a weight.
An input that several calls took, such as an encoder's output by each decoder block, has its gradient only when all of
their backwards are through: there the last nodes of the call's own graph tell instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from zeroengine.runtime.graph import last_nodes
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import eager
from zeroengine.utils.tensor_tree import tensors_in

# Has a function called when the innermost backward in progress ends; not if it raises.
queue_callback: Callable[[Callable[[], None]], None]
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


@dataclass
class Call:
    """One forward of a holder that may see a backward, or several where its graph is retained."""

    num_inputs: int
    edges: list[GradientEdge] = field(default_factory=list)  # of the inputs, where other calls took some of them, too
    nodes: dict[int, int] = field(default_factory=dict)  # how many add to the gradient of an input that is shared
    inputs_left: set[int] = field(default_factory=set)  # whose gradient this call still adds to
    nodes_left: dict[int, int] = field(default_factory=dict)
    started: bool = False

    def start(self) -> None:
        self.started = True
        self.inputs_left, self.nodes_left = set(range(self.num_inputs)), dict(self.nodes)


class Hook:
    """A method for autograd to call, which does not keep its owner alive."""

    def __init__(self, owner: object, step: Callable[..., None], *args: Any) -> None:
        self._owner, self._step, self._args = weakref.ref(owner), step, args

    @eager
    def __call__(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._step(owner, *self._args)


class CallTracker:
    """Tells when the backwards of calls of holders begin, and when they have read all that they are likely to read.

    Args:
        holders: from a module to the units that its forward needs.
        before_backward: called with a holder, before the backward of a call of it.
        after_backward: called with a unit, when the backwards of its holders' calls are through.
    """

    def __init__(
        self,
        holders: Mapping[nn.Module, list[Unit]],
        before_backward: Callable[[nn.Module], None],
        after_backward: Callable[[Unit], None],
    ) -> None:
        self._holders, self._begins, self._is_over = holders, before_backward, after_backward
        self._calls: dict[nn.Module, list[Call]] = {}  # whose backward has begun
        self._taken: Any = WeakIdKeyDictionary()  # tensors that some call had as an input
        self._complete: set[Unit] = set()  # every trainable parameter has its gradient

    def watch_inputs(self, module: nn.Module, inputs: Any) -> Call:
        """Put hooks on what goes in, before the forward may change it in place: they are of the values until then."""
        before = [t for t in tensors_in(inputs) if t.requires_grad]
        # Completeness says nothing of frozen units: without an input to go by they wait for the backward's end.
        call = Call(len(before) or any(not unit.trainable for unit in self._holders[module]))
        if any(tensor in self._taken for tensor in before):
            call.edges = [get_gradient_edge(tensor) for tensor in before]
        for index, tensor in enumerate(before):
            hook = Hook(self, CallTracker._passed, module, call, index)
            if tensor.is_leaf:  # its own hooks would stay for ever; those of the graph's node for it go with the graph
                get_gradient_edge(tensor).node.register_hook(hook)
            else:
                tensor.register_hook(hook)
            self._taken[tensor] = True
        return call

    def watch_outputs(self, module: nn.Module, call: Call, output: Any) -> bool:
        """Put hooks on what comes out. Return whether a backward can pass here."""
        outputs = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in outputs:
            tensor.register_hook(Hook(self, CallTracker._before_backward, module, call))
        edges, call.edges = call.edges, []  # they keep the graph
        for index, nodes in enumerate(last_nodes(edges, outputs) if outputs and edges else []):
            call.nodes[index] = len(nodes)
            for node in nodes:
                node.register_hook(Hook(self, CallTracker._ran, module, call, index))
        return bool(outputs)

    def complete(self, unit: Unit) -> None:
        """Every trainable parameter of ``unit`` has its gradient."""
        self._complete.add(unit)
        for module in unit.modules:
            if module in self._calls:
                self._after_backward(module)

    def end_backward(self) -> None:
        """Forget what the backward has done."""
        for calls in self._calls.values():
            for call in calls:
                call.started = False  # the graph may be retained
        self._calls.clear()
        self._complete.clear()

    def _before_backward(self, module: nn.Module, call: Call) -> None:
        if call.started:
            return
        call.start()
        self._begins(module)
        self._calls.setdefault(module, []).append(call)
        for unit in self._holders[module]:
            if unit.releasable and unit.trainable and not any(param.requires_grad for param in unit.params):
                self._complete.add(unit)  # frozen for now: no gradient will come

    def _ran(self, module: nn.Module, call: Call, index: int) -> None:
        call.nodes_left[index] -= 1
        if not call.nodes_left[index]:
            self._passed(module, call, index)

    def _passed(self, module: nn.Module, call: Call, index: int) -> None:
        """The backward of ``call`` is through to one of its inputs."""
        call.inputs_left.discard(index)
        if not call.inputs_left:
            self._after_backward(module)

    def _after_backward(self, module: nn.Module) -> None:
        for unit in self._holders[module]:
            if unit.releasable and all(self._is_through(holder) for holder in unit.modules if holder in self._calls):
                self._is_over(unit)

    def _is_through(self, module: nn.Module) -> bool:
        """Return whether no operation of ``module``'s backward is likely to read a weight."""
        if any(call.inputs_left for call in self._calls[module]):
            return False
        return all(unit in self._complete for unit in self._holders[module] if unit.trainable)
