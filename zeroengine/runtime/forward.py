"""Tells the schedule of the forwards of the model, and of uses of parameters that no module announces.

[Note: Hooks are hints]
Hooks on modules, and on the tensors that come out, say when a unit is about to be needed and when it may be released.
The order of collectives of a list depends on them, and values never do:
- A use of a released parameter calls ``Forward._gather_for_use`` through its class (see ``released_parameter.py``). A
  backward that reads a saved view of a parameter calls ``Forward._gather_for_saved_view`` (see ``saved_views.py``).
  Both gather the unit.
- A full buffer that other tensors alias is not freed (see ``deferred_frees.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.autograd_hooks import WeakMethod, autograd_outputs, number_of, number_of_current_node
from zeroengine.runtime.backward import Backward
from zeroengine.runtime.executor import Executor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.gradient_paths import require_gradients
from zeroengine.runtime.graph_route import GraphRoute, Packed
from zeroengine.runtime.pass_listener import PassListener
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.running_calls import function_node_number, is_in_checkpoint, is_in_recomputation, is_raising
from zeroengine.runtime.saved_views import replace_saved_views
from zeroengine.runtime.scheduling import ModuleNumbers
from zeroengine.runtime.tied_gradients import add_in_place
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.schedule.events import (
    Entered,
    ForwardBegan,
    ForwardEnded,
    ForwardsAbandoned,
    Left,
    ListEnded,
    Moment,
    Used,
)
from zeroengine.schedule.lists import ListWalk
from zeroengine.schedule.residency import GatherState
from zeroengine.utils.compiler_disable import disable_compile, hidden_from_activation_checkpoint, outside_torch_func
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import (
    current_graph_task_id,
    functorch_active,
    next_node_number,
    num_dispatch_modes,
)


def check_hooks_allowed(modules: Iterable[nn.Module]) -> None:
    """Check that hooks can be registered on ``modules``.

    Raises:
        ZeroEngineError: One is a ScriptModule.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ZeroEngineError(
                f"torch allows no hooks on a ScriptModule, such as {module.original_name} here: pass the model as "
                "it was before torch.jit. torch.compile serves instead."
            )


