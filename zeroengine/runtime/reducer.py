"""Reduces gradients over the ranks while autograd computes the next ones.

[Note: The path of a gradient]
1. Autograd accumulates a gradient into ``param.grad`` and calls the parameter's hook, which ``Backward`` owns.
2. The hook takes ``param.grad`` away, and ``add`` copies it, cast to the dtype that is sent, into a gradient buffer
   (``UnitReduces.copy_to_slot``). This is the only copy. On a GPU, copies are collected and launched together
   (``CastCopies``).
3. When all gradients of a unit have arrived, and those of all units before it in the fixed order, the unit joins the
   bucket. This is a queue (``BucketQueue``), not memory. When its units have ``reduce_bucket_size`` elements, the
   reduces of all of them are launched, one collective for each unit (``UnitReduces.launch``).
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

[Note: Units are reduced in one order]
Every rank reduces the units in the reverse of their order. A unit that is complete early waits for the units before
it. A unit with unused parameters never completes. It is reduced with zeros for the missing gradients when all visits of
it are over (see "One order of collectives" in ``visit_log.py``), or when the whole backward ends. So ranks that use
different parameters agree on every collective, and a rank that waits for memory of an earlier reduce does not wait for
the end of another rank's backward, which may need its own gathers.

A unit may get gradients after it was reduced: see "Several gradients of one parameter" in ``unit_gradients.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.ops import digest
from zeroengine.runtime.autograd_hooks import WeakMethod
from zeroengine.runtime.bucket_queue import BucketQueue
from zeroengine.runtime.released_parameter import drop_gradient_of
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.runtime.unit_reduces import UnitReduces
from zeroengine.runtime.user_gradients import UserGradients
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass


class Reducer:
    """Owns the gradients of the trainable units. It knows nothing of parameters' values, nor of autograd's graph.

    Args:
        config: The resolved configuration.
        stores: For each trainable unit, the store of its summed gradients. None: they stay on the device.
        collects_copies: Whether copies into buffers are collected and launched together, which saves time on a GPU.
        loss_scale: Returns the factor of the loss.
        timer: Times reduces.

    Attributes:
        reduces: Copies gradients to where they are reduced, and reduces them.
        gradients: The gradients of each trainable unit, in the order of the units.
        micro_steps_in_mean: The number of micro-steps that the mean gradient is taken over.
        gradient_factor: The update uses this multiple of the mean gradient. The world size gives the sum over ranks.
        user_gradients: Finds what user code assigns to ``param.grad``.
        assigned_digests: By parameter, the digest of what user code assigned after the unit was reduced in this step,
            0-d. None: the gradient was dropped, or the parameter is frozen.
        has_late_gradients: Whether a gradient arrived after its unit was reduced in this step, and waits on this rank.
        reduces_gradients: Whether gradients are reduced over the ranks; False inside ``no_sync``.
        is_last_microbatch: Whether the backward in progress is probably the last one before the update.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        transport: Transport,
        config: Config,
        stores: Sequence[OffloadStore | None],
        collects_copies: bool,
        loss_scale: Callable[[], float],
        timer: Timer,
    ) -> None:
        units = list(units)
        self._transport = transport
        self.micro_steps_in_mean, self._loss_scale, self.gradient_factor = config.micro_steps_in_mean, loss_scale, 1.0
        self.gradients = [
            UnitGradients(
                unit, transport, config.accumulation_dtype(unit.dtype), config.reduce_dtype(unit.dtype), store
            )
            for unit, store in zip((unit for unit in units if unit.trainable), stores, strict=True)
        ]
        self._gradients_of = {unit_grads.unit: unit_grads for unit_grads in self.gradients}
        self.reduces = UnitReduces(self.gradients, transport, config, collects_copies, timer)
        self._queue = BucketQueue(self.gradients[::-1], config.zero_optimization.reduce_bucket_size or 0)
        self.reduces_gradients = self.is_last_microbatch = True
        # The number of plain ``loss.backward()`` calls that the backward in progress is expected to have, and that have
        # ended. ``Engine.backward`` counts as none.
        self._expected_calls, self._num_ended_calls, self._run_by_engine = 1, 0, False
        self.has_late_gradients = False
        self.user_gradients = UserGradients(units, self.gradients)
        self.assigned_digests: dict[nn.Parameter, torch.Tensor | None] = {}

    def divisor(self) -> float:
        """Return the number that a summed gradient is divided by for the mean over ranks and micro-steps.

        With another ``gradient_factor`` the result is that multiple of the mean.
        """
        copies = self._transport.world_size * self.micro_steps_in_mean
        return copies * self._loss_scale() / (self.reduces.predivide * self.gradient_factor)

    # -- backward ---------------------------------------------------------------------------------

    def begin_backward(self, *, by_engine: bool) -> None:
        """Wait for the gradients of every unit.

        Args:
            by_engine: Whether ``Engine.backward`` runs the backward, rather than plain calls.
        """
        self._num_ended_calls, self._run_by_engine = 0, by_engine
        self._queue.restart()
        for unit_grads in self.gradients:
            unit_grads.expect_gradients()

    def begin_call(self) -> None:
        """Take over what the user has assigned, before autograd adds gradients of this call to it."""
        self.user_gradients.stop_watching()
        self.take_assigned_gradients()
        self.user_gradients.restart()

    def _is_reduced_in_backward(self, unit_grads: UnitGradients) -> bool:
        """Return whether the backward in progress reduces the unit, now or at its end."""
        if unit_grads.format.is_sharded:
            return self.reduces_gradients
        # These gradients are reduced once, at the end of a step.
        is_last = self.reduces_gradients and self.is_last_microbatch
        return is_last and not unit_grads.launched_in_step

    def _is_deferred(self, unit_grads: UnitGradients) -> bool:
        """Return whether a new gradient must wait: inside no_sync, or because the reduce of its unit has begun."""
        if self._is_reduced_in_backward(unit_grads):
            # A complete unit may still wait for those before it. How long it waits must not change the order of sums.
            return not unit_grads.num_pending
        # Gradients that are not sharded are added to the kept sum even inside no_sync.
        return unit_grads.format.is_sharded or unit_grads.launched_in_step

    def add(self, unit_grads: UnitGradients, index: int, gradient: torch.Tensor | None) -> bool:
        """Add a gradient that autograd has computed. Return whether the unit has all its gradients.

        Args:
            unit_grads: The gradients of the parameter's unit.
            index: The index of the parameter in the unit.
            gradient: In the shape of the parameter. None: a Function returned none.
        """
        is_deferred = self._is_deferred(unit_grads)
        if self._num_further_calls == 0:
            unit_grads.count_arrival(index)
        if gradient is not None:
            self._accept(unit_grads, index, gradient, is_deferred=is_deferred)
        return not unit_grads.num_pending

    def progress(self) -> None:
        """Let reduces in progress proceed: peers may have become ready for a sum since this rank launched it."""
        self._transport.progress()

    def _accept(self, unit_grads: UnitGradients, index: int, gradient: torch.Tensor, *, is_deferred: bool) -> None:
        """Copy a gradient of the backward in progress to where it is reduced from, or let it wait."""
        # A backward with create_graph=True gives the gradient a history.
        gradient = gradient.detach()
        if not is_deferred:
            self.reduces.copy_to_slot(unit_grads, index, gradient)
            return
        # A gradient that waits after its unit was reduced is late. The other ranks do not know about it.
        is_late = unit_grads.launched_in_step or self._is_reduced_in_backward(unit_grads)
        self.has_late_gradients = self.has_late_gradients or is_late
        # Micro-steps inside no_sync add up in the accumulation dtype.
        if index in unit_grads.deferred_grads:
            unit_grads.deferred_grads[index].add_(gradient)
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            # The user may hold the tensor, to which others will be added.
            unit_grads.deferred_grads[index] = dense.to(unit_grads.format.dtype, copy=True)

    def complete_with_zeros(self, unit: Unit) -> bool:
        """Let ``unit`` be reduced without the gradients that it lacks. Return whether it lacks any."""
        unit_grads = self._gradients_of[unit]
        if not unit_grads.num_pending or self._num_further_calls > 0:
            return False
        self._accept_written(unit_grads)
        self._copy_earlier_gradients(unit_grads)
        unit_grads.num_pending = 0
        return True

    @property
    def _num_further_calls(self) -> int:
        """The number of plain ``loss.backward()`` calls that are expected after the present one.

        A backward is expected to have as many calls as the previous one had. Below 0: it has had more.
        """
        return 0 if self._run_by_engine else self._expected_calls - 1 - self._num_ended_calls

    def end_call(self) -> None:
        """Note that a plain call has ended. Let all units be reduced that have not been, unless another is expected."""
        self._end_units(accepts_written=True, ends=self._num_further_calls <= 0)
        self.user_gradients.watch()
        self._num_ended_calls += 1

    def _end_units(self, *, accepts_written: bool, ends: bool = True) -> None:
        # Unit by unit, so that the buffer of one serves another as soon as it was reduced.
        for unit_grads in self._queue.order:
            if accepts_written:
                self._accept_written(unit_grads)
            if ends:
                self._copy_earlier_gradients(unit_grads)
                unit_grads.stop_expecting()
                self.advance()

    def _accept_written(self, unit_grads: UnitGradients) -> None:
        """Accept the gradients that a Function or a hook of the user has left in ``param.grad`` in this backward."""
        with DisableTorchFunctionSubclass():
            written = [(i, p.grad) for i, p in enumerate(unit_grads.unit.params) if p.grad is not None]
        is_deferred = self._is_deferred(unit_grads)
        for index, gradient in written:
            drop_gradient_of(unit_grads.unit.params[index])
            assert gradient is not None
            self._accept(unit_grads, index, gradient, is_deferred=is_deferred)

    def _copy_earlier_gradients(self, unit_grads: UnitGradients) -> None:
        """Copy the gradients of earlier backwards inside no_sync of parameters that have none in this backward."""
        if not self._is_deferred(unit_grads):
            for index, count in enumerate(unit_grads.arrived_counts):
                if not count and index in unit_grads.deferred_grads:
                    self.reduces.copy_to_slot(unit_grads, index)

    def end_backward(self) -> int:
        """Launch the reduces that were not launched during the backward, in order.

        Returns:
            The number of plain calls that the backward consists of; 0 for ``Engine.backward``.
        """
        num_calls = self._num_ended_calls
        self._expected_calls = num_calls or self._expected_calls
        # After a plain call the user may have assigned gradients since the call ended.
        self._end_units(accepts_written=not num_calls)
        for unit_grads in self._queue.take_bucket():
            self.reduces.launch(unit_grads)
        self.reduces.flush_copies()
        self.user_gradients.watch()
        return num_calls

    def advance(self, is_pending: Callable[[Unit], bool] | None = None) -> None:
        """Move units into the bucket, up to the first one that is not ready. Launch the bucket when it is full.

        Args:
            is_pending: Returns whether a backward that runs has visits of a unit to come. None: no backward runs.
        """

        def is_ready(unit_grads: UnitGradients) -> bool:
            return not (unit_grads.num_pending or (is_pending is not None and is_pending(unit_grads.unit)))

        for unit_grads in self._queue.queue_in_order(is_ready, self._is_reduced_in_backward):
            self.reduces.launch(unit_grads)

    # -- step -------------------------------------------------------------------------------------

    def reduce_remaining(self) -> None:
        """Return with every gradient reduced into ``flat_grads``, except late gradients. Call this on every rank."""
        for unit_grads in self._queue.order:
            # Units whose micro-steps were all inside no_sync have not been reduced.
            if not unit_grads.launched_in_step:
                for index in sorted(unit_grads.deferred_grads):
                    self.reduces.copy_to_slot(unit_grads, index)
                self.reduces.launch(unit_grads)
        self.reduces.wait()

    def reduce_late_gradients(self) -> None:
        """Reduce the gradients that arrived after their unit was reduced. Call it on every rank if any has some."""
        self.reduces.reduce_late(self._queue.order)
        self.has_late_gradients = False

    def end_step(self) -> None:
        """Let the next gradients overwrite those of the step that ended."""
        for unit_grads in self.gradients:
            unit_grads.end_step()
        self.assigned_digests.clear()
        self.user_gradients.stop_watching()
        self.user_gradients.restart()

    def drop_gradients(self) -> None:
        """Drop every gradient since the last step. Reduces that were launched finish first."""
        self.reduces.drop()
        self._queue.take_bucket()
        self.has_late_gradients = False
        for unit_grads in self.gradients:
            unit_grads.num_pending = 0
            unit_grads.deferred_grads.clear()
        self.user_gradients.drop()
        self.end_step()

    def tensors(self) -> list[torch.Tensor]:
        """Return what is kept on the device between backwards: sums, gradients that wait, and errors of packing."""
        sums = [unit_grads.flat_grads for unit_grads in self.gradients if unit_grads.store is None]
        waiting = [tensor for unit_grads in self.gradients for tensor in unit_grads.deferred_grads.values()]
        return sums + waiting + self.reduces.kept_errors()

    # -- reading and replacing gradients ----------------------------------------------------------

    def unreduced_gradient(self, unit_grads: UnitGradients, index: int) -> torch.Tensor | None:
        """Return this rank's contribution to the next reduce of a parameter's gradient, in fp32 or wider."""
        deferred = unit_grads.deferred_grads.get(index)
        parts = [] if deferred is None else [deferred / self.reduces.predivide]
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
            self.reduces.wait()
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
                value = assignment.value.detach().to_dense().contiguous()
            # A rank that drops a gradient differs from one that leaves it.
            self.assigned_digests[param] = None if value is None else digest(value)
            self.replace_gradient(unit_grads, index, value, 1 / self._transport.world_size)
        for param in self.user_gradients.of_frozen():
            # A rank that has none differs from the others, and all of them learn of it in the sum of the step.
            self.assigned_digests[param] = None
        return bool(assigned)

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
                unit_grads.deferred_grads[index] = (summed * (share * self.reduces.predivide)).to(
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
