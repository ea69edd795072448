"""Track the backward of each call of a module: when it begins, and when it is over.

``backward_tracker.py`` tracks the backward of the whole model.

[Note: When a module's backward is over]
A module's outputs carry a hook: when the first of their gradients arrives, the backward of that call begins. It is over
when every trainable parameter of the module's units has its gradient and the gradients of the module's inputs are
computed, because until then some operation may still read a weight.

A parameter that the call did not use, such as that of an expert without a sample, never gets its gradient. Autograd
runs the nodes that are ready in the reverse order of their creation. So when it comes to the node that made one of the
call's inputs, which is older than the call, every node of the call has run. The call is then *past*, and a unit all of
whose calls are past gets no further gradient (``Reducer.unit_past``). All ranks call the module, so they reduce the
unit at the same place of their backwards, whichever of its parameters they used. A leaf shows nothing; there the end of
the whole backward decides.

A reentrant checkpoint runs modules without gradients, and again in backward, with a nested backward through them. So a
forward without gradients inside a Function, in a forward with gradients, *awaits its recomputation*: the units of its
module are not past before the nested backward has ended that follows the recomputation.

An input that several calls share, such as an encoder's output that each decoder block takes, has its gradient only when
all of their backwards are over. For such an input the hooks are on the last nodes of the call's own graph instead
(``last_nodes``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from zeroengine.runtime.backward_order import BackwardOrder, Key
from zeroengine.runtime.forward_graphs import ForwardGraph, ForwardGraphs
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.tensor_tree import tensors_in

# The most nodes in a call's graph that are visited, which bounds the host's time for each call. In a larger graph only
# the hooks on the inputs show when the call's backward is over, which may keep a unit gathered for longer.
MAX_NODES = 5000

# Autograd calls a queued function when the innermost backward in progress ends, but not if that backward raises.
queue_callback: Callable[[Callable[[], None]], None]
queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@dataclass(eq=False)
class ModuleCall:
    """One forward of a module, and how far its backward is. A retained graph has several backwards."""

    module: nn.Module
    model_forward_ref: weakref.ref[ForwardGraph]  # the latest one when the call began, which owns the call
    num_inputs: int  # number of inputs that require a gradient
    input_edges: list[GradientEdge] = field(default_factory=list)  # of the inputs, if other calls share some of them
    num_last_nodes: dict[int, int] = field(default_factory=dict)  # by shared input: nodes that add to its gradient
    pending_inputs: set[int] = field(default_factory=set)  # inputs whose gradient this call still adds to
    pending_nodes: dict[int, int] = field(default_factory=dict)  # by shared input: last nodes that have not run
    started: bool = False
    is_passed_over: bool = False  # it has started because autograd is not expected to come to it
    is_past: bool = False  # every node of it has run in the backward in progress
    has_run: bool = False  # a backward that came to it has ended
    order_key: Key | None = None

    @property
    def model_forward(self) -> ForwardGraph:
        """See ``Operation``."""
        forward = self.model_forward_ref()
        assert forward is not None
        return forward

    def start(self) -> None:
        """Begin a backward: nothing has run yet."""
        self.started, self.is_passed_over, self.is_past = True, False, False
        # A retained graph runs the backward of one forward several times, so the counts are reset here.
        self.pending_inputs, self.pending_nodes = set(range(self.num_inputs)), dict(self.num_last_nodes)


def register_hook_first(tensor: torch.Tensor, hook: Callable[..., None]) -> None:
    """Register a hook that autograd calls before the earlier hooks of ``tensor``."""
    hook_id = tensor.register_hook(hook).id
    # Autograd calls the hooks in the order of this dict.
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    for earlier in [key for key in hooks if key != hook_id]:
        hooks[earlier] = hooks.pop(earlier)


class Hook:
    """A method for autograd to call.

    The graph owns its hooks. A hook that owned the tracker would close a cycle through C++ that the garbage collector
    cannot see, so the hook refers to its owner weakly.

    Args:
        owner: The object whose method is called.
        method: The method.
        args: Its arguments.
        kept: An object that lives at least as long as the graph.
    """

    def __init__(self, owner: object, method: Callable[..., object], *args: Any, kept: object = None) -> None:
        self._owner, self._method, self._args, self._kept = weakref.ref(owner), method, args, kept

    @disable_compile
    def __call__(self, *_: Any) -> None:
        """Call the method, if the owner is still alive. The arguments of autograd are ignored."""
        owner = self._owner()
        if owner is not None:
            self._method(owner, *self._args)


class CallTracker:
    """Reports when the backward of a module's call begins, and when a unit is unlikely to be read again.

    Args:
        units_of: The units that each module's forward needs.
        forwards: The forwards of the whole model.
        order: Is told when autograd comes to a call.
        pre_backward: Called with a module and its units that are needed, before the backward of one of its calls.
        post_backward: Called with a unit when the backwards of its modules' calls are over.
        unit_past: Called with a unit when it gets no further gradient in the backward in progress.
    """

    def __init__(
        self,
        units_of: Mapping[nn.Module, list[Unit]],
        forwards: ForwardGraphs,
        order: BackwardOrder,
        pre_backward: Callable[[nn.Module, Iterable[Unit]], None],
        post_backward: Callable[[Unit], None],
        unit_past: Callable[[Unit], None],
    ) -> None:
        self._units_of, self._pre_backward, self._post_backward = units_of, pre_backward, post_backward
        self._unit_past = unit_past
        self._forwards, self._order = forwards, order
        # By module: the calls whose graphs are alive. The graphs own their calls.
        self._calls_with_graph: dict[nn.Module, weakref.WeakSet[ModuleCall]] = {}
        # By module: its forwards that await their recomputations, and its recomputations whose nested backward has
        # ended: in the backward in progress, and in the last one before it that had any.
        self._num_awaiting: dict[nn.Module, int] = {}
        self._num_recomputed: dict[nn.Module, int] = {}
        self._num_recomputed_before: dict[nn.Module, int] = {}
        # Calls of such modules in recomputations.
        self._recomputed_calls: list[tuple[nn.Module, ModuleCall]] = []
        self._has_backward_ended = False
        # Units that some forward used and no call shows it, so that no one knows when their backward is past.
        self._untracked_units: set[Unit] = set()
        # By module: its calls whose backward has begun.
        self._active_calls: dict[nn.Module, list[ModuleCall]] = {}
        # The tensors that were inputs of a call. The keys are weak, because strong ones would keep activations alive.
        self._seen_inputs: Any = WeakIdKeyDictionary()
        # The units whose trainable parameters all have their gradients.
        self._complete_units: set[Unit] = set()

    def watch_inputs(self, module: nn.Module, inputs: Any) -> ModuleCall:
        """Put hooks on the inputs of a forward. Call this before the forward, which may change them in place."""
        tensors = [t for t in tensors_in(inputs) if t.requires_grad]
        # Frozen units have no gradients to wait for. If no input requires a gradient either, nothing would show when
        # their backward is over, so an imaginary input keeps them gathered until the whole backward ends.
        num_inputs = len(tensors) or any(not unit.trainable for unit in self._units_of[module])
        forward = self._forwards.latest
        call = ModuleCall(module, weakref.ref(forward), num_inputs)
        # The forward may change an input in place, which gives the tensor another edge. So the edges are recorded now,
        # although the nodes that lead to them exist only after the forward.
        if any(tensor in self._seen_inputs for tensor in tensors):
            call.input_edges = [get_gradient_edge(tensor) for tensor in tensors]
        for index, tensor in enumerate(tensors):
            # A leaf keeps its own hooks as long as it lives. The hooks of its node are dropped with the graph.
            if tensor.is_leaf:
                hook = Hook(self, CallTracker._input_done, module, call, index, kept=forward)
                get_gradient_edge(tensor).node.register_hook(hook)
            else:
                tensor.register_hook(Hook(self, CallTracker._reached_input, module, call, index, kept=forward))
            self._seen_inputs[tensor] = True
        return call

    def watch_outputs(
        self, module: nn.Module, call: ModuleCall, output: Any, first_sequence_number: int
    ) -> list[torch.Tensor]:
        """Put hooks on the outputs of a forward. Return those through which a backward can pass.

        Args:
            first_sequence_number: The number of the first node that the forward has added to the graph.
        """
        outputs = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        # An input that is returned beside new tensors gets its gradient later, and needs nothing of the module.
        new = [t for t in outputs if t.grad_fn is not None and t.grad_fn._sequence_nr() >= first_sequence_number]
        outputs = new or outputs
        for tensor in outputs:
            # Any of the outputs may get its gradient first, and some may get none. So each output carries the hook.
            tensor.register_hook(Hook(self, CallTracker._start_backward, module, call, kept=call.model_forward))
        # The edges would keep the graph alive, so the call drops them here.
        edges, call.input_edges = call.input_edges, []
        for index, nodes in enumerate(last_nodes(edges, outputs) if outputs and edges else []):
            call.num_last_nodes[index] = len(nodes)
            for node in nodes:
                hook = Hook(self, CallTracker._last_node_ran, module, call, index, kept=call.model_forward)
                node.register_hook(hook)
        return outputs

    def begin_model_forward(self) -> None:
        """Note that a forward of the whole model begins."""
        # No checkpoint has run these forwards again.
        if self._has_backward_ended:
            self._num_awaiting.clear()
            self._num_recomputed_before.clear()
            self._has_backward_ended = False

    def expect_backward(self, call: ModuleCall, outputs: Sequence[torch.Tensor]) -> None:
        """Count ``call`` among those whose backward may run. ``outputs``: what ``watch_outputs`` has returned."""
        self._calls_with_graph.setdefault(call.module, weakref.WeakSet()).add(call)
        self._order.expect(call, outputs)

    def expect_recomputation(self, module: nn.Module) -> None:
        """Note a forward of ``module`` without gradients, which a reentrant checkpoint runs again in backward."""
        self._num_awaiting[module] = self._num_awaiting.get(module, 0) + 1

    def note_recomputed(self, module: nn.Module, call: ModuleCall) -> None:
        """Note that a recomputation inside a backward has made ``call``."""
        if not self._num_awaiting.get(module) and not self._num_recomputed.get(module):
            # A retained graph has another backward, which recomputes what the first one did.
            self._num_awaiting[module] = self._num_recomputed_before.get(module, 0)
        if self._num_awaiting.get(module):
            self._recomputed_calls.append((module, call))

    def end_nested_backward(self) -> None:
        """Note that a nested backward has ended, such as that of a recomputation. Its calls are past."""
        ended = [(module, call) for module, call in self._recomputed_calls if call.started]
        self._recomputed_calls = [(module, call) for module, call in self._recomputed_calls if not call.started]
        for module, _ in ended:
            self._num_awaiting[module] -= 1
            self._num_recomputed[module] = self._num_recomputed.get(module, 0) + 1
        for unit in dict.fromkeys(unit for module, _ in ended for unit in self._units_of[module]):
            self._report_if_past(unit)

    def mark_untracked(self, units: Iterable[Unit]) -> None:
        """Note a use of ``units`` that no call shows. They are not taken to be past from now on."""
        self._untracked_units.update(units)

    def is_past(self, unit: Unit) -> bool:
        """Return whether no operation on ``unit`` is left in the backward in progress."""
        if not unit.is_releasable or not unit.trainable or unit in self._untracked_units:
            return False
        if any(self._may_be_recomputed(user) for user in unit.modules):
            return False
        return not any(self._may_run(call) for user in unit.modules for call in self._calls_with_graph.get(user, ()))

    def _may_be_recomputed(self, module: nn.Module) -> bool:
        """Return whether a nested backward of ``module`` may come in the backward in progress."""
        is_unseen = module in self._num_recomputed_before and module not in self._num_recomputed
        return bool(self._num_awaiting.get(module)) or is_unseen

    def _may_run(self, call: ModuleCall) -> bool:
        forward = call.model_forward
        return not call.is_past and self._forwards.may_run(forward, has_begun=call.started, has_run=call.has_run)

    def complete(self, unit: Unit) -> None:
        """Record that every trainable parameter of ``unit`` has its gradient."""
        self._complete_units.add(unit)
        # The last gradient of a unit may arrive after the gradients of its modules' inputs. No later event would then
        # report that these modules are finished.
        for module in unit.modules:
            if module in self._active_calls:
                self._report_finished_units(module)

    def end_backward(self) -> None:
        """Forget the backward that has ended."""
        # A retained graph may have another backward, in which the same calls start again.
        for calls in self._active_calls.values():
            for call in calls:
                call.has_run = call.has_run or not call.is_passed_over
                call.started = False
        self._active_calls.clear()
        self._complete_units.clear()
        self._recomputed_calls.clear()
        self._num_recomputed_before.update(self._num_recomputed)
        self._num_recomputed.clear()
        self._has_backward_ended = True
        for calls_of_module in self._calls_with_graph.values():
            for call in calls_of_module:
                call.is_past = False

    def _start_backward(self, module: nn.Module, call: ModuleCall) -> None:
        # Another output of this call may have received its gradient.
        if call.started and not call.is_passed_over:
            return
        self._order.reach(call)
        self._begin(call, self._units_of[module])

    def pass_over(self, call: ModuleCall) -> None:
        """Do what other ranks do in the backward of ``call``, to which autograd does not come on this rank."""
        # A graph that was not retained has no second backward on any rank.
        if call.started or (call.has_run and not call.model_forward.is_retained):
            return
        # Where other ranks come to several calls, they keep the unit until its gradients are complete.
        units = [unit for unit in self._units_of[call.module] if not (unit.gets_gradients and self._is_active(unit))]
        self._begin(call, units)
        call.is_passed_over = call.is_past = True
        call.pending_inputs.clear()
        for unit in self._units_of[call.module]:
            self._report_if_past(unit)
        self._report_finished_units(call.module)

    def _is_active(self, unit: Unit) -> bool:
        return any(module in self._active_calls for module in unit.modules)

    def _begin(self, call: ModuleCall, units: Iterable[Unit]) -> None:
        call.start()
        self._pre_backward(call.module, units)
        self._active_calls.setdefault(call.module, []).append(call)
        for unit in self._units_of[call.module]:
            # All parameters may be frozen at the moment, and then no gradient will arrive.
            if unit.is_releasable and unit.trainable and not unit.gets_gradients:
                self._complete_units.add(unit)

    def _last_node_ran(self, module: nn.Module, call: ModuleCall, index: int) -> None:
        # A loss of a tensor inside a call may skip the call's outputs, which then get no gradient.
        if not call.started:
            return
        call.pending_nodes[index] -= 1
        if not call.pending_nodes[index]:
            self._input_done(module, call, index)

    def _reached_input(self, module: nn.Module, call: ModuleCall, index: int) -> None:
        """Record that autograd has come to the node that made an input of ``call``: the call is past."""
        self._input_done(module, call, index)
        call.is_past = True
        for unit in self._units_of[module]:
            self._report_if_past(unit)

    def _report_if_past(self, unit: Unit) -> None:
        if unit not in self._complete_units and self.is_past(unit):
            self._unit_past(unit)

    def _input_done(self, module: nn.Module, call: ModuleCall, index: int) -> None:
        """Record that ``call`` adds no more to the gradient of one of its inputs."""
        call.pending_inputs.discard(index)
        if not call.pending_inputs:
            self._report_finished_units(module)

    def _report_finished_units(self, module: nn.Module) -> None:
        for unit in self._units_of[module]:
            # Several modules may use one unit, as with tied weights, and all of those in this backward must finish.
            # A module whose backward has not begun does not count, because its backward will gather the unit again.
            active = [user for user in unit.modules if user in self._active_calls]
            if unit.is_releasable and all(self._is_backward_over(user) for user in active):
                self._post_backward(unit)

    def _is_backward_over(self, module: nn.Module) -> bool:
        """Return whether operations of ``module``'s backward are unlikely to read a weight again."""
        if any(call.pending_inputs for call in self._active_calls[module]):
            return False
        return all(unit in self._complete_units for unit in self._units_of[module] if unit.trainable)


