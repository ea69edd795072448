"""Gathers units just before a module needs them and releases them just after.

[Note: Hooks are hints]
Hooks on modules, and on the tensors that go in and come out, say when a unit is about to be needed and when it may be
released. What is computed does not depend on them:
- A use of a released parameter calls ``_resolve``, for its class tells (``released.py``). A read in backward of what
  the graph saved of one calls ``_read_saved`` (see the note in ``saved_views.py``). Both gather the unit.
- Memory that somebody shares is not freed (``Unit.is_shared``). That is *put off*, and tried again whenever a module or
  a pass ends. If the memory is still shared at the next step it is left to those who share it.

In backward a unit is gathered when the first gradient of its holder's outputs is there, and released as ``calls.py``
says. What never gets that far (unused parameters) is released when the backward ends.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.runtime.autograd_tracking import Call, CallTracker, queue_callback
from zeroengine.runtime.backward_tracker import BackwardListener, BackwardTracker
from zeroengine.runtime.saved_views import SavedView, current_sequence_number, replace_saved_views
from zeroengine.runtime.unit import State, Unit
from zeroengine.runtime.visit_order import VisitOrder
from zeroengine.utils.compiler_disable import eager, unrecorded, untransformed
from zeroengine.utils.profiling import profile_range
from zeroengine.utils.tensor_tree import tensors_in

log = logging.getLogger("zeroengine")


class RunningForward(NamedTuple):
    """The forward of a holder in progress."""

    module: nn.Module
    units: list[Unit]  # that stay gathered meanwhile
    call: Call | None  # None: no backward will pass
    first_sequence_number: int  # of the graph's nodes that this forward makes


class Gatherer(BackwardListener):
    """Owns when units are whole. Knows parameters only.

    Args:
        prefetch_numel: elements that may be gathered ahead of use.
        max_live_numel: elements of released units that may be whole at one time before prefetching stops.
        backward: Tells when a backward fails and when a unit has all its gradients; learns of forwards from here.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[Unit],
        transport: Transport,
        *,
        prefetch_numel: int,
        max_live_numel: int,
        backward: BackwardTracker,
    ) -> None:
        self._units = list(units)
        self._transport, self._channel = transport, transport.gather
        stored = any(unit.offloaded_shards is not None for unit in self._units)
        self._prefetch_numel = prefetch_numel if transport.overlaps or stored else 0
        self._max_live_numel = max_live_numel
        self._live_numel = sum(unit.layout.numel for unit in self._units if unit.transient)  # not released
        self._backward = backward
        self._num_user_gathered: dict[Unit, int] = dict.fromkeys(self._units, 0)  # by ``gathered``
        self.lent = 0  # units in `gathered`: ranks may run different forwards, so no order is learnt or followed
        self._running = 0  # forwards of the whole model in progress
        self._forwards: list[RunningForward] = []
        self._graph_tasks: list[int] = []  # autograd's numbers of the backwards in progress, the outermost first
        self._unhooked: dict[Unit, None] = {}  # gathered for a use that no hook announced; released when the pass ends
        self._put_off: dict[Unit, None] = {}  # to release as soon as nobody shares their memory
        self._kept_by_hooks: set[Unit] = set()  # units of which a graph keeps a parameter by hooks of the user's
        self._announced: set[Unit] = set()  # units of which it was said that they are put off
        self._order = VisitOrder()
        self._last_in_forward: Unit | None = None
        self._holders: dict[nn.Module, list[Unit]] = {}
        for unit in self._units:
            for module in unit.holders:
                self._holders.setdefault(module, []).append(unit)
        owner = weakref.ref(self)
        self._calls = CallTracker(
            self._holders, partial(_call, owner, "_before_backward"), partial(_call, owner, "_after_backward")
        )
        self._read_saved_view = partial(_call, owner, "_read_saved")
        self._first_sequence_number = 0  # of the graph that the model's forward in progress makes
        self._model = model
        self._handles = self._hook(model)
        for unit in self._units:
            if unit.transient:
                self._mark_released(unit)  # it was built without memory in its full buffer
        backward.subscribe(self)

    def _hook(self, model: nn.Module) -> list[Any]:
        me = weakref.ref(self)

        def bind(name: str) -> Callable[..., Any]:
            @eager
            def hook(module: nn.Module, *args: Any) -> Any:
                gatherer = me()
                if gatherer is not None and (module is gatherer._model or module in gatherer._holders):
                    with unrecorded():
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
            with untransformed(), profile_range("gather", unit.name):
                unit.gather()
            self._live_numel += unit.layout.numel

    def ensure(self, unit: Unit) -> None:
        """Returns with ``unit`` ready."""
        if unit.state is State.READY:
            return
        self.start(unit)
        assert unit.work is not None
        with untransformed(), profile_range("await", unit.name):
            unit.work.wait()
            unit.expose()

    def refresh(self, unit: Unit) -> None:
        """After a publish: issues the gather of a unit that is never released. Awaited at its next use."""
        unit.guard(self._resolve)
        with profile_range("gather", unit.name):
            unit.work = self._channel.all_gather(unit.full, unit.owned(unit.degrees.optimizer), unit.name)

    def publish_update(self, unit: Unit) -> None:
        """Let all ranks compute with the updated parameters of ``unit``. Call it on every rank, in the units' order."""
        # Autograd then refuses a backward through a graph that saved the values of before.
        torch.autograd.graph.increment_version(unit.params)
        if unit.degrees.optimizer > unit.degrees.parameters:
            self.refresh(unit)

    def wait_for_peer_reads(self) -> None:
        """Return when no rank reads the parameters of another one any more, where the transport does not overlap."""
        # Nothing is gained by not waiting there, and peers read this rank's parameters in place.
        if not self._transport.overlaps:
            self.settle()
            self._transport.fence()

    def settle(self, *, before_update: bool = False) -> None:
        """Before a step: return with no gather under way, and every unit released that the user has not gathered.

        No forward is in progress: what one left behind that ended without a word, by Ctrl-C, is forgotten. Whoever
        still shares the memory of a unit keeps that memory and its present values.
        """
        if before_update:
            self._kept_by_hooks.clear()
        self.abandon_forward()
        for unit in self._units:
            if unit.state is State.GATHERING:
                self.ensure(unit)
            unit.check()
            self._release(unit)
            if unit in self._put_off and unit.released and unit not in self._kept_by_hooks:
                self._announce_put_off()
                unit.leave_full_buffer()
                del self._put_off[unit]
            if unit.offloaded_shards is not None:
                unit.offloaded_shards.discard_prefetched()

    def hold(self, unit: Unit) -> None:
        self.ensure(unit)
        self._num_user_gathered[unit] += 1
        self.lent += 1

    def let_go(self, unit: Unit) -> None:
        self._num_user_gathered[unit] -= 1
        self.lent -= 1
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        """Release ``unit`` unless it is in use, and free its full buffer unless somebody shares the memory.

        Whether anybody does is a matter of this rank alone: the next use gathers the unit again in any case, so that
        the ranks agree on their collectives.
        """
        if not unit.transient or unit.state is not State.READY or self._num_user_gathered[unit]:
            return
        if any(unit in forward.units for forward in self._forwards):
            return
        self._mark_released(unit)
        if unit in self._kept_by_hooks or unit.is_shared:
            self._put_off[unit] = None
        else:
            self._put_off.pop(unit, None)
            unit.free_full_buffer()

    def _mark_released(self, unit: Unit) -> None:
        self._live_numel -= unit.layout.numel
        unit.release(self._resolve)

    def put_off(self) -> list[Unit]:
        """Return the units whose full buffers are not freed because somebody shares their memory."""
        self._release_put_off()
        return list(self._put_off)

    def _release_put_off(self) -> None:
        for unit in list(self._put_off):
            if unit.released and unit not in self._kept_by_hooks and not unit.is_shared:
                del self._put_off[unit]
                unit.free_full_buffer()

    def _release_unhooked(self) -> None:
        units, self._unhooked = self._unhooked, {}
        for unit in units:
            self._release(unit)
        self._release_put_off()

    def _announce_put_off(self) -> None:
        """Say once of each unit that it is put off."""
        units = [unit for unit in self._put_off if unit not in self._announced]
        if not units:
            return
        self._announced.update(units)
        size = sum(unit.gathered_bytes() for unit in units) / 2**20
        names = ", ".join(unit.name for unit in units[:3]) + (f" and {len(units) - 3} more" if len(units) > 3 else "")
        log.warning(
            "%.1f MiB of parameters stay gathered for now (%s): a tensor shares their memory, such as a view or "
            ".detach() that is kept, or a graph. engine.memory() counts them. Keep a copy, such as "
            "weight.detach().clone(); a tensor that shares their memory at the next step keeps the old values.",
            size,
            names,
        )

    def _resolve(self, param: nn.Parameter, use: str) -> None:
        """A parameter is used while it is away: see ``released``."""
        unit = next(u for u in self._units if any(p is param for p in u.params))
        if unit.transient and unit.state is State.RELEASED:
            in_backward = self._enter_backward()
            if not (self._running or in_backward):
                slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
                raise ReleasedParameterError(
                    f"parameter {slot.name} {slot.shape} is partitioned and released: `{use}` needs its values. Write "
                    "`with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                    "engine.full_state_dict() to copy all of them."
                )
        if unit.transient:
            self._unhooked[unit] = None
        with unrecorded():
            self.ensure(unit)

    @eager
    def _read_saved(self, view: SavedView) -> torch.Tensor:
        """Backward reads what the graph saved of a parameter."""
        unit = view.unit
        with untransformed():
            if unit.state is not State.READY:
                if not (self._enter_backward() or self._running):
                    raise ReleasedParameterError(
                        f"what the graph saved of a parameter of unit {unit.name} is looked at outside of a backward, "
                        "where ranks need not come by: write `with zeroengine.gathered(module_or_params):` around it"
                    )
                self._unhooked[unit] = None
                self.ensure(unit)
            return view.restore()

    # -- forward ----------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        if not self._enter_backward():
            if not self._running:
                self.abandon_backward()
                self._backward.enter_forward()
                self._release_put_off()
            if not (self._running or self.lent):
                self._order.start_pass()
        if not self._running:
            self._first_sequence_number = current_sequence_number()
        self._running += 1

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running = max(0, self._running - 1)
        if self._running:
            return
        if not (self._graph_tasks or self.lent):
            self._last_in_forward = self._order.last
            self._order.end_pass()
        if not self._graph_tasks:
            self._replace_saved(output, self._first_sequence_number, [*self._unhooked, *self._put_off])
        self._release_unhooked()
        if not self._graph_tasks:
            self._announce_put_off()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the whole model: torch runs none of its hooks when Ctrl-C ends it."""
        outermost = not self._running
        try:
            yield
        except BaseException:
            if outermost:
                self.abandon_forward()
            raise

    def abandon_forward(self) -> None:
        """Forget forwards that ended without a word. Call it where none can be in progress."""
        self._running = 0
        self._forwards.clear()
        self._release_unhooked()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter_backward()  # a checkpoint computes again within one
        units = [unit for unit in self._holders[module] if unit.transient]
        for unit in self._holders[module]:
            self._need(unit)
        if units:
            watched = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            call = self._calls.watch_inputs(module, (args, kwargs)) if watched else None
            self._forwards.append(RunningForward(module, units, call, current_sequence_number()))

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        depth = next((i for i in reversed(range(len(self._forwards))) if self._forwards[i].module is module), None)
        if depth is None:
            return  # somebody's hook raised before ours
        forward = self._forwards[depth]
        del self._forwards[depth:]  # those above it ended without a word
        passes = False
        if forward.call is not None and torch.is_grad_enabled():
            passes = self._calls.watch_outputs(module, forward.call, output)
            if passes and not self._graph_tasks:  # else backward follows at once
                self._replace_saved(output, forward.first_sequence_number, forward.units)
        for unit in forward.units:
            if not self._graph_tasks and not (passes and unit is self._last_in_forward):
                self._release(unit)
        self._release_put_off()

    def _replace_saved(self, output: Any, first_sequence_number: int, units: list[Unit]) -> None:
        with_values = [unit for unit in units if unit.ready or unit in self._put_off]
        self._kept_by_hooks |= replace_saved_views(
            tensors_in(output), first_sequence_number, with_values, self._read_saved_view
        )

    def _need(self, unit: Unit) -> None:
        """``ensure``, and start what came next the last time."""
        self.ensure(unit)
        if self.lent or not unit.transient or not (self._running or self._graph_tasks):
            return
        self._order.visit(unit, bool(self._graph_tasks))
        if self._prefetch_numel:
            self._prefetch()

    def _prefetch(self) -> None:
        """Starts what comes next, up to the bounds on elements; the very next unit however large it is."""
        live_numel, ahead_numel = self._live_numel, 0
        ahead: set[Unit] = set()
        for unit in self._order.upcoming():
            numel = unit.layout.numel
            if unit not in ahead:
                ahead.add(unit)
                ahead_numel += numel
            live_numel += numel if unit.released else 0
            far = len(ahead) > 1 and ahead_numel > self._prefetch_numel
            if far or live_numel > self._max_live_numel:
                break
            if unit.released:
                shards = unit.offloaded_shards
                if self._transport.overlaps if shards is None else shards.can_gather_ahead:
                    self.start(unit)
                elif shards is not None:
                    shards.prefetch(unit.shard)

    # -- backward ---------------------------------------------------------------------------------

    def _enter_backward(self) -> bool:
        """Return whether a backward is in progress, and note the one that is."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task < 0:
            return False
        if graph_task not in self._graph_tasks:
            if not self._graph_tasks:
                self._order.start_pass()
            self._graph_tasks.append(graph_task)
            queue_callback(partial(self._graph_task_ended, graph_task))
        return True

    def _graph_task_ended(self, graph_task: int) -> None:
        if graph_task in self._graph_tasks:
            del self._graph_tasks[self._graph_tasks.index(graph_task) :]  # those within it that raised, too
            if not self._graph_tasks:
                self._end_backward()

    def fail_backward(self, after_others: bool) -> None:
        """Release what was gathered for a backward that raised."""
        self.abandon_backward()

    def abandon_backward(self) -> None:
        """Forget backwards that raised. Call it where none can be in progress."""
        if self._graph_tasks:
            self._graph_tasks.clear()
            self._end_backward()

    def _before_backward(self, module: nn.Module) -> None:
        """The backward of a call of ``module`` begins."""
        self._enter_backward()
        for unit in self._holders[module]:
            if unit.transient:
                self._need(unit)

    def unit_complete(self, unit: Unit) -> None:
        """Release ``unit`` if it was gathered for a use that no hook announced: its gradients are complete."""
        self._calls.complete(unit)
        if unit in self._unhooked and not self._running:
            del self._unhooked[unit]
            self._release(unit)

    def _after_backward(self, unit: Unit) -> None:
        """No call that holds ``unit`` is likely to read it any more."""
        self._release(unit)
        self._release_put_off()

    def _end_backward(self) -> None:
        """The backward is over: everything that was gathered for it is released."""
        self._order.end_pass()
        self._calls.end_backward()
        if not self._running:  # else it was one within a forward, as of torch.autograd.grad
            self._release_unhooked()
        for unit in self._units:
            if unit not in self._unhooked:
                self._release(unit)
        if not self._running:
            self._announce_put_off()


def _call(owner: weakref.ref[Gatherer], name: str, argument: Any) -> Any:
    gatherer = owner()
    if gatherer is None:
        raise ZeroEngineError("this backward needs parameters of an engine that is gone: keep the engine until it ends")
    return getattr(gatherer, name)(argument)
