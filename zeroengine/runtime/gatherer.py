"""Gathers units just before a module needs them and releases them just after.

[Note: Hooks are hints]
Hooks on modules, and on the tensors that go in and come out, say when a unit is about to be needed and when it may be
released. What is computed does not depend on them:
- A use of a released parameter calls ``_gather_for_use`` through its class (see ``released_parameter.py``). A backward
  that reads a saved view of one calls ``_restore_saved_view`` (see the note in ``saved_views.py``). Both gather it.
- A full buffer that other tensors alias is not freed (``Unit.is_aliased``). Its free is *deferred*: tried again when
  a module or a pass ends. If the buffer is still aliased at the next step, the unit takes a new one.

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
from zeroengine.runtime.unit import GatherState, Unit
from zeroengine.runtime.visit_order import VisitOrder
from zeroengine.utils.compiler_disable import disable_compile, hidden_from_checkpoint, outside_torch_func
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
        self._live_numel = sum(unit.layout.numel for unit in self._units if unit.releasable)  # not released
        self._backward = backward
        self._user_pins: dict[Unit, int] = dict.fromkeys(self._units, 0)  # by ``gathered``
        # Units inside `gathered`. Ranks may run different forwards meanwhile, so no order is learnt or followed.
        self.num_user_gathered = 0
        self._num_model_forwards = 0  # forwards of the whole model in progress
        self._module_forwards: list[RunningForward] = []
        self._graph_tasks: list[int] = []  # autograd's numbers of the backwards in progress, the outermost first
        # Units that were gathered for a use that no hook announced. They are released when the pass ends.
        self._unhooked_uses: dict[Unit, None] = {}
        self._deferred_frees: dict[Unit, None] = {}  # to release as soon as nobody shares their memory
        self._saved_by_user_hooks: set[Unit] = set()  # units of which a graph keeps a parameter by hooks of the user's
        self._warned_of: set[Unit] = set()  # units of which it was said that they are put off
        self._order = VisitOrder()
        self._last_in_forward: Unit | None = None
        self._holders: dict[nn.Module, list[Unit]] = {}
        for unit in self._units:
            for module in unit.modules:
                self._holders.setdefault(module, []).append(unit)
        owner = weakref.ref(self)
        self._calls = CallTracker(
            self._holders, partial(_call, owner, "_pre_backward"), partial(_call, owner, "_post_backward")
        )
        self._restore_view = partial(_call, owner, "_restore_saved_view")
        self._first_sequence_number = 0  # of the graph that the model's forward in progress makes
        self._model = model
        self._handles = self._hook(model)
        for unit in self._units:
            if unit.releasable:
                self._mark_released(unit)  # it was built without memory in its full buffer
        backward.subscribe(self)

    def _hook(self, model: nn.Module) -> list[Any]:
        me = weakref.ref(self)

        def bind(name: str) -> Callable[..., Any]:
            @disable_compile
            def hook(module: nn.Module, *args: Any) -> Any:
                gatherer = me()
                if gatherer is not None and (module is gatherer._model or module in gatherer._holders):
                    with hidden_from_checkpoint():
                        getattr(gatherer, name)(module, *args)  # else a copy of the model, which took the hooks along

            return hook

        def away(unit: Unit) -> bool:
            return unit.releasable or unit.degrees.optimizer > unit.degrees.parameters

        needing = {module: units for module, units in self._holders.items() if any(map(away, units))}
        for module in (model, *needing):
            if isinstance(module, torch.jit.ScriptModule):
                raise ZeroEngineError(
                    f"torch allows no hooks on a ScriptModule, such as {module.original_name} here: pass the model as "
                    "it was before torch.jit. torch.compile serves instead."
                )
        handles = [
            model.register_forward_pre_hook(bind("_pre_model_forward"), prepend=True),
            model.register_forward_hook(bind("_post_model_forward"), always_call=True),
        ]
        for module, units in needing.items():
            before, after = bind("_pre_forward"), bind("_post_forward")
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            if any(unit.releasable for unit in units):
                handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        return handles

    # -- whole units ------------------------------------------------------------------------------

    def start_gather(self, unit: Unit) -> None:
        """Issues the gather of a released unit."""
        if unit.state is GatherState.RELEASED:
            with outside_torch_func(), profile_range("gather", unit.name):
                unit.start_gather()
            self._live_numel += unit.layout.numel

    def ensure_gathered(self, unit: Unit) -> None:
        """Returns with ``unit`` ready."""
        if unit.state is GatherState.GATHERED:
            return
        self.start_gather(unit)
        assert unit.gather_work is not None
        with outside_torch_func(), profile_range("await", unit.name):
            unit.gather_work.wait_stream()
            unit.finish_gather()

    def all_gather_updated(self, unit: Unit) -> None:
        """After a publish: issues the gather of a unit that is never released. Awaited at its next use."""
        unit.mark_stale(self._gather_for_use)
        with profile_range("gather", unit.name):
            unit.gather_work = self._channel.all_gather(
                unit.full_buffer, unit.shard_of_degree(unit.degrees.optimizer), unit.name
            )

    def publish_update(self, unit: Unit) -> None:
        """Let all ranks compute with the updated parameters of ``unit``. Call it on every rank, in the units' order."""
        # Autograd then refuses a backward through a graph that saved the values of before.
        torch.autograd.graph.increment_version(unit.params)
        if unit.degrees.optimizer > unit.degrees.parameters:
            self.all_gather_updated(unit)

    def wait_for_peer_reads(self) -> None:
        """Return when no rank reads the parameters of another one any more, where the transport does not overlap."""
        # Nothing is gained by not waiting there, and peers read this rank's parameters in place.
        if not self._transport.overlaps:
            self.finish_gathers_and_release()
            self._transport.fence()

    def finish_gathers_and_release(self, *, before_update: bool = False) -> None:
        """Before a step: return with no gather under way, and every unit released that the user has not gathered.

        No forward is in progress: what one left behind that ended without a word, by Ctrl-C, is forgotten. Whoever
        still shares the memory of a unit keeps that memory and its present values.
        """
        if before_update:
            self._saved_by_user_hooks.clear()
        self.abandon_forward()
        for unit in self._units:
            if unit.state is GatherState.GATHERING:
                self.ensure_gathered(unit)
            unit.check_parameters()
            self._release(unit)
            if unit in self._deferred_frees and unit.is_released and unit not in self._saved_by_user_hooks:
                self._warn_of_deferred_frees()
                unit.replace_full_buffer()
                del self._deferred_frees[unit]
            if unit.offloaded_shards is not None:
                unit.offloaded_shards.discard_prefetched()

    def pin(self, unit: Unit) -> None:
        self.ensure_gathered(unit)
        self._user_pins[unit] += 1
        self.num_user_gathered += 1

    def unpin(self, unit: Unit) -> None:
        self._user_pins[unit] -= 1
        self.num_user_gathered -= 1
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        """Release ``unit`` unless it is in use, and free its full buffer unless somebody shares the memory.

        Whether anybody does is a matter of this rank alone: the next use gathers the unit again in any case, so that
        the ranks agree on their collectives.
        """
        if not unit.releasable or unit.state is not GatherState.GATHERED or self._user_pins[unit]:
            return
        if any(unit in forward.units for forward in self._module_forwards):
            return
        self._mark_released(unit)
        if unit in self._saved_by_user_hooks or unit.is_aliased:
            self._deferred_frees[unit] = None
        else:
            self._deferred_frees.pop(unit, None)
            unit.free_full_buffer()

    def _mark_released(self, unit: Unit) -> None:
        self._live_numel -= unit.layout.numel
        unit.release(self._gather_for_use)

    def deferred_frees(self) -> list[Unit]:
        """Return the units whose full buffers are not freed because somebody shares their memory."""
        self._retry_deferred_frees()
        return list(self._deferred_frees)

    def _retry_deferred_frees(self) -> None:
        for unit in list(self._deferred_frees):
            if unit.is_released and unit not in self._saved_by_user_hooks and not unit.is_aliased:
                del self._deferred_frees[unit]
                unit.free_full_buffer()

    def _release_unhooked_uses(self) -> None:
        units, self._unhooked_uses = self._unhooked_uses, {}
        for unit in units:
            self._release(unit)
        self._retry_deferred_frees()

    def _warn_of_deferred_frees(self) -> None:
        """Say once of each unit that it is put off."""
        units = [unit for unit in self._deferred_frees if unit not in self._warned_of]
        if not units:
            return
        self._warned_of.update(units)
        size = sum(unit.gathered_bytes() for unit in units) / 2**20
        names = ", ".join(unit.name for unit in units[:3]) + (f" and {len(units) - 3} more" if len(units) > 3 else "")
        log.warning(
            "%.1f MiB of parameters stay gathered for now (%s): a tensor shares their memory, such as a view or "
            ".detach() that is kept, or a graph. engine.memory() counts them. Keep a copy, such as "
            "weight.detach().clone(); a tensor that shares their memory at the next step keeps the old values.",
            size,
            names,
        )

    def _gather_for_use(self, param: nn.Parameter, use: str) -> None:
        """A parameter is used while it is away: see ``released``."""
        unit = next(u for u in self._units if any(p is param for p in u.params))
        if unit.releasable and unit.state is GatherState.RELEASED:
            in_backward = self._enter_backward()
            if not (self._num_model_forwards or in_backward):
                slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
                raise ReleasedParameterError(
                    f"parameter {slot.name} {slot.shape} is partitioned and released: `{use}` needs its values. Write "
                    "`with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                    "engine.full_state_dict() to copy all of them."
                )
        if unit.releasable:
            self._unhooked_uses[unit] = None
        with hidden_from_checkpoint():
            self.ensure_gathered(unit)

    @disable_compile
    def _restore_saved_view(self, view: SavedView) -> torch.Tensor:
        """Backward reads what the graph saved of a parameter."""
        unit = view.unit
        with outside_torch_func():
            if unit.state is not GatherState.GATHERED:
                if not (self._enter_backward() or self._num_model_forwards):
                    raise ReleasedParameterError(
                        f"what the graph saved of a parameter of unit {unit.name} is looked at outside of a backward, "
                        "where ranks need not come by: write `with zeroengine.gathered(module_or_params):` around it"
                    )
                self._unhooked_uses[unit] = None
                self.ensure_gathered(unit)
            return view.restore()

    # -- forward ----------------------------------------------------------------------------------

    def _pre_model_forward(self, module: nn.Module, args: Any) -> None:
        if not self._enter_backward():
            if not self._num_model_forwards:
                self.abandon_backward()
                self._backward.enter_forward()
                self._retry_deferred_frees()
            if not (self._num_model_forwards or self.num_user_gathered):
                self._order.start_pass()
        if not self._num_model_forwards:
            self._first_sequence_number = current_sequence_number()
        self._num_model_forwards += 1

    def _post_model_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._num_model_forwards = max(0, self._num_model_forwards - 1)
        if self._num_model_forwards:
            return
        if not (self._graph_tasks or self.num_user_gathered):
            self._last_in_forward = self._order.last
            self._order.end_pass()
        if not self._graph_tasks:
            self._replace_saved(output, self._first_sequence_number, [*self._unhooked_uses, *self._deferred_frees])
        self._release_unhooked_uses()
        if not self._graph_tasks:
            self._warn_of_deferred_frees()

    @contextmanager
    def model_forward(self) -> Iterator[None]:
        """Around a forward of the whole model: torch runs none of its hooks when Ctrl-C ends it."""
        outermost = not self._num_model_forwards
        try:
            yield
        except BaseException:
            if outermost:
                self.abandon_forward()
            raise

    def abandon_forward(self) -> None:
        """Forget forwards that ended without a word. Call it where none can be in progress."""
        self._num_model_forwards = 0
        self._module_forwards.clear()
        self._release_unhooked_uses()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter_backward()  # a checkpoint computes again within one
        units = [unit for unit in self._holders[module] if unit.releasable]
        for unit in self._holders[module]:
            self._gather_and_prefetch(unit)
        if units:
            watched = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            call = self._calls.watch_inputs(module, (args, kwargs)) if watched else None
            self._module_forwards.append(RunningForward(module, units, call, current_sequence_number()))

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        depth = next(
            (i for i in reversed(range(len(self._module_forwards))) if self._module_forwards[i].module is module), None
        )
        if depth is None:
            return  # somebody's hook raised before ours
        forward = self._module_forwards[depth]
        del self._module_forwards[depth:]  # those above it ended without a word
        passes = False
        if forward.call is not None and torch.is_grad_enabled():
            passes = self._calls.watch_outputs(module, forward.call, output)
            if passes and not self._graph_tasks:  # else backward follows at once
                self._replace_saved(output, forward.first_sequence_number, forward.units)
        for unit in forward.units:
            if not self._graph_tasks and not (passes and unit is self._last_in_forward):
                self._release(unit)
        self._retry_deferred_frees()

    def _replace_saved(self, output: Any, first_sequence_number: int, units: list[Unit]) -> None:
        with_values = [unit for unit in units if unit.is_gathered or unit in self._deferred_frees]
        self._saved_by_user_hooks |= replace_saved_views(
            tensors_in(output), first_sequence_number, with_values, self._restore_view
        )

    def _gather_and_prefetch(self, unit: Unit) -> None:
        """``ensure_gathered``, and start what came next the last time."""
        self.ensure_gathered(unit)
        if self.num_user_gathered or not unit.releasable or not (self._num_model_forwards or self._graph_tasks):
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
            live_numel += numel if unit.is_released else 0
            far = len(ahead) > 1 and ahead_numel > self._prefetch_numel
            if far or live_numel > self._max_live_numel:
                break
            if unit.is_released:
                shards = unit.offloaded_shards
                if self._transport.overlaps if shards is None else shards.can_gather_ahead:
                    self.start_gather(unit)
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

    def _pre_backward(self, module: nn.Module) -> None:
        """The backward of a call of ``module`` begins."""
        self._enter_backward()
        for unit in self._holders[module]:
            if unit.releasable:
                self._gather_and_prefetch(unit)

    def unit_complete(self, unit: Unit) -> None:
        """Release ``unit`` if it was gathered for a use that no hook announced: its gradients are complete."""
        self._calls.complete(unit)
        if unit in self._unhooked_uses and not self._num_model_forwards:
            del self._unhooked_uses[unit]
            self._release(unit)

    def _post_backward(self, unit: Unit) -> None:
        """No call that holds ``unit`` is likely to read it any more."""
        self._release(unit)
        self._retry_deferred_frees()

    def _end_backward(self) -> None:
        """The backward is over: everything that was gathered for it is released."""
        self._order.end_pass()
        self._calls.end_backward()
        if not self._num_model_forwards:  # else it was one within a forward, as of torch.autograd.grad
            self._release_unhooked_uses()
        for unit in self._units:
            if unit not in self._unhooked_uses:
                self._release(unit)
        if not self._num_model_forwards:
            self._warn_of_deferred_frees()


def _call(owner: weakref.ref[Gatherer], name: str, argument: Any) -> Any:
    gatherer = owner()
    if gatherer is None:
        raise ZeroEngineError("this backward needs parameters of an engine that is gone: keep the engine until it ends")
    return getattr(gatherer, name)(argument)