def last_nodes(inputs: Sequence[torch.Tensor | GradientEdge], outputs: Sequence[torch.Tensor]) -> list[set[Node]]:
    """Return, for each of ``inputs``, the nodes that add to its gradient in a backward from ``outputs``.

    When these have run, every node of the call that leads to the input has run. The set is empty if the call does not
    read the input, and all sets are empty if the call's graph has more than ``MAX_NODES`` nodes.
    """
    nodes_before: dict[tuple[Node | None, int], set[Node]] = {_edge(tensor): set() for tensor in inputs}
    edges = [_edge(tensor) for tensor in outputs]
    visited: set[Node] = set()
    while edges:
        edge = edges.pop()
        node = edge[0]
        # The walk stops at the inputs, because the nodes behind them belong to other calls.
        if node is None or node in visited or edge in nodes_before:
            continue
        visited.add(node)
        if len(visited) > MAX_NODES:
            return [set() for _ in inputs]
        for next_edge in node.next_functions:
            if next_edge in nodes_before:
                nodes_before[next_edge].add(node)
            else:
                edges.append(next_edge)
    return [nodes_before[_edge(tensor)] for tensor in inputs]


def _edge(tensor: torch.Tensor | GradientEdge) -> tuple[Node | None, int]:
    edge = get_gradient_edge(tensor) if isinstance(tensor, torch.Tensor) else tensor
    return edge.node, edge.output_nr
