"""Follows the forwards of the model: gathers what its modules need, and writes the logs that backwards follow."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.autograd_hooks import WeakMethod, autograd_outputs, number_of
from zeroengine.runtime.backward import Backward
from zeroengine.runtime.backward_calls import is_in_checkpoint
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.gradient_paths import require_gradients
from zeroengine.runtime.module_forward import ListWalk, ModuleForward, find_lists
from zeroengine.runtime.module_hooks import (
    ForwardObserver,
    function_node_number,
    is_raising,
    present_node_number,
    register_hooks,
)
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.saved_views import SavedView, replace_saved_views
from zeroengine.runtime.traversal import Traversal
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.visit_log import Visit, VisitLog
from zeroengine.utils.compiler_disable import disable_compile, hidden_from_activation_checkpoint, outside_torch_func
from zeroengine.utils.tensor_tree import tensors_in
from zeroengine.utils.torch_internals import functorch_active, next_node_number


class Forward:
    """Gathers what the forwards of modules need, and logs their visits.

    Args:
        model: The model.
        units: All units.
        transport: Gathers.
        reducer: Takes the gradients.
        config: The resolved configuration.
        timer: Times forwards, gathers and backwards.
        num_forwards: ``Divergence.num_forwards``, which is counted here.

    Attributes:
        gatherer: Gathers units.
        backward: Follows the backwards of the model.
        num_model_forwards: The number of forwards of the whole model that are in progress. They may be nested.
        observer: Is told of the forwards of the whole model, if it is not None.
        hook_handles: The handles of the hooks on modules and parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[Unit],
        transport: Transport,
        reducer: Reducer,
        config: Config,
        timer: Timer,
        num_forwards: list[int],
    ) -> None:
        self._model, self._units, self._timer, self._num_forwards = model, list(units), timer, num_forwards
        self._has_communicators = transport.runs_on_streams and transport.has_peers
        self.num_model_forwards = 0
        self.observer: ForwardObserver | None = None
        # Whether the outermost of them began with gradients enabled, the timer's span of it, and the number of the
        # first node that it may have made.
        self._forward_has_grad, self._forward_span, self._first_node = False, -1, 0
        # The forwards of modules that are in progress, the innermost last.
        self._module_forwards: list[ModuleForward] = []
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit in self._units:
            for module in unit.modules:
                self._units_of.setdefault(module, []).append(unit)
        self._item_units_of = find_lists(model, self._units)
        self.gatherer = Gatherer(
            self._units, transport, config, timer, self._gather_for_use, self._is_in_use, self.abandon
        )
        units_of_items = {unit for item_units in self._item_units_of.values() for unit in item_units.index_of}
        self.backward = Backward(
            self._units, units_of_items, self.gatherer, reducer, self._is_in_forward, config.scales_loss, timer
        )
        self._traversal = self.backward.traversal
        # The graph owns this function, so the function refers to this object weakly.
        self._restore_view = partial(_restore_view, weakref.ref(self))
        hooks = register_hooks(self, model, self._units_of, self._item_units_of)
        self.hook_handles = [*hooks, *self.backward.hook_handles]

    def observes(self, module: nn.Module) -> bool:
        """Return whether forwards of ``module`` concern this object. Copies of the model do not."""
        return module is self._model or module in self._units_of or module in self._item_units_of

    def _is_in_forward(self) -> bool:
        return self.num_model_forwards > 0

    def _is_in_use(self, unit: Unit) -> bool:
        # Nested modules may share a unit. The inner one ends first, while the outer one still reads the unit.
        return any(unit in forward.visit.units for forward in self._module_forwards)

    def abandon(self) -> None:
        """Forget forwards whose end no hook reported. Call this where none can be in progress."""
        if self.num_model_forwards:
            self._timer.end(self._forward_span)
        self.num_model_forwards = 0
        self._module_forwards.clear()
        self.gatherer.release_unhooked_uses()

    # -- the whole model --------------------------------------------------------------------------

    def pre_model_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell the observer, and begin a pass, if no forward and no backward is in progress.

        Raises:
            ZeroEngineError: A CUDA graph is being captured, over NCCL.
        """
        is_on_gpu = self._has_communicators and torch.cuda.is_initialized()
        if is_on_gpu and torch.cuda.is_current_stream_capturing():
            raise ZeroEngineError(
                "a forward inside the capture of a CUDA graph, with several ranks: a replay would run its collectives "
                "and nothing of what the host does between them (memory of gathered units, order of ranks, timeouts). "
                "Leave the engine's model outside of the graph, or train on one rank."
            )
        if self.observer is not None:
            self.observer.begin(args, kwargs)
        with hidden_from_activation_checkpoint():
            self._begin_model_forward()

    def _begin_model_forward(self) -> None:
        # A forward inside a backward is a recomputation: the pass in progress is the backward.
        if not self._traversal.follow_backward():
            if not self.num_model_forwards:
                self.gatherer.check_no_stream("a forward")
                # The units of a backward that raised are released before this forward gathers any.
                self.backward.enter_forward()
                self.gatherer.deferred_frees.retry()
            # Inside ``zeroengine.gathered`` ranks may run different forwards, which have no common order to learn.
            if not (self.num_model_forwards or self.gatherer.num_pins):
                self.gatherer.begin_pass()
                if torch.is_grad_enabled() or any(unit.is_releasable for unit in self._units):
                    self._num_forwards[torch.is_grad_enabled()] += 1
        if not self.num_model_forwards:
            in_backward = self._traversal.is_running
            self._first_node, self._forward_has_grad = next_node_number(), torch.is_grad_enabled()
            if self._forward_has_grad and not in_backward:
                self._traversal.logs.begin()
                # A use of parameters that stay gathered goes unnoticed.
                self._traversal.logs.latest.untracked.update(self.gatherer.pinned_units())
            # A forward inside a backward is part of that, and one without gradients, as in an evaluation, is no
            # forward of a step.
            begin = self._timer.begin
            self._forward_span = -1 if in_backward else begin("forward" if self._forward_has_grad else "other")
        self.num_model_forwards += 1

    def post_model_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell the observer, and end the pass: release what was gathered without hooks."""
        # ``abandon`` may have reset the count before this hook ran.
        self.num_model_forwards = max(0, self.num_model_forwards - 1)
        if self.num_model_forwards:
            return
        if self.observer is not None:
            self.observer.end_by_hook()
        with hidden_from_activation_checkpoint():
            self._end_model_forward(output)

    def _end_model_forward(self, output: Any) -> None:
        in_backward = self._traversal.is_running
        if self._forward_has_grad and not in_backward:
            functorch = functorch_active()
            self._traversal.logs.end([] if functorch else tensors_in(output))
        if not (in_backward or self.gatherer.num_pins):
            self.gatherer.end_forward_pass()
        # The hooks of modules have replaced the views that their own forwards saved. The graph of the whole model is
        # searched for views of units that were gathered without a hook or stay gathered, and of aliased buffers.
        if not in_backward:
            pinned = [unit for unit in self.gatherer.pinned_units() if unit.is_releasable]
            candidates = {*self.gatherer.unhooked_uses, *pinned}
            unhooked = [unit for unit in self._units if unit in candidates or unit in self.gatherer.deferred_frees]
            self._replace_saved_views(output, self._first_node, unhooked)
        self.gatherer.release_unhooked_uses()
        if not in_backward:
            self.gatherer.deferred_frees.warn_of_memory()
        self._timer.end(self._forward_span)
        if not in_backward:
            self.backward.leave_forward()
            # A forward without autograd is one of an evaluation, or of generation.
            self._timer.note_training() if torch.is_grad_enabled() else self._timer.note_evaluation()

    # -- modules ----------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather the units that the forward of ``module`` needs, and begin its visit."""
        # An activation checkpoint runs the forward again inside a backward.
        self._traversal.follow_backward()
        all_units, item_units = self._units_of.get(module, []), self._item_units_of.get(module)
        units = [unit for unit in all_units if unit.is_releasable]
        has_grad = torch.is_grad_enabled()
        is_outermost = not (self.num_model_forwards or self._module_forwards or self._traversal.is_running)
        if units and is_outermost and not self.gatherer.num_pins:
            # A part of the model that is called by itself, as in generation, concerns all ranks like the whole.
            self._num_forwards[has_grad] += 1
        is_tracked = has_grad and not functorch_active()
        needed = units if item_units is None else [*units, *item_units.index_of]
        log = self._enter_log(needed) if needed else None
        for unit in all_units:
            if unit.is_releasable:
                self._gather_skipped_before(unit, module)
            self._gather(unit)
        # Units that stay gathered are never released, so they need no visit.
        if log is None:
            return
        # Inside ``zeroengine.gathered`` ranks may run different numbers of forwards.
        walk = None if item_units is None or self.gatherer.num_pins else ListWalk(item_units, has_grad)
        visit = Visit(units, next_node_number())
        if walk is not None and is_tracked:
            # Nothing else shows where items have their places that this rank skips before it calls one.
            for tensor in tensors_in((args, kwargs)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(WeakMethod(self._traversal, Traversal.move_before, log, visit))
        if has_grad and not is_tracked:
            self._mark_untracked(units)
        elif not has_grad and units:
            self._log_recomputed(log, units)
        self._module_forwards.append(ModuleForward(module, visit, is_tracked, walk, log))

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Release the units of ``module``, add its visit to the log, and replace the views that the graph saved.

        Returns:
            The output. It is another one where a backward would not come to the module otherwise.
        """
        forwards = self._module_forwards
        depth = next((i for i in reversed(range(len(forwards))) if forwards[i].module is module), None)
        # A pre-forward hook of the user may have raised before ours ran.
        if depth is None:
            return output
        forward = forwards[depth]
        units = forward.visit.units
        # Forwards inside this one that are still listed ended without their hooks.
        del forwards[depth + 1 :]
        if forward.walk is not None and not (output is None and is_raising()):
            self._gather_skipped(forward.walk, len(forward.walk.item_units))
            functorch = functorch_active()
            if torch.is_grad_enabled() and not functorch and forward.walk.called_nothing_trainable:
                output = require_gradients(output)
        del forwards[depth:]
        has_backward = forward.is_tracked and torch.is_grad_enabled() and self._log_visit(forward, output)
        in_backward = self._traversal.is_running
        if has_backward and not in_backward:
            self._replace_saved_views(output, forward.visit.first_node, units)
        if not has_backward and torch.is_grad_enabled():
            skipped = () if forward.walk is None else forward.walk.skipped
            for visit in (forward.visit, *skipped):
                self._mark_untracked(visit.units)
        walks = (outer.walk for outer in reversed(forwards) if outer.walk is not None)
        walk = next((walk for walk in walks if not walk.item_units.index_of.keys().isdisjoint(units)), None)
        if walk is not None:
            walk.last_node = present_node_number()
            if not has_backward and forward.is_tracked and walk.has_grad and any(True for _ in tensors_in(output)):
                # A rank that skips this item cannot know that no backward comes to it.
                forward.log.set_place(forward.visit, walk.last_node)
                walk.skipped.append(forward.visit)
        for unit in units:
            self._release(unit, has_backward=has_backward)
        self.gatherer.deferred_frees.retry()
        return output

    def _release(self, unit: Unit, *, has_backward: bool) -> None:
        """Release ``unit`` after its use, on a rank that has called its module as on one that has skipped it."""
        # The backward of a recomputed module follows at once, and the last unit of a forward is the first unit that the
        # backward needs. So neither is released here.
        if not (self._traversal.is_running or (has_backward and self.gatherer.is_kept_for_backward(unit))):
            self.gatherer.release(unit)

    def _log_visit(self, forward: ModuleForward, output: Any) -> bool:
        """Add the visit of a forward that has ended to its log. Return whether it has a backward."""
        log, visit = forward.log, forward.visit
        outputs = autograd_outputs(tensors_in(output), visit.first_node)
        if not outputs:
            return False
        if forward.walk is not None and is_in_checkpoint():
            # The recomputation needs all items. When it comes depends on what this rank has called, so the backward
            # gathers them when it comes to the module, and keeps them.
            visit.units = [*visit.units, *forward.walk.item_units.index_of]
        node_number = max(number_of(tensor) for tensor in outputs)
        log.set_place(visit, node_number)
        log.add([*(forward.walk.skipped if forward.walk is not None else ()), visit])
        self._traversal.expect(log, visit, outputs)
        return True

    def _enter_log(self, units: Sequence[Unit]) -> VisitLog:
        """Return the log of a forward of a module that begins and needs ``units``. In a backward, go to its visit."""
        if self._traversal.is_running:
            return self._traversal.recompute(units, is_nested=bool(self._module_forwards))
        if not self.num_model_forwards and torch.is_grad_enabled():
            self._traversal.logs.continue_latest()
        return self._traversal.logs.latest

    def _log_recomputed(self, log: VisitLog, units: Sequence[Unit]) -> None:
        """Add ``units`` to the log if they are used inside a reentrant checkpoint, which runs without gradients."""
        if self._traversal.is_running or (self._forward_has_grad and self.num_model_forwards > 0):
            node_number = function_node_number()
            if node_number is not None:
                log.add_recomputed(units, node_number)

    def _mark_untracked(self, units: Iterable[Unit]) -> None:
        """Note that the backward of a use of ``units`` cannot be followed. A forward without gradients has none."""
        if not self._traversal.is_running and (self._forward_has_grad or not self.num_model_forwards):
            self._traversal.logs.latest.untracked.update(units)

    def _replace_saved_views(self, output: Any, first_node: int, units: list[Unit]) -> None:
        with_values = [unit for unit in units if unit.is_gathered or unit in self.gatherer.deferred_frees]
        saved_by_user_hooks = replace_saved_views(tensors_in(output), first_node, with_values, self._restore_view)
        self.gatherer.deferred_frees.keep_until_update(saved_by_user_hooks)

    def _gather(self, unit: Unit) -> None:
        # Only inside a pass all ranks visit the same units in the same order. A module that holds a list keeps its
        # other units, so it does not matter when those inside of it need them.
        if (self.num_model_forwards or self._traversal.is_running) and not self._is_in_use(unit):
            self.gatherer.gather_and_prefetch(unit, in_backward=self._traversal.is_running)
        else:
            self.gatherer.ensure(unit)

    # -- lists of units, of which a rank may call only some -------------------------------------------

    def _gather_skipped_before(self, unit: Unit, module: nn.Module | None) -> None:
        """Gather for other ranks what they gather before ``unit``.

        Args:
            unit: The unit, which this rank is about to gather.
            module: The module that needs it; None: unknown.
        """
        is_item = False
        for forward in reversed(self._module_forwards):
            walk = forward.walk
            if walk is None:
                continue
            index = walk.item_units.index_of.get(unit)
            if index is None and module in walk.item_units.followers:
                self._gather_skipped(walk, len(walk.item_units))
            # A module inside may hold the same list. Then its own forward goes through the list.
            elif index is not None and not is_item:
                is_item = True
                if walk.begin_call(index):
                    self._gather_skipped(walk, index)
                    walk.next_index = index + 1

    def _gather_skipped(self, walk: ListWalk, stop: int) -> None:
        """Gather for other ranks the items from the next one up to ``stop``, and note their visits."""
        for units in walk.skip(stop):
            log = self._enter_log(units)
            for unit in units:
                self._gather(unit)
                self._release(unit, has_backward=torch.is_grad_enabled())
            if walk.has_grad:
                node_number = walk.last_node if walk.item_units.is_inside_block else present_node_number()
                visit = Visit(units, node_number)
                log.set_place(visit, node_number)
                walk.skipped.append(visit)
            else:
                self._log_recomputed(log, units)

    # -- uses that no hook announced --------------------------------------------------------------

    def _gather_for_use(self, param: nn.Parameter, operation: str) -> None:
        """Gather a parameter that is used while its values are away. Its class calls this.

        Raises:
            ReleasedParameterError: The use is outside of a forward or backward, where the other ranks may not gather.
        """
        if self.gatherer.gather_on_demand is not None:
            self.gatherer.gather_on_demand(param, operation)
            return
        unit = next(u for u in self._units if any(p is param for p in u.params))
        # Every rank launched a gather that is in progress, so this rank may wait for it anywhere.
        if unit.is_released and not (self._traversal.follow_backward() or self.num_model_forwards):
            slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
            raise ReleasedParameterError(
                f"parameter {slot.name} {slot.shape} is partitioned and released: `{operation}` needs its values. "
                "Write `with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                "engine.full_state_dict() to copy all of them."
            )
        if unit.is_releasable:
            self.gatherer.note_unhooked_use(unit)
            self._mark_untracked([unit])
            if self._traversal.is_running and not self._module_forwards:
                self._traversal.move_to_current_node()
            else:
                self._gather_skipped_before(unit, None)
        with hidden_from_activation_checkpoint():
            self.gatherer.ensure(unit)

    @disable_compile
    def _restore_saved_view(self, view: SavedView) -> torch.Tensor:
        """Return a tensor that the graph saved as a view of a parameter. A backward that reads it calls this."""
        unit = view.unit
        with outside_torch_func():
            if not unit.is_gathered:
                if not (self._traversal.follow_backward() or self.num_model_forwards):
                    raise ReleasedParameterError(
                        f"a tensor that the graph saved from a parameter of unit {unit.name} is read outside of a "
                        "backward, where other ranks may not do the same: write `with "
                        "zeroengine.gathered(module_or_params):` around it"
                    )
                self.gatherer.note_unhooked_use(unit)
                self._traversal.move_to_current_node()
                self.gatherer.ensure(unit)
            return view.restore()


def _restore_view(forward_ref: weakref.ref[Forward], view: SavedView) -> torch.Tensor:
    forward = forward_ref()
    if forward is None:
        raise ZeroEngineError("this backward needs parameters of an engine that is gone: keep the engine until it ends")
    return forward._restore_saved_view(view)
