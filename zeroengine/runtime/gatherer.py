"""Gathers units just before a module needs them and releases them just after.

[Note: Hooks are hints]
Hooks on modules, and on the tensors that go in and come out, say when a unit is about to be needed and when it may be
released. The results do not depend on them:
- A use of a released parameter calls ``_gather_for_use`` through its class (see ``released_parameter.py``). A backward
  that reads a saved view of a parameter calls ``_restore_saved_view`` (see ``saved_views.py``). Both gather the unit.
- A full buffer that other tensors alias is not freed (see ``deferred_frees.py``).

[Note: When a unit is gathered]
    forward of a module       the pre-forward hook gathers its units and prefetches the next ones; the post-forward hook
                              releases them
    backward of a module      the first gradient of its outputs gathers; the end of its backward releases, which
                              ``module_backwards.py`` reports
    use without a hook        gathered on the spot, released when the pass ends
    ``zeroengine.gathered``   ``pin`` and ``unpin``
    not ``is_releasable``     never released; the next pre-forward hook waits for the all-gather of the step

Units that a backward gathered and did not release, such as units with unused parameters, are released when it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.backward_calls import is_outermost_backward
from zeroengine.runtime.backward_order import BackwardOrder, Operation
from zeroengine.runtime.backward_tracker import BackwardListener, BackwardTracker
from zeroengine.runtime.first_list_calls import ArrivalExchange
from zeroengine.runtime.forward_graphs import ForwardGraphs
from zeroengine.runtime.gradient_paths import require_gradients
from zeroengine.runtime.module_backwards import CallTracker, Hook, ModuleCall, queue_callback, register_hook_first
from zeroengine.runtime.module_hooks import ForwardObserver, is_in_function_forward, is_raising, register_hooks
from zeroengine.runtime.saved_views import SavedView, current_sequence_number, replace_saved_views
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gathers import UnitGathers
from zeroengine.runtime.unit_lists import UnitLists, UserForward
from zeroengine.runtime.visit_order import PrefetchLimits, VisitOrder
from zeroengine.utils.compiler_disable import disable_compile, hidden_from_activation_checkpoint, outside_torch_func
from zeroengine.utils.tensor_tree import tensors_in


class ModuleForward(NamedTuple):
    """A forward in progress of a module that needs units."""

    module: nn.Module
    units: list[Unit]  # stay gathered until the forward ends
    call: ModuleCall | None  # None where no backward will follow
    first_sequence_number: int  # of the nodes that this forward adds to the graph


class Gatherer(BackwardListener):
    """Decides when units are gathered and released. It knows nothing about gradients.

    Args:
        config: The resolved configuration.
        backward: Reports failed backwards and units whose gradients are complete. The gatherer reports forwards to it.
        timer: Times forwards and gathers.

    Attributes:
        gathers: Gathers and releases units.
        num_model_forwards: The number of forwards of the whole model that are in progress. They may be nested.
        forward_observer: Is told of the forwards of the whole model, if it is not None.
        gather_on_demand: Gathers a parameter that is used while it is not None, when every rank runs the same code.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[Unit],
        transport: Transport,
        config: Config,
        backward: BackwardTracker,
        timer: Timer,
    ) -> None:
        self._model, self._units = model, list(units)
        self._transport, self._backward, self._timer = transport, backward, timer
        self._prefetch_limits = PrefetchLimits.of_settings(
            config.zero_optimization,
            overlaps=transport.overlaps,
            reads_shards=any(unit.offloaded_shards is not None for unit in self._units),
        )
        self.num_model_forwards = 0
        self.forward_observer: ForwardObserver | None = None
        self.gather_on_demand: Callable[[nn.Parameter, str], None] | None = None
        # Whether the outermost of them began with gradients enabled.
        self._forward_has_grad = False
        # The timer's span of the outermost of them.
        self._forward_span = -1
        # The forwards of modules that are in progress, the innermost last.
        self._module_forwards: list[ModuleForward] = []
        # The ids that autograd gave to the backwards in progress, the innermost last.
        self._graph_tasks: list[int] = []
        # The units that were gathered for a use without a hook. They are released when the pass ends.
        self._unhooked_uses: dict[Unit, None] = {}
        self.gathers = UnitGathers(self._units, transport, timer, self._gather_for_use, self._is_in_use)
        self._visit_order: VisitOrder[Unit] = VisitOrder()
        self._last_in_forward: Unit | None = None
        # The sequence number of the first node that the model's forward in progress adds to the graph.
        self._first_sequence_number = 0
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit in self._units:
            for module in unit.modules:
                self._units_of.setdefault(module, []).append(unit)
        self._forwards = ForwardGraphs(Hook(backward, BackwardTracker.note_reached))
        self._order = BackwardOrder(self._forwards, self._accumulates_gradients, self._pass_over)
        self._calls = CallTracker(
            self._units_of,
            self._forwards,
            self._order,
            self._pre_backward,
            self._post_backward,
            backward.note_unit_past,
        )
        # The graph owns this function, so the function refers to the gatherer weakly.
        self._restore_view = partial(_restore_view, weakref.ref(self))
        self._lists = UnitLists(
            model,
            self._units_of,
            self._forwards,
            self._gather_for_others,
            self.gathers.release,
            self._note_not_held,
            ArrivalExchange(transport),
        )
        self.hook_handles = register_hooks(self, model, self._units_of, self._lists.users)
        backward.subscribe(self)

    def observes(self, module: nn.Module) -> bool:
        """Return whether forwards of ``module`` concern this gatherer. Copies of the model do not."""
        return module is self._model or module in self._units_of or module in self._lists.users

    def _is_in_use(self, unit: Unit) -> bool:
        # Nested modules may share a unit. The inner one ends first, while the outer one still reads the unit.
        return any(unit in forward.units for forward in self._module_forwards)

    def _release_unhooked_uses(self) -> None:
        units, self._unhooked_uses = self._unhooked_uses, {}
        for unit in units:
            self.gathers.release(unit)
        self.gathers.deferred_frees.retry()

    # -- step -------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Prepare an update: ``quiesce``, and replace even the buffers that graphs saved through the user's hooks."""
        # Those graphs belong to the forward before this update.
        self.gathers.deferred_frees.begin_update()
        self.quiesce(values_change=False)

    def end_update(self) -> None:
        """Complete the update. If peers read this rank's parameters in place, return when all of them have done so."""
        # On a transport that overlaps, the all-gathers of the update run on, and the next use of each unit waits for
        # its own. A transport that does not overlap gains nothing from that, and its peers may read in place.
        if not self._transport.overlaps:
            self.quiesce(values_change=False)
            with self._timer.span("gather"):
                self._transport.fence()

    def quiesce(self, *, values_change: bool = True) -> None:
        """Return with no gather in progress and every unit released that is not pinned, so that values may change.

        Call this where no forward can be in progress: a forward that Ctrl-C ended is forgotten. A full buffer that
        other tensors still alias is left to them, with its present values, and the unit takes a new one.

        Args:
            values_change: Whether values of any unit may change. Otherwise only those that ``publish_update`` is called
                for.

        Raises:
            ZeroEngineError: A parameter is not what ``initialize`` made of it. See ``Unit.check_parameters``.
        """
        self.abandon_forward()
        self.gathers.quiesce(values_change)

    # -- uses that no hook announced --------------------------------------------------------------

    def _gather_for_use(self, param: nn.Parameter, operation: str) -> None:
        """Gather a parameter that is used while its values are away. Its class calls this.

        Raises:
            ReleasedParameterError: The use is outside of a forward or backward, where the other ranks may not gather.
        """
        if self.gather_on_demand is not None:
            self.gather_on_demand(param, operation)
            return
        unit = next(u for u in self._units if any(p is param for p in u.params))
        # Every rank launched a gather that is in progress, so this rank may wait for it anywhere.
        if unit.is_released:
            in_backward = self._enter_backward()
            if not (self.num_model_forwards or in_backward):
                slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
                raise ReleasedParameterError(
                    f"parameter {slot.name} {slot.shape} is partitioned and released: `{operation}` needs its values. "
                    "Write `with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                    "engine.full_state_dict() to copy all of them."
                )
        if unit.is_releasable:
            self._unhooked_uses[unit] = None
            self._mark_untracked([unit])
            self._lists.visit(unit, None, in_backward=bool(self._graph_tasks) and not self._module_forwards)
        with hidden_from_activation_checkpoint():
            self.gathers.ensure(unit)

    @disable_compile
    def _restore_saved_view(self, view: SavedView) -> torch.Tensor:
        """Return a tensor that the graph saved as a view of a parameter. A backward that reads it calls this."""
        unit = view.unit
        with outside_torch_func():
            if not unit.is_gathered:
                if not (self._enter_backward() or self.num_model_forwards):
                    raise ReleasedParameterError(
                        f"a tensor that the graph saved from a parameter of unit {unit.name} is read outside of a "
                        "backward, where other ranks may not do the same: write `with "
                        "zeroengine.gathered(module_or_params):` around it"
                    )
                self._unhooked_uses[unit] = None
                self._lists.visit(unit, None, in_backward=True)
                self.gathers.ensure(unit)
            return view.restore()

    # -- forward ----------------------------------------------------------------------------------

    def pre_model_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell the observer, and begin a pass, if no forward and no backward is in progress."""
        if self.forward_observer is not None:
            self.forward_observer.begin(args, kwargs)
        with hidden_from_activation_checkpoint():
            self._begin_model_forward()

    def _begin_model_forward(self) -> None:
        # A forward inside a backward is a recomputation: the pass in progress is the backward.
        if not self._enter_backward():
            if not self.num_model_forwards:
                # Autograd did not report the end of a backward that raised. Its units are released before this forward
                # gathers any.
                self.abandon_backward()
                self._backward.enter_forward()
                self.gathers.deferred_frees.retry()
            # Inside ``zeroengine.gathered`` ranks may run different forwards, which have no common order to learn.
            if not (self.num_model_forwards or self.gathers.num_pins):
                self._visit_order.start_pass()
        if not self.num_model_forwards:
            self._first_sequence_number = current_sequence_number()
            self._forward_has_grad = torch.is_grad_enabled()
            if self._forward_has_grad and not self._graph_tasks:
                self._forwards.begin(self._first_sequence_number)
                self._calls.begin_model_forward()
                self._lists.begin_model_forward()
                # A use of parameters that stay gathered goes unnoticed.
                self._calls.mark_untracked(self.gathers.pinned_units())
            # A forward inside a backward is part of that, and one without gradients, as in an evaluation, is no
            # forward of a step.
            self._forward_span = (
                -1 if self._graph_tasks else self._timer.begin("forward" if torch.is_grad_enabled() else "other")
            )
        self.num_model_forwards += 1

    def post_model_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell the observer, and end the pass: release what was gathered without hooks."""
        # ``abandon_forward`` may have reset the count before this hook ran.
        self.num_model_forwards = max(0, self.num_model_forwards - 1)
        if self.num_model_forwards:
            return
        if self.forward_observer is not None:
            self.forward_observer.end_by_hook()
        with hidden_from_activation_checkpoint():
            self._end_model_forward(output)

    def _end_model_forward(self, output: Any) -> None:
        if self._forward_has_grad and not self._graph_tasks:
            functorch = torch._C._are_functorch_transforms_active()
            self._forwards.end(current_sequence_number(), [] if functorch else tensors_in(output))
        if not (self._graph_tasks or self.gathers.num_pins):
            self._last_in_forward = self._visit_order.last
            self._visit_order.end_pass()
        # The hooks of modules have replaced the views that their own forwards saved. The graph of the whole model is
        # searched for views of units that were gathered without a hook or stay gathered, and of aliased buffers.
        if not self._graph_tasks:
            pinned = [unit for unit in self.gathers.pinned_units() if unit.is_releasable]
            candidates = {*self._unhooked_uses, *pinned}
            unhooked = [unit for unit in self._units if unit in candidates or unit in self.gathers.deferred_frees]
            self._replace_saved_views(output, self._first_sequence_number, unhooked)
        self._release_unhooked_uses()
        if not self._graph_tasks:
            self.gathers.deferred_frees.warn_of_memory()
        self._timer.end(self._forward_span)
        if not self._graph_tasks:
            self._backward.leave_forward()
            # A forward without autograd is one of an evaluation, or of generation.
            self._timer.note_training() if torch.is_grad_enabled() else self._timer.note_evaluation()
        if self._timer.enabled:
            for tensor in tensors_in(output):
                self._backward.watch_output(tensor)

    def abandon_forward(self) -> None:
        """Forget forwards whose end no hook reported. Call this where none can be in progress."""
        if self.num_model_forwards:
            self._timer.end(self._forward_span)
        self.num_model_forwards = 0
        self._module_forwards.clear()
        self._lists.forget_forwards()
        self._release_unhooked_uses()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather the units that the forward of ``module`` needs, and track the call's backward."""
        # An activation checkpoint runs the forward again inside a backward.
        self._enter_backward()
        for unit in self._units_of[module]:
            if unit.is_releasable:
                self._lists.visit(unit, module, in_backward=False)
            self._gather_and_prefetch(unit)
        units = [unit for unit in self._units_of[module] if unit.is_releasable]
        # Units that stay gathered are never released, so they need no tracking.
        if units:
            tracked = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            if tracked and not (self.num_model_forwards or self._graph_tasks):
                self._forwards.continue_latest(current_sequence_number())
            call = self._calls.watch_inputs(module, (args, kwargs)) if tracked else None
            if call is None and not torch.is_grad_enabled():
                if self._may_be_recomputed():
                    self._calls.expect_recomputation(module)
            elif call is None:
                self._mark_untracked(units)
            self._module_forwards.append(ModuleForward(module, units, call, current_sequence_number()))

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Release the units of ``module``, and replace the views of them that the graph saved."""
        forwards = self._module_forwards
        depth = next((i for i in reversed(range(len(forwards))) if forwards[i].module is module), None)
        # A pre-forward hook of the user may have raised before ours ran.
        if depth is None:
            return
        forward = forwards[depth]
        # Forwards inside this one that are still listed ended without their hooks.
        del forwards[depth:]
        has_backward = False
        if forward.call is not None and torch.is_grad_enabled():
            outputs = self._calls.watch_outputs(module, forward.call, output, forward.first_sequence_number)
            has_backward = bool(outputs)
            if has_backward and not self._graph_tasks:
                self._calls.expect_backward(forward.call, outputs)
                self._replace_saved_views(output, forward.first_sequence_number, forward.units)
            elif has_backward:
                self._calls.note_recomputed(module, forward.call)
        if not has_backward and torch.is_grad_enabled():
            self._mark_untracked(forward.units)
        for unit in forward.units:
            # The backward of a recomputed module follows at once, and the last unit of a forward is the first unit that
            # the backward needs. So neither is released here.
            if not self._graph_tasks and not (has_backward and unit is self._last_in_forward):
                self.gathers.release(unit)
        self.gathers.deferred_frees.retry()

    def _mark_untracked(self, units: Iterable[Unit]) -> None:
        """Note that the backward of a use of ``units`` cannot be followed. A forward without gradients has none."""
        if not self._graph_tasks and (self._forward_has_grad or not self.num_model_forwards):
            self._calls.mark_untracked(units)

    def _replace_saved_views(self, output: Any, first_sequence_number: int, units: list[Unit]) -> None:
        with_values = [unit for unit in units if unit.is_gathered or unit in self.gathers.deferred_frees]
        outputs = tensors_in(output)
        saved_by_user_hooks = replace_saved_views(outputs, first_sequence_number, with_values, self._restore_view)
        self.gathers.deferred_frees.keep_until_update(saved_by_user_hooks)

    def _gather_and_prefetch(self, unit: Unit) -> None:
        """Gather ``unit``, and prefetch the units that followed it in the previous pass."""
        self.gathers.ensure(unit)
        # The order matters only for releasable units, and only inside a pass, where all ranks visit the same units.
        if self.gathers.num_pins or not unit.is_releasable or not (self.num_model_forwards or self._graph_tasks):
            return
        self._visit_order.visit(unit, bool(self._graph_tasks))
        for unit in self._visit_order.to_prefetch(self._prefetch_limits, self.gathers.live_numel):
            shards = unit.offloaded_shards
            # A collective is started early only if it proceeds by itself. Otherwise at most this rank's own shard is
            # read ahead, which concerns no other rank.
            if self._transport.overlaps if shards is None else shards.can_gather_ahead:
                self.gathers.start(unit)
            elif shards is not None:
                shards.prefetch(unit.shard)

    # -- lists of units, of which a rank may use only some --------------------------------------------

    def pre_list_forward(self, module: nn.Module, args: Any) -> None:
        """Follow which elements of its lists the forward of ``module`` calls."""
        self._enter_backward()
        # Inside ``zeroengine.gathered`` ranks may run different numbers of forwards.
        if not self.gathers.num_pins:
            self._lists.begin_forward(module)

    def post_list_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather what the forward of ``module`` did not call, and do so again in its backward."""
        forward = self._lists.end_forward(module, raised=output is None and is_raising())
        if forward is None:
            return output
        if torch.is_grad_enabled():
            if forward.called_nothing_trainable and not torch._C._are_functorch_transforms_active():
                output = require_gradients(output)
            # The graph of a recomputation may have no backward of its own.
            is_recomputed = bool(self._graph_tasks)
            for list_pass in forward.passes:
                list_pass.is_recomputed = is_recomputed
            outputs = self._watch_list_outputs(forward, output)
            if outputs and not is_recomputed:
                self._lists.expect_backward(forward)
                self._order.expect(forward, outputs, holds_lists=True)
        elif self._may_be_recomputed():
            self._lists.expect_recomputation(forward)
        return output

    def _watch_list_outputs(self, forward: UserForward, output: Any) -> list[torch.Tensor]:
        """Begin the backward of ``forward`` with the first gradient of ``output``. Return the tensors that have one."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
        for tensor in outputs:
            # The module may return what a module inside of it has returned, such as an element, and watched already.
            hook = Hook(self, Gatherer._begin_list_backward, forward, kept=forward.model_forward)
            register_hook_first(tensor, hook)
        return outputs

    def _begin_list_backward(self, forward: UserForward) -> None:
        self._enter_backward()
        self._order.reach(forward)
        self._lists.begin_backward(forward, len(self._graph_tasks))

    def _may_be_recomputed(self) -> bool:
        """Return whether a module that runs without gradients now may be inside a reentrant checkpoint."""
        is_inside = self._forward_has_grad and self.num_model_forwards > 0 and not self._graph_tasks
        return is_inside and is_in_function_forward()

    def _gather_for_others(self, unit: Unit, in_backward: bool) -> None:
        """Take part in the gather of a unit that this rank does not use."""
        self._gather_and_prefetch(unit)
        # This rank keeps what a rank keeps that uses the unit, since both must gather again at the same times: the last
        # unit of a forward, and the units of a recomputation, stay for the backward.
        is_recomputed = bool(self._graph_tasks) and not in_backward
        is_last = not self._graph_tasks and torch.is_grad_enabled() and unit is self._last_in_forward
        if not (is_recomputed or is_last):
            self.gathers.release(unit)

    # -- backward ---------------------------------------------------------------------------------

    def _enter_backward(self) -> bool:
        """Return whether autograd is running a backward. Begin its pass, and ask for a callback at its end, once."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task < 0:
            return False
        if graph_task not in self._graph_tasks:
            self._graph_tasks.append(graph_task)
            # Autograd drops the callback if the backward raises. ``abandon_backward`` then ends the pass.
            queue_callback(partial(self._end_graph_task, graph_task))
            # The outermost backward is the pass, and nested backwards belong to it.
            if len(self._graph_tasks) == 1:
                self._visit_order.start_pass()
                if self._backward.loss is None:
                    self._forwards.enter_plain_backward()
                    self._backward.note_reached()
        return True

    def _end_graph_task(self, graph_task: int) -> None:
        if graph_task in self._graph_tasks:
            if graph_task == self._graph_tasks[0]:
                self._gather_passed_over()
            # Backwards inside this one that are still listed have raised, because autograd did not report their end.
            del self._graph_tasks[self._graph_tasks.index(graph_task) :]
            if self._graph_tasks:
                self._lists.end_nested_backward(len(self._graph_tasks))
                self._calls.end_nested_backward()
            else:
                self._end_outermost_backward()

    def _gather_passed_over(self) -> None:
        """Gather what the outermost backward, which is about to end, has not come to and other ranks may have."""
        self._order.pass_over_remaining()
        self._lists.end_nested_backward(0)

    def end_call(self) -> None:
        """Gather before the reducer ends the units, because a rank waits there until others have read its memory."""
        self._gather_passed_over()

    def _accumulates_gradients(self) -> bool:
        # The first hook of a plain backward asks this.
        self._enter_backward()
        return self._backward.is_producing_gradients

    def _pass_over(self, operation: Operation) -> None:
        if isinstance(operation, UserForward):
            self._lists.begin_backward(operation, len(self._graph_tasks))
        elif isinstance(operation, ModuleCall):
            self._calls.pass_over(operation)

    def call_began(self) -> None:
        """Report the units that no forward used: they get no gradient in this call."""
        if self._backward.loss is not None:
            self._forwards.begin_backward(self._backward.loss)
        elif is_outermost_backward():
            self._enter_backward()
        held = self._lists.hold(unit for unit in self._units if unit.trainable)
        for unit in self._units:
            if unit in held:
                self._backward.note_unit_held(unit)
            elif unit.trainable:
                # An earlier plain call may have held it.
                self._note_not_held(unit)

    def _note_not_held(self, unit: Unit) -> None:
        self._backward.note_unit_not_held(unit)
        self._note_if_past(unit)

    def _note_if_past(self, unit: Unit) -> None:
        if self._calls.is_past(unit):
            self._backward.note_unit_past(unit)

    def fail_backward(self, after_others: bool) -> None:
        """Release what was gathered for a backward that raised."""
        self.abandon_backward()

    def abandon_backward(self) -> None:
        """Forget backwards that raised. Call this where none can be in progress."""
        if self._graph_tasks:
            self._lists.end_backward()
            self._graph_tasks.clear()
            self._end_outermost_backward()

    def _pre_backward(self, module: nn.Module, units: Iterable[Unit]) -> None:
        """Gather ``units``, which the backward of a call of ``module`` needs."""
        self._enter_backward()
        for unit in units:
            if unit.is_releasable:
                self._lists.visit(unit, module, in_backward=True)
                self._gather_and_prefetch(unit)

    def _post_backward(self, unit: Unit) -> None:
        """Release ``unit``, which no backward of its modules is likely to read again."""
        self.gathers.release(unit)
        self.gathers.deferred_frees.retry()

    def unit_complete(self, unit: Unit) -> None:
        """Record that the gradients of ``unit`` are complete, so its modules may be finished.

        Release it if it was gathered for a use that no hook announced.
        """
        self._calls.complete(unit)
        self._timer.name_backward(unit.name)
        # A forward in progress, such as a recomputation, may use the unit again before it ends.
        if unit in self._unhooked_uses and not self.num_model_forwards:
            del self._unhooked_uses[unit]
            self.gathers.release(unit)

    def _end_outermost_backward(self) -> None:
        self._lists.end_backward()
        self._order.end_backward()
        self._visit_order.end_pass()
        self._calls.end_backward()
        self._forwards.end_backward()
        # A backward inside a forward, such as torch.autograd.grad, leaves this to the end of the forward.
        if not self.num_model_forwards:
            self._release_unhooked_uses()
        # A unit with unused parameters never gets all its gradients, so it is released only here.
        for unit in self._units:
            if unit not in self._unhooked_uses:
                self.gathers.release(unit)
        if not self.num_model_forwards:
            self.gathers.deferred_frees.warn_of_memory()


def _restore_view(gatherer_ref: weakref.ref[Gatherer], view: SavedView) -> torch.Tensor:
    gatherer = gatherer_ref()
    if gatherer is None:
        raise ZeroEngineError("this backward needs parameters of an engine that is gone: keep the engine until it ends")
    return gatherer._restore_saved_view(view)
