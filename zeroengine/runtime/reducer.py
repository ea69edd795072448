"""Reduces gradients over the ranks while autograd computes the next ones.

[Note: The path of a gradient]
1. Autograd accumulates a gradient into ``param.grad`` and calls the parameter's hook (``gradient_hooks.py``).
2. The hook takes ``param.grad`` away and copies it, cast to the dtype that is sent, into a gradient buffer. The first
   gradient of a unit passes through ``Backward`` and ``add``, which decide where (``ReduceLauncher.copy_to_slot``).
   This is the only copy. On a GPU, copies are collected and launched together (``CastCopies``).
3. When all gradients of a unit have arrived, and those of all units before it in the fixed order, the unit joins the
   bucket. This is a queue (``BucketQueue``), not memory. When its units have ``reduce_bucket_size`` elements, the
   reduces of all of them are launched, one collective for each unit (``ReduceLauncher.launch``).
4. A reduce-scatter leaves this rank's shard of the sum in ``UnitGradients.flat_grads``. With gradient accumulation each
   micro-step is reduced and added there.
5. In ``Engine.step``, ``StepLoop`` waits for the reduces (``reduce_remaining``). ``StepRunner`` then calls the backend
   of the optimizer, which reads the shards for the norm and for the update, and ``end_step`` lets the next gradients
   overwrite them.

Where gradients are not sharded (stages 0 and 1) the copy goes to ``flat_grads`` itself, which holds the gradients of
the whole unit. Micro-steps accumulate there and only the last one is reduced: by an all-reduce at optimizer degree 1,
by a reduce-scatter of this rank's part otherwise. In one process all degrees are 1, so stage 2 takes the path of stage
0. Offloaded gradients count as sharded at any degree: they always pass through a gradient buffer.

Inside ``no_sync`` sharded gradients wait in ``deferred_grads``. The next micro-step outside of ``no_sync`` adds them to
the gradient buffer. With offload the sum is reduced into a staging buffer and written from there to the store; its norm
is computed on the way (``OffloadedGradients``).

Outside of a backward ``param.grad`` is None, or the user's: see "Who owns param.grad" in ``user_gradients.py``.

A unit may get gradients after it was reduced: see "Several gradients of one parameter" in ``schedule/reduce_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.ops import digest
from zeroengine.runtime.autograd_hooks import WeakMethod
from zeroengine.runtime.dtensors import local_gradient
from zeroengine.runtime.executor import Executor
from zeroengine.runtime.reduce_launcher import ReduceLauncher
from zeroengine.runtime.released_parameter import drop_gradient_of
from zeroengine.runtime.step_losses import StepLosses
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.runtime.user_gradients import UserGradients
from zeroengine.schedule import events
from zeroengine.schedule.actions import Complete, Fate, Reduce, TakeWaiting
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass


class Reducer:
    """Owns the gradients of the trainable units. It knows nothing of parameters' values, nor of autograd's graph.

    Args:
        config: The resolved configuration.
        collects_copies: Whether copies into buffers are collected and launched together, which saves time on a GPU.
        loss_scale: Returns the factor of the loss.
        timer: Times reduces.

    Attributes:
        losses: The losses of the step in progress, and their weights.
        launcher: Copies gradients to where they are reduced, and reduces them.
        gradients: The gradients of each trainable unit, in the order of the units.
        micro_steps_in_mean: The number of micro-steps that the mean gradient is taken over.
        gradient_factor: The update uses this multiple of the mean gradient. The world size gives the sum over ranks.
        user_gradients: Finds what user code assigns to ``param.grad``.
        progress: Lets reduces in progress proceed.
        assigned_digests: By parameter, the digest of what user code assigned after the unit was reduced in this step,
            0-d. None: the gradient was dropped, or the parameter is frozen.
        has_late_gradients: Whether a gradient arrived after its unit was reduced in this step, and waits on this rank.
    """

    def __init__(
        self,
        executor: Executor,
        gradients: Sequence[UnitGradients],
        transport: Transport,
        config: Config,
        collects_copies: bool,
        loss_scale: Callable[[], float],
        losses: StepLosses,
        timer: Timer,
    ) -> None:
        self._executor, self._reduce_order, self._transport = executor, executor.schedule.reduce_order, transport
        self._timer, self.losses = timer, losses
        self.micro_steps_in_mean, self._loss_scale, self.gradient_factor = config.micro_steps_in_mean, loss_scale, 1.0
        self.gradients = gradients
        self._gradients_of = {unit_grads.unit.number: unit_grads for unit_grads in gradients}
        self.launcher = ReduceLauncher(gradients, transport, config, collects_copies, timer)
        self.progress = transport.progress
        self.has_late_gradients = False
        self.user_gradients = UserGradients(executor.units, gradients)
        self.assigned_digests: dict[nn.Parameter, torch.Tensor | None] = {}
        executor.let_perform(Complete, self._complete)
        executor.let_perform(TakeWaiting, self._take_waiting)
        executor.let_perform(Reduce, self._reduce)

    def divisor(self) -> float:
        """Return the number that a summed gradient is divided by for the mean over ranks and micro-steps.

        With another ``gradient_factor`` the result is that multiple of the mean. Where losses have weights, the sum of
        these over the ranks divides as well, and ranks and micro-steps do not.
        """
        if self.losses.is_weighted:
            return self._loss_scale() / self.launcher.predivide
        copies = self._transport.world_size * self.micro_steps_in_mean
        return copies * self._loss_scale() / (self.launcher.predivide * self.gradient_factor)

    # -- what the schedule says -------------------------------------------------------------------

    def _complete(self, action: Complete) -> None:
        unit_grads = self._gradients_of[action.unit]
        if action.takes_written:
            self._accept_written(unit_grads, action.fate)
        if action.takes_waiting and action.fate is Fate.TAKEN:
            for index, count in enumerate(self._reduce_order.arrived(action.unit)):
                if not count and index in unit_grads.deferred_grads:
                    self.launcher.copy_to_slot(unit_grads, index)

    def _take_waiting(self, action: TakeWaiting) -> None:
        unit_grads = self._gradients_of[action.unit]
        for index in sorted(unit_grads.deferred_grads):
            self.launcher.copy_to_slot(unit_grads, index)

    def _reduce(self, action: Reduce) -> None:
        if self._executor.tell_launch is not None:
            self._executor.tell_launch(action)
        self.launcher.launch(self._gradients_of[action.unit])
        if self._executor.launches is not None:
            self._executor.launches.append(action)

    # -- backward ---------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Take over what the user has assigned, before autograd adds gradients of this call to it."""
        self.user_gradients.stop_watching()
        self.take_assigned_gradients()
        self.user_gradients.restart()

    def add(self, unit_grads: UnitGradients, index: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient that autograd has computed.

        Args:
            unit_grads: The gradients of the parameter's unit.
            index: The index of the parameter in the unit.
            gradient: In the shape of the parameter. None: a Function returned none.
        """
        number = unit_grads.unit.number
        # The schedule has to know of all that have arrived.
        self._executor.tell_arrived()
        fate = self._reduce_order.fate(number)
        if gradient is not None:
            self._accept(unit_grads, index, gradient, fate)
        self._executor.tell(events.GradientsArrived(number, (index,)))
        num_pending = self._reduce_order.num_pending(number)
        # A timeline shows when the gradients of each unit were complete.
        if num_pending and fate is Fate.TAKEN and not self._timer.tracing:
            self.launcher.open(unit_grads, self._executor.arriving, num_pending)
        elif not num_pending and self._timer.tracing:
            self._timer.name_backward(unit_grads.unit.name)

    def _accept(self, unit_grads: UnitGradients, index: int, gradient: torch.Tensor, fate: Fate) -> None:
        """Copy a gradient of the backward in progress to where it is reduced from, or let it wait."""
        # A backward with create_graph=True gives the gradient a history.
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if unit_grads.has_slices:
            gradient = local_gradient(unit_grads.unit.params[index], gradient)
        if fate is Fate.TAKEN:
            self.launcher.copy_to_slot(unit_grads, index, gradient)
            return
        self.has_late_gradients = self.has_late_gradients or fate is Fate.LATE
        # Micro-steps inside no_sync add up in the accumulation dtype.
        if index in unit_grads.deferred_grads:
            unit_grads.deferred_grads[index].add_(gradient)
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            # The user may hold the tensor, to which others will be added.
            unit_grads.deferred_grads[index] = dense.to(unit_grads.format.dtype, copy=True)

    def end_call(self) -> None:
        """Note that a plain call has ended. Let all units be reduced that have not been, unless another is expected."""
        self._executor.tell(events.CallEnded())
        self.user_gradients.watch()

    def _accept_written(self, unit_grads: UnitGradients, fate: Fate) -> None:
        """Accept the gradients that a Function or a hook of the user has left in ``param.grad`` in this backward."""
        with DisableTorchFunctionSubclass():
            written = [(i, p.grad) for i, p in enumerate(unit_grads.unit.params) if p.grad is not None]
        for index, gradient in written:
            drop_gradient_of(unit_grads.unit.params[index])
            assert gradient is not None
            self._accept(unit_grads, index, gradient, fate)

    def end_backward(self) -> int:
        """Launch the reduces that were not launched during the backward, in order.

        Returns:
            The number of plain calls that the backward consists of; 0 for ``Engine.backward``.
        """
        self._executor.tell(events.GradientsEnded())
        self.launcher.flush_copies()
        self.user_gradients.watch()
        return self._reduce_order.num_calls

    # -- step -------------------------------------------------------------------------------------

    def reduce_remaining(self) -> None:
        """Return with every gradient reduced into ``flat_grads``, except late gradients. Call this on every rank."""
        self._executor.tell(events.StepBegan())
        self.launcher.wait()

    def reduce_late_gradients(self) -> None:
        """Reduce the gradients that arrived after their unit was reduced. Call it on every rank if any has some."""
        self.launcher.reduce_late([self._gradients_of[unit] for unit in self._reduce_order.order])
        self.has_late_gradients = False

    def end_step(self) -> None:
        """Let the next gradients overwrite those of the step that ended."""
        self._executor.tell(events.StepEnded())
        for unit_grads in self.gradients:
            unit_grads.end_step()
        self.assigned_digests.clear()
        self.user_gradients.stop_watching()
        self.user_gradients.restart()

    def drop_gradients(self) -> None:
        """Drop every gradient since the last step. Reduces that were launched finish first."""
        self.launcher.drop()
        self._executor.tell(events.GradientsDropped())
        self.has_late_gradients = False
        for unit_grads in self.gradients:
            unit_grads.deferred_grads.clear()
        self.user_gradients.drop()
        self.end_step()

    def tensors(self) -> list[torch.Tensor]:
        """Return what is kept on the device between backwards: sums, gradients that wait, and errors of packing."""
        sums = [unit_grads.flat_grads for unit_grads in self.gradients if unit_grads.store is None]
        waiting = [tensor for unit_grads in self.gradients for tensor in unit_grads.deferred_grads.values()]
        return sums + waiting + self.launcher.kept_errors()

    # -- reading and replacing gradients ----------------------------------------------------------

    def unreduced_gradient(self, unit_grads: UnitGradients, index: int) -> torch.Tensor | None:
        """Return this rank's contribution to the next reduce of a parameter's gradient, in fp32 or wider."""
        deferred = unit_grads.deferred_grads.get(index)
        parts = [] if deferred is None else [deferred / self.launcher.predivide]
        if not unit_grads.format.is_sharded and unit_grads.slot_filled[index] and not unit_grads.launched_in_step:
            parts.append(unit_grads.param_views[index])
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        return torch.stack(wide).sum(0) if wide else None

    def take_assigned_gradients(self) -> bool:
        """Take over what user code has assigned to ``param.grad``. See "Who owns param.grad" in ``user_gradients.py``.

        Returns:
            Whether there was something.
        """
        assigned = self.user_gradients.take()
        if assigned:
            self.launcher.wait()
        for assignment in assigned:
            unit_grads, index = assignment.unit_grads, assignment.index
            param, value = unit_grads.unit.params[index], None
            if assignment.is_zero:
                has_gradient = unit_grads.has_grad[index] or index in unit_grads.deferred_grads
                self.replace_gradient(unit_grads, index, None, 0)
                # Unlike one that is None, a gradient of zero is one.
                unit_grads.has_grad[index] = has_gradient
                self.assigned_digests[param] = digest(torch.ones(1, device=param.device))
                continue
            if assignment.value is not None:
                value = local_gradient(param, assignment.value.detach()).to_dense().contiguous()
            # A rank that drops a gradient differs from one that leaves it.
            self.assigned_digests[param] = None if value is None else digest(value)
            self.replace_gradient(unit_grads, index, value, 1 / unit_grads.transport.world_size)
        for param in self.user_gradients.of_frozen():
            # A rank that has none differs from the others, and all of them learn of it in the sum of the step.
            self.assigned_digests[param] = None
        return bool(assigned)

    @property
    def num_summed(self) -> int:
        """The ranks whose gradients are added: all, but of a split model those of a data group."""
        return self._transport.world_size

    def note_assigned(self, param: nn.Parameter, is_zero: bool = False) -> None:
        """Note that user code has assigned to the gradient of ``param``, perhaps None, outside of a backward."""
        self.user_gradients.note_assigned(param, WeakMethod(self, Reducer.take_assigned_gradients), is_zero)

    def check_frozen(self) -> None:
        """Check that nothing was assigned to gradients that no update uses.

        Raises:
            ZeroEngineError: A parameter was frozen at ``initialize``, and has a gradient.
        """
        for name in self.user_gradients.of_frozen().values():
            raise ZeroEngineError(
                f"parameter {name} was frozen at initialize(), and its .grad was assigned: no update would use it, "
                "because the parameter has no master and no moments. Make it trainable before initialize(), or set "
                ".grad to None."
            )

    def replace_gradient(self, unit_grads: UnitGradients, index: int, value: torch.Tensor | None, share: float) -> None:
        """Make ``value`` the mean gradient of a parameter so far. Call this on every rank, with reduces awaited.

        Args:
            unit_grads: The gradients of the parameter's unit.
            index: The index of the parameter in the unit.
            value: The mean gradient. None: the parameter has no gradient.
            share: The part of ``value`` that this rank adds to the sum, if the unit is still to be reduced. The shares
                of all ranks add up to 1.
        """
        if value is not None and self.losses.is_weighted:
            raise ZeroEngineError(
                "a gradient was assigned in a step whose losses have weights, whose sum over the ranks is not known "
                "before the step: change the loss in its place, or take this step without weights"
            )
        self.losses.is_plain = self.losses.is_plain or value is not None
        unit = unit_grads.unit
        unit_grads.deferred_grads.pop(index, None)
        unit_grads.has_grad[index] = value is not None
        # The engine keeps sums rather than means, which the update divides by the divisor.
        summed = None
        if value is not None:
            summed = value.to(torch.promote_types(value.dtype, torch.float32)) * self.divisor()
        if not unit_grads.launched_in_step:
            unit_grads.slot_filled[index] = False
            if summed is not None and share:
                unit_grads.deferred_grads[index] = (summed * (share * self.launcher.predivide)).to(
                    unit_grads.format.dtype
                )
            return
        # The kept norm belongs to the old sum. The norm of the step is then computed from the new values.
        unit_grads.squared_norm = None
        shard = unit_grads.shard_of_degree(unit.degrees.optimizer)
        for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
            if span.param_index == index:
                target = shard[span.shard_slice]
                # The shard may be a mapped file. If the disk fails this raises, whereas a use would end the process.
                populate(target, write=True)
                target.zero_() if summed is None else target.copy_(summed.reshape(-1)[span.param_slice])