class Forward:
    """Tells the schedule what the forwards of modules do.

    Args:
        model: The model.
        modules: The modules that need units or hold lists of units.
        executor: Does what the schedule says.
        transport: Gathers.
        reducer: Takes the gradients.
        config: The resolved configuration.
        timer: Times forwards, gathers and backwards.
        num_forwards: ``Divergence.num_forwards``, which is counted here.
        listener: Is told of forwards and backwards, none of which begins before it is complete.

    Attributes:
        gatherer: Gathers units.
        backward: Follows the backwards of the model.
        hook_handles: The handles of the hooks on modules and parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: ModuleNumbers,
        executor: Executor,
        transport: Transport,
        reducer: Reducer,
        config: Config,
        timer: Timer,
        num_forwards: list[int],
        listener: PassListener,
    ) -> None:
        self._model, self._executor, self._timer, self._num_forwards = model, executor, timer, num_forwards
        self._listener = listener
        self._units, self._number_of, self._units_of = executor.units, modules.number_of, modules.units_of
        self._lists = modules.lists
        self._residency, self._forwards = executor.schedule.residency, executor.schedule.forwards
        self._backwards = executor.schedule.backwards
        self._has_releasable = any(unit.is_releasable for unit in self._units)
        self._has_communicators = transport.runs_on_streams and transport.has_peers
        # Whether the outermost forward of the whole model began with gradients enabled, the timer's span of it, and the
        # number of the first node that it may have made.
        self._forward_has_grad, self._forward_span, self._first_node = False, -1, 0
        max_live_numel = config.zero_optimization.max_live_parameters
        # By module: the route to what its last forward has saved.
        self._routes = [GraphRoute() for _ in modules.units_of]
        self.gatherer = Gatherer(executor, transport, max_live_numel, timer, self._gather_for_use, self.abandon)
        self.backward = Backward(executor, self.gatherer, reducer, config.scales_loss, timer, listener)
        # The graph owns this function, so the function refers to this object weakly.
        self._read_view = _reader(weakref.ref(self))
        # At lower stages the layers have no hooks, so that torch.compile may make one graph of the model.
        tied = add_in_place(model) if self._has_releasable else []
        self.hook_handles = [*self._register_hooks(modules), *tied, *self.backward.hook_handles]

    def _register_hooks(self, modules: ModuleNumbers) -> list[Any]:
        """Register hooks on the model, and on the modules that need units or hold lists of units."""
        # By module: whether the end of its forward matters. Where each rank updates a part of a unit that is never
        # released, the next forward must wait for the all-gather of the step, so such modules need hooks as well.
        hooked: dict[nn.Module, bool] = {}
        for module, number in modules.number_of.items():
            needed = [self._units[unit] for unit in modules.units_of[number]]
            if any(unit.offloaded_shards is not None or unit.degrees.optimizer > 1 for unit in needed):
                hooked[module] = any(unit.is_releasable for unit in needed)
            if number in modules.lists:
                hooked[module] = True
        handles: list[Any] = []
        # Pre-forward hooks are prepended, so that the user's hooks find the parameters gathered. Forward hooks are
        # called even if the forward raised (``always_call``), because otherwise its units would never be released.
        for module, has_end in hooked.items():
            begin = self._hook(Forward._enter)
            handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            if has_end:
                end = self._hook(Forward._leave)
                handles.append(module.register_forward_hook(end, with_kwargs=True, always_call=True))
        # A list of the model itself is completed before the forward of the model ends, so this hook comes later. These
        # two hide their own work on the whole model, because they may enter a mode that outlives the hook.
        end = self._hook(Forward._leave_model, is_hidden=False)
        handles.append(self._model.register_forward_hook(end, always_call=True))
        # The forward of the whole model begins before any of its modules gathers, the model itself included.
        begin = self._hook(Forward._enter_model, is_hidden=False)
        handles.append(self._model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
        return handles

    def _hook(self, method: Callable[..., Any], *, is_hidden: bool = True) -> UncopiedHook:
        # The model owns its hooks. A strong reference would keep the full buffers alive as long as the model.
        forward_ref = weakref.ref(self)

        def hook(module: nn.Module, *args: Any) -> Any:
            forward = forward_ref()
            # A shallow copy of the model has the same hooks. They must do nothing there.
            if forward is not None and (module in forward._number_of or module is forward._model):
                if is_hidden and num_dispatch_modes():
                    with hidden_from_activation_checkpoint():
                        return method(forward, module, *args)
                return method(forward, module, *args)
            return None

        return UncopiedHook(hook)

    @property
    def num_model_forwards(self) -> int:
        """The number of forwards of the whole model that are in progress. They may be nested."""
        return self._residency.num_forwards

    def abandon(self) -> None:
        """Forget forwards whose end no hook reported. Call this where none can be in progress."""
        if self._residency.num_forwards:
            self._timer.end(self._forward_span)
        self._executor.forget_interrupted()
        self._executor.tell(ForwardsAbandoned())
        self.gatherer.deferred_frees.retry()

    # -- the whole model --------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell the listener, and begin a pass, if no forward and no backward is in progress.

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
        self._listener.begin_model_forward(args, kwargs)
        with hidden_from_activation_checkpoint():
            self._begin_model_forward()

    def _begin_model_forward(self) -> None:
        has_grad, is_outermost = torch.is_grad_enabled(), not self._residency.num_forwards
        # A forward inside a backward is a recomputation.
        in_backward = self.backward.follow()
        if is_outermost and not in_backward:
            self.gatherer.check_no_stream("a forward")
            # The units of a backward that raised are released before this forward gathers any.
            self.backward.enter_forward()
            self.gatherer.deferred_frees.retry()
            if not self._residency.num_pins and (has_grad or self._has_releasable):
                self._num_forwards[has_grad] += 1
        self._executor.tell(ForwardBegan(has_grad, threading.get_ident()))
        if is_outermost:
            self._first_node, self._forward_has_grad = next_node_number(), has_grad
            # A forward inside a backward is part of that, and one without gradients, as in an evaluation, is no
            # forward of a step.
            self._forward_span = -1 if in_backward else self._timer.begin("forward" if has_grad else "other")

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell the listener, and end the pass: release what was gathered without hooks."""
        if self._residency.num_forwards > 1:
            self._executor.tell(ForwardEnded())
            return
        self._listener.end_model_forward()
        with hidden_from_activation_checkpoint():
            self._end_model_forward(output)

    def _end_model_forward(self, output: Any) -> None:
        in_backward = self._backwards.is_running
        shows_outputs = False
        if self._forward_has_grad and not in_backward and not functorch_active():
            shows_outputs = self.backward.note_outputs(tensors_in(output))
        # The hooks of modules have replaced the views that their own forwards saved. The graph of the whole model is
        # searched for views of units that were gathered without a hook or stay gathered, and of aliased buffers. What
        # is replaced depends on this graph alone, because its reads gather: an older graph may be alive on one rank.
        if not in_backward:
            used_unhooked = {*self._residency.unhooked, *self._residency.pinned()}
            units = [
                unit
                for unit in self._units
                if unit.is_releasable and (unit.number in used_unhooked or self._is_aliased(unit))
            ]
            self._replace_saved_views(tensors_in(output), self._first_node, units)
        self._executor.tell(ForwardEnded(shows_outputs))
        self.gatherer.deferred_frees.retry()
        if not in_backward:
            self.gatherer.deferred_frees.warn_of_memory()
        self._timer.end(self._forward_span)
        if not in_backward:
            self.backward.leave_forward()
            # A forward without autograd is one of an evaluation, or of generation.
            self._timer.note_training() if torch.is_grad_enabled() else self._timer.note_evaluation()

    def _is_aliased(self, unit: Unit) -> bool:
        has_memory = unit.is_gathered or unit in self.gatherer.deferred_frees.waiting
        return has_memory and unit.full_buffer.is_aliased(exactly=False)

    # -- modules ----------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        """Return what autograd says now, where the forward of a module begins or ends."""
        has_grad = torch.is_grad_enabled()
        asks = not has_grad and self._forwards.asks_for_checkpoint()
        in_backward = bool(self._backwards.cursors)
        # A checkpoint that is not reentrant recomputes when a node reads a tensor.
        recomputes = in_backward and is_in_recomputation()
        return Moment(
            has_grad,
            next_node_number(),
            threading.get_ident(),
            current_graph_task_id(),
            function_node_number() if asks else None,
            in_backward and has_grad and not recomputes,
            number_of_current_node() if recomputes else None,
        )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell the schedule that the forward of ``module`` begins."""
        # An activation checkpoint runs the forward again inside a backward.
        self.backward.follow()
        number = self._number_of[module]
        has_grad = torch.is_grad_enabled()
        is_outermost = not (self._residency.num_forwards or self._forwards.calls or self._backwards.cursors)
        if is_outermost and not self._residency.num_pins and self._needs_gathers(number):
            # A part of the model that is called by itself, as in generation, concerns all ranks like the whole.
            self._num_forwards[has_grad] += 1
        event = Entered(number, self._moment(), has_grad and not functorch_active())
        # The schedule has begun the call when the inputs are looked at, and gathers nothing before.
        expects = number in self._lists
        self._executor.tell(event, (lambda: self._expect_inputs(number, (args, kwargs))) if expects else None)

    def _expect_inputs(self, module: int, inputs: Any) -> None:
        """Let autograd report when it comes to the inputs of a module that holds a list, whose forward has begun."""
        call = self._forwards.call_of(module)
        if call is not None and call.walk is not None and call.is_tracked:
            # Nothing else shows where items have their places that this rank skips before it calls one.
            for tensor in tensors_in(inputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(WeakMethod(self.backward, Backward.reach_inputs, call.log, call.visit))

    def _needs_gathers(self, module: int) -> bool:
        return any(self._units[unit].is_releasable for unit in self._units_of[module])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Tell the schedule that the forward of ``module`` has ended, and replace the views that the graph saved.

        Returns:
            The output. It is another one where a backward would not come to the module otherwise.
        """
        number, has_grad = self._number_of[module], torch.is_grad_enabled()
        call = self._forwards.call_of(number)
        # A pre-forward hook of the user may have raised before ours ran.
        if call is None:
            return output
        if call.walk is not None and not (output is None and is_raising()):
            self._executor.tell(ListEnded(number, self._moment()))
            if has_grad and not functorch_active() and self._called_nothing_trainable(call.walk):
                output = require_gradients(output)
        visit, units = call.visit, call.visit.units
        tensors = [output] if type(output) is torch.Tensor else list(tensors_in(output))
        outputs = autograd_outputs(tensors, visit.first_node) if call.is_tracked and has_grad else []
        last_node = max(map(number_of, outputs)) if outputs else None
        in_checkpoint = bool(outputs) and call.walk is not None and is_in_checkpoint()
        if outputs:
            self.backward.expect(call.log, visit, outputs)
            if not self._backwards.cursors:
                needed = [self._units[unit] for unit in units]
                self._replace_saved_views(tensors, visit.first_node, needed, self._routes[number])
        self._executor.tell(Left(number, self._moment(), last_node, bool(tensors), in_checkpoint))
        deferred_frees = self.gatherer.deferred_frees
        if deferred_frees.waiting:
            if any(self._units[unit] in deferred_frees.waiting for unit in units):
                # The graph may have saved something beside the route.
                self._routes[number].note_change()
            deferred_frees.retry()
        return output

    def _called_nothing_trainable(self, walk: ListWalk) -> bool:
        """Return whether the list has trainable items, and this rank has called none of these."""
        if not walk.skipped_indices:
            return False
        trainable = {
            index
            for index, units in enumerate(walk.item_list.units)
            if any(self._units[unit].gets_gradients for unit in units)
        }
        return bool(trainable) and trainable <= walk.skipped_indices

    def _replace_saved_views(
        self, tensors: Iterable[torch.Tensor], first_node: int, units: Sequence[Unit], route: GraphRoute | None = None
    ) -> None:
        deferred_frees = self.gatherer.deferred_frees
        with_values = [unit for unit in units if unit.state is GatherState.GATHERED or unit in deferred_frees.waiting]
        if with_values:
            saved_by_user_hooks = replace_saved_views(tensors, first_node, with_values, self._read_view, route)
            if saved_by_user_hooks:
                deferred_frees.keep_until_update(saved_by_user_hooks)

    # -- uses that no hook announced --------------------------------------------------------------

    def _used(self, unit: Unit, *, is_saved: bool) -> Used:
        return Used(unit.number, self._moment(), number_of_current_node(), is_saved)

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
        if unit.is_released and not (self.backward.follow() or self._residency.num_forwards):
            slot = next(s for p, s in zip(unit.params, unit.layout.slots, strict=True) if p is param)
            raise ReleasedParameterError(
                f"parameter {slot.name} {slot.shape} is partitioned and released: `{operation}` needs its values. "
                "Write `with zeroengine.gathered(module_or_params):` around the code, on every rank, or use "
                "engine.full_state_dict() to copy all of them."
            )
        with hidden_from_activation_checkpoint():
            self._executor.tell(self._used(unit, is_saved=False))

    def _gather_for_saved_view(self, unit: Unit) -> None:
        """Gather a unit of which the graph saved a view that is read now."""
        with outside_torch_func():
            if not (self.backward.follow() or self._residency.num_forwards):
                raise ReleasedParameterError(
                    f"a tensor that the graph saved from a parameter of unit {unit.name} is read outside of a "
                    "backward, where other ranks may not do the same: write `with "
                    "zeroengine.gathered(module_or_params):` around it"
                )
            self._executor.tell(self._used(unit, is_saved=True))


def _reader(forward_ref: weakref.ref[Forward]) -> Callable[[Packed], torch.Tensor]:
    """Return the function that a backward calls for a tensor which the graph saved as a view of a parameter."""

    @disable_compile
    def read(packed: Packed) -> torch.Tensor:
        view, version = packed
        forward = forward_ref()
        if forward is None:
            raise ZeroEngineError(
                "this backward needs parameters of an engine that is gone: keep the engine until it ends"
            )
        if view.unit.state is not GatherState.GATHERED:
            forward._gather_for_saved_view(view.unit)
        return view.restore(version)

    return read
