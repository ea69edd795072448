"""Gathers units just before a module needs them and releases them just after.

[Note: Backward]
A holder's outputs carry a hook: when the first of their gradients is there, the holder's units are
gathered. They are released when every trainable parameter of theirs has its gradient and the gradients of
the holder's inputs are done, for until then some operation may still read a weight. What never gets that
far (unused parameters) is released when the backward ends.
An input that several calls took, such as an encoder's output by each decoder block, has its gradient only when
all of their backwards are through: there the last nodes of the call's own graph tell instead.

Hooks cannot tell when the last read is where a parameter is used outside of its holders, where a holder's
output is in a container that nobody can look into, where the backward is itself differentiated, and inside of
torch.func, whose backwards are none of ours. Such units are *pinned*: they stay whole until the backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import Transport, span
from ..errors import ReleasedParameterError, ZeroEngineError
from .calls import Call, Hook
from .eager import eager, untransformed
from .graph import last_nodes
from .tree import may_hide_tensors, tensors_in
from .unit import State, Unit

Place = tuple[bool, "Unit", int]  # in backward, a unit, its how-manieth visit


class Gatherer:
    """Owns when units are whole. Knows parameters only.

    Args:
        prefetch_numel: elements that may be gathered ahead of use.
        max_live_numel: elements of released units that may be whole at one time before prefetching stops.
        entering_backward: called at the first sign of a backward, once or more in each.
        abandon_backward: called where no backward can be under way, for it may have raised.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[Unit],
        transport: Transport,
        *,
        prefetch_numel: int,
        max_live_numel: int,
        entering_backward: Callable[[], None],
        abandon_backward: Callable[[], None],
    ) -> None:
        self._units = list(units)
        self._transport, self._channel = transport, transport.gather
        stored = any(unit.stored is not None for unit in self._units)
        self._prefetch_numel = prefetch_numel if transport.overlaps or stored else 0
        self._max_live_numel = max_live_numel
        self._entering_backward, self._abandon_backward = entering_backward, abandon_backward
        self._held: dict[Unit, int] = dict.fromkeys(self._units, 0)  # forwards, `gathered` and pins in progress
        self.lent = 0  # units in `gathered`: ranks may run different forwards, so no order is learnt or followed
        self._running = 0  # forwards of the whole model in progress
        self._backward = False
        self._create_graph = False  # whether the backward in progress will itself be differentiated
        self._strays: list[Unit] = []  # used outside of their holders, without gradients
        self._pinned: list[Unit] = []
        self._entered: dict[nn.Module, list[Call | None]] = {}  # forwards of holders in progress
        self._calls: dict[nn.Module, list[Call]] = {}
        self._taken: Any = WeakIdKeyDictionary()  # tensors that some call had as an input
        self._complete: set[Unit] = set()
        self._next: dict[Place, Place] = {}  # what came after each place the last time
        self._visits: dict[Unit, int] = {}  # in this forward or backward
        self._previous: Place | None = None
        self._last_in_forward: Unit | None = None
        self._holders: dict[nn.Module, list[Unit]] = {}
        for unit in self._units:
            for module in unit.holders:
                self._holders.setdefault(module, []).append(unit)
        self._model = model
        self._handles = self._hook(model)
        for unit in self._units:
            if unit.transient:
                unit.release(self._resolve)

    def _hook(self, model: nn.Module) -> list[Any]:
        me = weakref.ref(self)

        def bind(name: str) -> Callable[..., Any]:
            @eager
            def hook(module: nn.Module, *args: Any) -> Any:
                gatherer = me()
                if gatherer is not None and (module is gatherer._model or module in gatherer._holders):
                    getattr(gatherer, name)(module, *args)  # else a copy of the model, which took the hooks along

            return hook

        def away(unit: Unit) -> bool:
            return unit.transient or unit.degrees.optimizer > unit.degrees.parameters

        needing = {module: units for module, units in self._holders.items() if any(map(away, units))}
        for module in (model, *needing):
            if isinstance(module, torch.jit.ScriptModule):
                raise ZeroEngineError(
                    f"torch allows no hooks on a ScriptModule, such as {module.original_name} here: pass the model as "
                    "it was before torch.jit. torch.compile serves instead."
                )
        handles = [
            model.register_forward_pre_hook(bind("_enter_model"), prepend=True),
            model.register_forward_hook(bind("_leave_model"), always_call=True),
        ]
        for module, units in needing.items():
            before, after = bind("_before_forward"), bind("_after_forward")
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            if any(unit.transient for unit in units):
                handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        return handles

    # -- whole units ------------------------------------------------------------------------------

    def start(self, unit: Unit) -> None:
        """Issues the gather of a released unit."""
        if unit.state is State.RELEASED:
            with untransformed(), span("gather", unit.name):
                unit.gather()

    def ensure(self, unit: Unit) -> None:
        """Returns with ``unit`` ready."""
        if unit.state is State.READY:
            return
        self.start(unit)
        assert unit.work is not None
        with untransformed(), span("await", unit.name):
            unit.work.wait()
            unit.expose()

    def refresh(self, unit: Unit) -> None:
        """After a publish: issues the gather of a unit that is never released. Awaited at its next use."""
        unit.guard(self._resolve)
        with span("gather", unit.name):
            unit.work = self._channel.all_gather(unit.full, unit.owned(unit.degrees.optimizer), unit.name)

    def settle(self) -> None:
        """Before a step: returns with no gather under way, every transient unit that nobody holds released."""
        self._let_pinned_go()
        for unit in self._units:
            if unit.state is State.GATHERING:
                self.ensure(unit)
            unit.check()
            self._release(unit)
            if unit.stored is not None:
                unit.stored.forget()

    def hold(self, unit: Unit) -> None:
        self._held[unit] += 1
        self.lent += 1
        self.ensure(unit)

    def let_go(self, unit: Unit) -> None:
        self._held[unit] -= 1
        self.lent -= 1
        self._release(unit)

    def _pin(self, unit: Unit) -> None:
        """Keeps ``unit`` whole until the backward has ended, or the next step where there is none."""
        if unit not in self._pinned:
            self._pinned.append(unit)
            self._held[unit] += 1

    def _let_pinned_go(self) -> None:
        pinned, self._pinned = self._pinned, []
        for unit in pinned:
            self._held[unit] -= 1
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        if unit.transient and unit.state is State.READY and not self._held[unit]:
            unit.release(self._resolve)

    def _resolve(self, param: nn.Parameter, use: str) -> None:
        """A parameter is used while it is away: see ``released``."""
        unit = next(u for u in self._units if any(p is param for p in u.params))
        if unit.transient:
            if not (self._running or self._backward):
                slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
                raise ReleasedParameterError(
                    f"parameter {slot.name} {slot.shape} is partitioned and released: `{use}` needs its values. Write "
                    "`with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                    "engine.full_state_dict() to copy all of them."
                )
            if self._backward or torch.is_grad_enabled():
                self._pin(unit)
            else:
                self._strays.append(unit)
        self.ensure(unit)

    # -- forward ----------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        if not self._running and torch._C._current_graph_task_id() < 0:  # else inside a backward
            self._abandon_backward()
        if not (self._running or self._backward or self.lent):
            self._start_pass()
        self._running += 1

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running -= 1
        if not self._running:
            if not (self._backward or self.lent):
                self._last_in_forward = self._previous[1] if self._previous is not None else None
                self._end_pass()
            self._let_strays_go()

    def _start_pass(self) -> None:
        self._previous = None
        self._visits.clear()

    def _end_pass(self) -> None:
        if self._previous is not None:
            self._next.pop(self._previous, None)

    def _let_strays_go(self) -> None:
        strays, self._strays = self._strays, []
        for unit in strays:
            self._release(unit)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        transient = False
        for unit in self._holders[module]:
            if unit.transient:
                transient = True
                self._held[unit] += 1
            self._need(unit)
        if transient:
            watched = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            call = self._watch_inputs(module, (args, kwargs)) if watched else None
            self._entered.setdefault(module, []).append(call)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        units = [unit for unit in self._holders[module] if unit.transient]
        if not units:
            return
        call = self._entered[module].pop() if self._entered.get(module) else None
        will_differentiate = call is not None and torch.is_grad_enabled() and self._watch_outputs(module, call, output)
        if torch.is_grad_enabled() and not (will_differentiate or self._backward):
            if may_hide_tensors(output) or torch._C._are_functorch_transforms_active():
                for unit in units:
                    self._pin(unit)
        for unit in units:
            self._held[unit] -= 1
            if not self._backward and not (will_differentiate and unit is self._last_in_forward):
                self._release(unit)

    def _need(self, unit: Unit) -> None:
        """``ensure``, and start what came next the last time."""
        self.ensure(unit)
        if self.lent or not unit.transient or not (self._running or self._backward):
            return
        if self._previous is None or self._previous[1] is not unit:
            self._visits[unit] = self._visits.get(unit, 0) + 1
            place = (self._backward, unit, self._visits[unit])
            if self._previous is not None:
                self._next[self._previous] = place
            self._previous = place
        if self._prefetch_numel:
            self._prefetch()

    def _prefetch(self) -> None:
        """Starts what comes next, up to the bounds on elements; the very next unit however large it is."""
        live = sum(u.layout.numel for u in self._units if u.transient and not u.released)
        ahead: dict[Unit, None] = {}
        following = self._previous
        for _ in range(len(self._next)):  # at most once round, should the order have a cycle
            following = self._next.get(following) if following is not None else None
            if following is None:
                break
            unit = following[1]
            ahead[unit] = None
            live += unit.layout.numel if unit.released else 0
            far = len(ahead) > 1 and sum(u.layout.numel for u in ahead) > self._prefetch_numel
            if far or live > self._max_live_numel:
                break
            if unit.released:
                if self._transport.overlaps if unit.stored is None else unit.stored.gathers_ahead:
                    self.start(unit)
                elif unit.stored is not None:
                    unit.stored.ahead(unit.shard)

    # -- backward ---------------------------------------------------------------------------------

    def _watch_inputs(self, module: nn.Module, inputs: Any) -> Call:
        """Puts hooks on what goes in, before the forward may change it in place: they are of the values until then."""
        before = [t for t in tensors_in(inputs) if t.requires_grad]
        # Completeness says nothing of frozen units: without an input to go by they wait for the backward's end.
        call = Call(len(before) or any(not unit.trainable for unit in self._holders[module]))
        if any(tensor in self._taken for tensor in before):
            call.edges = [get_gradient_edge(tensor) for tensor in before]
        for index, tensor in enumerate(before):
            tensor.register_hook(Hook(self, Gatherer._passed, module, call, index))
            self._taken[tensor] = True
        return call

    def _watch_outputs(self, module: nn.Module, call: Call, output: Any) -> bool:
        """Puts hooks on what comes out; whether a backward can pass here."""
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        for tensor in outputs:
            tensor.register_hook(Hook(self, Gatherer._before_backward, module, call))
        edges, call.edges = call.edges, []  # they keep the graph
        for index, nodes in enumerate(last_nodes(edges, outputs) if outputs and edges else []):
            call.nodes[index] = len(nodes)
            for node in nodes:
                node.register_hook(Hook(self, Gatherer._ran, module, call, index))
        return bool(outputs)

    def _before_backward(self, module: nn.Module, call: Call) -> None:
        if call.started:
            return
        call.start()
        if not self._backward:
            self._backward = True
            self._start_pass()
            self._entering_backward()
        self._calls.setdefault(module, []).append(call)
        self._create_graph = self._create_graph or torch.is_grad_enabled()
        for unit in self._holders[module]:
            if unit.transient:
                self._need(unit)
                if self._create_graph:
                    self._pin(unit)
                if unit.trainable and not any(param.requires_grad for param in unit.params):
                    self._complete.add(unit)  # frozen for now: no gradient will come

    def complete(self, unit: Unit) -> None:
        """Every trainable parameter of ``unit`` has its gradient."""
        self._complete.add(unit)
        for module in unit.holders:
            if module in self._calls:
                self._after_backward(module)

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
            if unit.transient and all(self._is_through(holder) for holder in unit.holders if holder in self._calls):
                self._release(unit)

    def _is_through(self, module: nn.Module) -> bool:
        """Whether no operation of ``module``'s backward can still read a weight."""
        if any(call.inputs_left for call in self._calls[module]):
            return False
        return all(unit in self._complete for unit in self._holders[module] if unit.trainable)

    def end_backward(self) -> None:
        """The backward is over: everything that was gathered for it is released."""
        if self._backward:
            self._end_pass()
        self._backward = False
        for calls in self._calls.values():
            for call in calls:
                call.started = False  # the graph may be retained
        self._calls.clear()
        self._complete.clear()
        self._let_strays_go()
        if not self._create_graph:  # else the next backward reads the weights again
            self._let_pinned_go()
        self._create_graph = False
        for unit in self._units:
            self._release(unit)
