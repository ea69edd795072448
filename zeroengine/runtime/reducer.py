"""Reduces gradients over the ranks while autograd computes the next ones.

[Note: The path of a gradient]
1. Autograd accumulates a gradient into ``param.grad`` and calls the parameter's hook (``_post_accumulate_grad``).
2. The hook copies the gradient, cast to the dtype that is sent, into a gradient buffer and drops ``param.grad``
   (``_copy_to_slot``). This is the only copy. On a GPU, copies are collected and launched together (``CastCopies``).
3. When all gradients of a unit have arrived, and those of all units before it in the fixed order, the unit joins the
   bucket. This is a queue, not memory. When its units have ``reduce_bucket_size`` elements, the reduces of all of them
   are launched, one collective for each unit (``_launch_reduce``).
4. A reduce-scatter leaves this rank's shard of the sum in ``UnitGradients.flat_grads``. With gradient accumulation each
   micro-step is reduced and added there.
5. ``Engine.step`` waits for the reduces (``reduce_remaining``). The optimizer reads the shards for the norm and for the
   update, and ``end_step`` lets the next gradients overwrite them.

Where gradients are not sharded (stages 0 and 1) the copy goes to ``flat_grads`` itself, which holds the gradients of
the whole unit. Micro-steps accumulate there and only the last one is reduced: by an all-reduce at optimizer degree 1,
by a reduce-scatter of this rank's part otherwise. In one process all degrees are 1, so stage 2 takes the path of stage
0. Offloaded gradients count as sharded at any degree: they always pass through a gradient buffer.

Inside ``no_sync`` sharded gradients stay in ``param.grad``, or in ``deferred_grads`` if they accumulate in another
dtype. The next micro-step outside of ``no_sync`` adds them to the gradient buffer. With offload the sum is reduced into
a staging buffer and written from there to the store; its norm is computed on the way (``OffloadedGradients``).

[Note: Units are reduced in one order]
Every rank reduces the units in reverse order of registration. A unit that is complete early waits for the units before
it. A unit with unused parameters never completes. It is reduced with zeros for the missing gradients when its backward
is past, which the calls of its modules show (see "When a module's backward is over" in ``module_backwards.py``), or
when the whole backward ends. So ranks that use different parameters agree on every collective, and a rank that waits
for memory of an earlier reduce does not wait for the end of another rank's backward, which may need its own gathers.

A unit may get gradients after it was reduced: see "Several gradients of one parameter" in ``unit_gradients.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.quantized_transport import QuantizedReduce
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.runtime.backward_tracker import BackwardListener, BackwardTracker
from zeroengine.runtime.gradient_buffers import CastCopies, GradientBuffer, GradientBufferPool
from zeroengine.runtime.module_backwards import Hook
from zeroengine.runtime.offloaded_gradients import OffloadedGradients
from zeroengine.runtime.released_parameter import gradient_of
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Then, Work


class Reducer(BackwardListener):
    """Owns the gradients of the trainable units. It knows nothing of parameters' values.

    Args:
        config: The resolved configuration.
        backward: Reports when a backward begins and ends. The reducer reports each gradient and complete unit to it.
        stores: For each trainable unit, the store of its summed gradients. None: they stay on the device.
        collects_copies: Whether copies into buffers are collected and launched together, which saves time on a GPU.
        timer: Times reduces.

    Attributes:
        predivide: The number that gradients are divided by before they are summed, so that the sum of many ranks does
            not overflow. The update multiplies by it again.
        gradients: The gradients of each trainable unit, in the order of registration.
        hook_handles: The handles of the hooks on parameters.
        has_late_gradients: Whether a gradient arrived after its unit was reduced in this step, and waits on this rank.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        transport: Transport,
        config: Config,
        backward: BackwardTracker,
        stores: Sequence[OffloadStore | None],
        collects_copies: bool,
        timer: Timer,
    ) -> None:
        self._transport, self._channel, self._timer = transport, transport.reduce, timer
        # Elements of the units that one bucket holds at most. A larger unit is a bucket alone; 0 launches unit by unit.
        self._bucket_numel = config.zero_optimization.reduce_bucket_size or 0
        # None where gradients travel exactly.
        self._gradient_bits = config.zero_optimization.gradient_bits if transport.world_size > 1 else None
        self._backward = backward
        self.predivide = config.predivide(transport.world_size)
        self.gradients = [
            UnitGradients(
                unit, transport, config.accumulation_dtype(unit.dtype), config.reduce_dtype(unit.dtype), store
            )
            for unit, store in zip((unit for unit in units if unit.trainable), stores, strict=True)
        ]
        self._gradients_of = {unit_grads.unit: unit_grads for unit_grads in self.gradients}
        self._offloaded = OffloadedGradients(timer)
        self._copies = CastCopies(collects_copies)
        self._reduce_order = self.gradients[::-1]
        # The units of ``_reduce_order`` that have joined a bucket in this backward, or need no reduce.
        self._num_queued = 0
        # The number of plain ``loss.backward()`` calls that the backward in progress is expected to have.
        self._expected_calls = 1
        # Complete units, whose reduces are launched together.
        self._bucket: list[UnitGradients] = []
        # The reduces in progress, and the units that they are for.
        self._works: list[tuple[str, Work]] = []
        self._buffer_pool = GradientBufferPool(transport, self.gradients)
        # The gradient buffers that are being filled.
        self._buffer_of: dict[UnitGradients, GradientBuffer] = {}
        self.has_late_gradients = False
        # The parameter owns its hook in C++, so the hook takes indices and nothing that owns the parameter.
        self.hook_handles = [
            param.register_post_accumulate_grad_hook(Hook(self, Reducer._post_accumulate_grad, unit_index, index))
            for unit_index, unit_grads in enumerate(self.gradients)
            for index, param in enumerate(unit_grads.unit.params)
        ]
        backward.subscribe(self)

    # -- backward ---------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Wait for the gradients of every unit."""
        self._num_queued = 0
        for unit_grads in self.gradients:
            unit_grads.begin_backward()

    def _is_reduced_in_backward(self, unit_grads: UnitGradients) -> bool:
        """Return whether the backward in progress reduces the unit, now or at its end."""
        if unit_grads.is_sharded:
            return self._backward.reduces_gradients
        # These gradients are reduced once, at the end of a step.
        is_last = self._backward.reduces_gradients and self._backward.is_last_microbatch
        return is_last and not unit_grads.launched_in_step

    def _is_deferred(self, unit_grads: UnitGradients) -> bool:
        """Return whether a new gradient must wait: inside no_sync, or because the reduce of its unit has begun."""
        if self._is_reduced_in_backward(unit_grads):
            # A complete unit may still wait for those before it. How long it waits must not change the order of sums.
            return not unit_grads.num_pending
        # Gradients that are not sharded are added to the kept sum even inside no_sync.
        return unit_grads.is_sharded or unit_grads.launched_in_step

    def _post_accumulate_grad(self, unit_index: int, index: int) -> None:
        unit_grads = self.gradients[unit_index]
        param = unit_grads.unit.params[index]
        # This comes first because it may begin the backward, which resets the counts of arrived gradients.
        self._backward.note_gradient()
        is_deferred = self._is_deferred(unit_grads)
        if self._num_further_calls == 0:
            unit_grads.count_arrival(index)
        # Autograd also calls the hook if a Function returned None instead of a gradient.
        if param.grad is not None:
            if is_deferred:
                # A gradient that waits after its unit was reduced is late. The other ranks do not know about it.
                is_late = unit_grads.launched_in_step or self._is_reduced_in_backward(unit_grads)
                self.has_late_gradients = self.has_late_gradients or is_late
                # If the dtypes are equal, ``param.grad`` itself accumulates in the accumulation dtype.
                if unit_grads.dtype is not param.dtype:
                    self._accumulate_deferred(unit_grads, index, param.grad.detach())
                    param.grad = None
            else:
                self._copy_to_slot(unit_grads, index)
        if not unit_grads.num_pending:
            self._backward.note_unit_complete(unit_grads.unit)
            self._queue_in_order()
        # Peers may have become ready for a sum since this rank launched it.
        self._transport.progress()

    def _copy_to_slot(self, unit_grads: UnitGradients, index: int) -> None:
        """Copy a gradient to where it is reduced from, or add it to an earlier gradient there."""
        if unit_grads.is_sharded and unit_grads not in self._buffer_of:
            self._buffer_of[unit_grads] = self._acquire(unit_grads)
        views = self._buffer_of[unit_grads].param_views if unit_grads.is_sharded else unit_grads.param_views
        self._copy_to(unit_grads, index, views[index], accumulate=unit_grads.slot_filled[index])
        unit_grads.slot_filled[index] = True

    def _copy_to(self, unit_grads: UnitGradients, index: int, target: torch.Tensor, *, accumulate: bool) -> None:
        """Move a parameter's gradient, with its gradients from earlier micro-steps inside no_sync, into ``target``."""
        param, gradient = unit_grads.unit.params[index], unit_grads.deferred_grads.pop(index, None)
        latest = gradient_of(param)
        if latest is not None:
            # A backward with create_graph=True gives the gradient a history.
            latest = latest.detach()
            latest = latest.to_dense() if latest.is_sparse else latest
            if latest.shape != target.shape:
                name = unit_grads.unit.layout.slots[index].name
                raise ZeroEngineError(
                    f"parameter {name} was given another shape after initialize(), {tuple(latest.shape)} where it had "
                    f"{tuple(target.shape)}, as by resize_token_embeddings(). Change the model before initialize()."
                )
            gradient = latest if gradient is None else gradient.add_(latest)
        assert gradient is not None
        if self.predivide != 1:
            # The division makes a new tensor, because the user may hold the gradient.
            gradient = gradient / self.predivide
        self._copies.copy(gradient, target, accumulate=accumulate)
        unit_grads.has_grad[index] = True
        # A copy that waits for its launch keeps the gradient alive, so the parameter need not.
        param.grad = None

    def _accumulate_deferred(self, unit_grads: UnitGradients, index: int, gradient: torch.Tensor) -> None:
        """Sum micro-steps inside no_sync in the accumulation dtype; ``param.grad`` would sum in the parameter's own."""
        if index in unit_grads.deferred_grads:
            unit_grads.deferred_grads[index].add_(gradient)
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            unit_grads.deferred_grads[index] = dense.to(unit_grads.dtype)

    @staticmethod
    def _has_deferred_gradient(unit_grads: UnitGradients, index: int) -> bool:
        """Return whether a gradient waits outside of its slot."""
        return index in unit_grads.deferred_grads or gradient_of(unit_grads.unit.params[index]) is not None

    def unit_held(self, unit: Unit) -> None:
        """Do not reduce ``unit`` before ``unit_not_held``."""
        self._gradients_of[unit].is_held = True

    def unit_not_held(self, unit: Unit) -> None:
        """Reduce ``unit`` once it is complete."""
        self._gradients_of[unit].is_held = False
        self._queue_in_order()

    def unit_past(self, unit: Unit) -> None:
        """Let ``unit``, some of whose parameters got no gradient, be reduced as it is."""
        unit_grads = self._gradients_of[unit]
        if unit_grads.num_pending and self._num_further_calls <= 0:
            self._copy_earlier_gradients(unit_grads)
            unit_grads.num_pending = 0
            self._backward.note_unit_complete(unit)
            self._queue_in_order()

    @property
    def _num_further_calls(self) -> int:
        """The number of plain ``loss.backward()`` calls that are expected after the present one.

        A backward is expected to have as many calls as the previous one had. Below 0: it has had more.
        """
        return 0 if self._backward.run_by_engine else self._expected_calls - 1 - self._backward.num_ended_calls

    def end_call(self) -> None:
        """Let all units be reduced that have not been, unless another call is expected."""
        if self._num_further_calls <= 0:
            self._end_units()

    def _end_units(self) -> None:
        for unit_grads in self._reduce_order:
            self._copy_earlier_gradients(unit_grads)
            unit_grads.end_backward()
        self._queue_in_order()

    def _copy_earlier_gradients(self, unit_grads: UnitGradients) -> None:
        """Copy the gradients of earlier backwards inside no_sync of parameters that have none in this backward."""
        if not self._is_deferred(unit_grads):
            for index, count in enumerate(unit_grads.arrived_counts):
                if not count and self._has_deferred_gradient(unit_grads, index):
                    self._copy_to_slot(unit_grads, index)

    def end_backward(self, num_calls: int) -> None:
        """Launch the reduces that were not launched during the backward, in order."""
        self._expected_calls = num_calls or self._expected_calls
        self._end_units()
        self._launch_bucket()
        self._copies.flush()

    def _queue_in_order(self) -> None:
        """Move units into the bucket, up to the first one that is not ready. Launch the bucket when it is full."""
        while self._num_queued < len(self._reduce_order) and self._reduce_order[self._num_queued].is_ready:
            unit_grads = self._reduce_order[self._num_queued]
            self._num_queued += 1
            # A bucket holds whole units. If a unit does not fit, the reduces of the queued units are launched first.
            if self._is_reduced_in_backward(unit_grads):
                if self._bucket and self._queued_numel() + unit_grads.unit.layout.numel > self._bucket_numel:
                    self._launch_bucket()
                self._bucket.append(unit_grads)
        if self._bucket and self._queued_numel() >= self._bucket_numel:
            self._launch_bucket()

    def _queued_numel(self) -> int:
        return sum(unit_grads.unit.layout.numel for unit_grads in self._bucket)

    def _launch_bucket(self) -> None:
        bucket, self._bucket = self._bucket, []
        for unit_grads in bucket:
            with self._timer.span("reduce", unit_grads.unit.name, "reduce"):
                self._launch_reduce(unit_grads)

    def _launch_reduce(self, unit_grads: UnitGradients) -> None:
        """Launch the collective of one unit. Parameters without a gradient count as zeros."""
        unit = unit_grads.unit
        # The collective reads the buffer, into which copies of gradients may still wait for their launch.
        self._copies.flush()
        # If no parameter of the unit has a gradient on this rank, another rank may have one. All ranks must launch the
        # same collectives, so this rank sends zeros.
        if unit_grads.is_sharded:
            buffer = self._buffer_of.pop(unit_grads, None) or self._acquire(unit_grads)
            self._zero_unfilled(unit_grads, buffer.param_views)
            self._launch_from_buffer(buffer, unit_grads, unit_grads.flat_grads, accumulate=unit_grads.launched_in_step)
            # The next micro-step fills another buffer. The sums of all micro-steps accumulate in ``flat_grads``.
            unit_grads.slot_filled = [False] * len(unit.params)
            unit_grads.launched_in_step = True
            return
        self._zero_unfilled(unit_grads, unit_grads.param_views)
        shard = unit_grads.shard_of_degree(unit.degrees.optimizer)
        if not unit_grads.reduced_in_place:
            buffer = self._acquire(unit_grads)
            # The micro-steps accumulated in one dtype and are sent in another: this copy rounds their sum once.
            buffer.memory[: unit.layout.numel].copy_(unit_grads.flat_grads)
            self._launch_from_buffer(buffer, unit_grads, shard, accumulate=False)
        elif unit.degrees.optimizer == 1:
            self._works.append((unit.name, self._channel.all_reduce(unit_grads.flat_grads, unit.name)))
            self._count_bytes(unit_grads.flat_grads, 1)
        else:
            levels = unit.degrees.levels_to(unit.degrees.optimizer)
            work = self._channel.reduce_scatter(shard, unit_grads.flat_grads, unit.name, levels=levels)
            self._works.append((unit.name, work))
            self._count_bytes(unit_grads.flat_grads, unit.degrees.optimizer)
        unit_grads.launched_in_step = True

    def _launch_from_buffer(
        self, buffer: GradientBuffer, unit_grads: UnitGradients, target: torch.Tensor, accumulate: bool
    ) -> None:
        """Reduce ``buffer`` into ``target`` (1-D): the unit's whole gradient, or this rank's shard of it."""
        # A buffer for the largest unit may serve a smaller one.
        unit = unit_grads.unit
        flat = buffer.memory[: unit.layout.numel]
        degree = flat.numel() // target.numel()
        # A slice of a whole gradient is no shard of the unit.
        levels = unit.degrees.levels_to(degree) if unit.degrees.optimizer > 1 else None
        if unit_grads.store is not None:
            reduce = partial(
                self._launch_collective, buffer, flat=flat, levels=levels, label=unit.name, accumulate=False
            )
            buffer.work = self._offloaded.reduce_and_store(unit_grads, reduce, accumulate)
        else:
            buffer.work = self._launch_collective(buffer, target, flat, levels, unit.name, accumulate)
            self._works.append((unit.name, buffer.work))
        self._buffer_pool.mark_launched(buffer)

    def _acquire(self, unit_grads: UnitGradients) -> GradientBuffer:
        """Return a buffer to fill. This waits for the reduce of an earlier unit if all buffers are in use."""
        with self._timer.span("reduce", unit_grads.unit.name):
            return self._buffer_pool.acquire(unit_grads)

    def _count_bytes(self, flat: torch.Tensor, degree: int) -> None:
        """Count what a reduce of ``flat`` to shards of ``degree`` brings to this rank.

        Every other rank sends a slice. An all-reduce is a reduce-scatter to all ranks and an all-gather.
        """
        world_size = self._transport.world_size
        slices = 2 * (world_size - 1) / world_size if degree == 1 else (world_size - 1) / degree
        bits = self._gradient_bits if flat.dtype in ops.DTYPE_CODES else None
        nbytes = flat.nbytes if bits is None else ops.packet_bytes(flat.numel(), bits)
        self._timer.count("reduce", int(nbytes * slices))

    def _launch_collective(
        self,
        buffer: GradientBuffer,
        target: torch.Tensor,
        flat: torch.Tensor,
        levels: tuple[int, ...] | None,
        label: str,
        accumulate: bool,
    ) -> Work:
        self._count_bytes(flat, flat.numel() // target.numel())
        if target.numel() < flat.numel():
            buffer.collective = self._channel.reduce_scatter(target, flat, label, accumulate, levels)
            return buffer.collective
        # An all-reduce leaves the sum in the buffer, so it is copied to where the gradients are kept.
        buffer.collective = self._channel.all_reduce(flat, label)
        return Then(buffer.collective, partial(torch.Tensor.add_ if accumulate else torch.Tensor.copy_, target, flat))

    def _zero_unfilled(self, unit_grads: UnitGradients, views: list[torch.Tensor]) -> None:
        for filled, view in zip(unit_grads.slot_filled, views, strict=True):
            # The memory may hold gradients of another unit, or of an earlier micro-step of this unit.
            if not filled:
                view.zero_()

    # -- step -------------------------------------------------------------------------------------

    def reduce_remaining(self) -> None:
        """Return with every gradient reduced into ``flat_grads``, except late gradients. Call this on every rank."""
        for unit_grads in self._reduce_order:
            # Units whose micro-steps were all inside no_sync have not been reduced.
            if not unit_grads.launched_in_step:
                for index in range(len(unit_grads.unit.params)):
                    if self._has_deferred_gradient(unit_grads, index):
                        self._copy_to_slot(unit_grads, index)
                self._launch_reduce(unit_grads)
        self.wait_reduces()

    def reduce_late_gradients(self) -> None:
        """Reduce the gradients that arrived after their unit was reduced. Call it on every rank if any has some."""
        self.wait_reduces()
        # No rank knows which units have late gradients on the others, so all ranks reduce every unit.
        for unit_grads in self._reduce_order:
            buffer = self._acquire(unit_grads)
            for index, view in enumerate(buffer.param_views):
                if self._has_deferred_gradient(unit_grads, index):
                    self._copy_to(unit_grads, index, view, accumulate=False)
                else:
                    view.zero_()
            self._copies.flush()
            self._launch_from_buffer(buffer, unit_grads, self._late_target(unit_grads), accumulate=True)
        self.wait_reduces()
        for unit_grads in self._reduce_order:
            if self._adds_late_by_slices(unit_grads):
                own_slice, name = self._late_target(unit_grads), unit_grads.unit.name
                self._works.append((name, self._channel.all_gather(unit_grads.flat_grads, own_slice, name)))
        self.wait_reduces()
        self.has_late_gradients = False

    def _adds_late_by_slices(self, unit_grads: UnitGradients) -> bool:
        """Return whether each rank adds a slice of late gradients to a sum that every rank keeps whole.

        An all-reduce of 16 bits would round the late gradients before they are added, which no other degree does.
        """
        return unit_grads.reduced_in_place and unit_grads.unit.degrees.optimizer == 1

    def _late_target(self, unit_grads: UnitGradients) -> torch.Tensor:
        """Return where this rank adds late gradients of a unit."""
        if self._adds_late_by_slices(unit_grads):
            return unit_grads.unreplicated_part(unit_grads.flat_grads)
        return unit_grads.shard_of_degree(unit_grads.unit.degrees.optimizer)

    def wait_reduces(self) -> None:
        """Order the current stream behind every reduce; on the CPU wait for every reduce. Call it on every rank.

        Some transports need the host of each rank to finish a reduce.
        """
        for unit_name, work in self._works:
            with self._timer.span("reduce", unit_name):
                work.wait_stream()
        self._works.clear()
        self._offloaded.wait_all()

    def end_step(self) -> None:
        """Let the next gradients overwrite those of the step that ended."""
        for unit_grads in self.gradients:
            unit_grads.end_step()

    def fail_backward(self, after_others: bool) -> None:
        """Drop every gradient since the last step, because some gradients of the failed backward are missing."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop every gradient since the last step. Reduces that were launched finish first."""
        # A launched collective cannot be canceled, and its peers wait for this rank.
        self.wait_reduces()
        self._copies.discard()
        for buffer in self._buffer_of.values():
            buffer.in_use = False
        self._buffer_of.clear()
        self._bucket.clear()
        self.has_late_gradients = False
        for unit_grads in self.gradients:
            unit_grads.num_pending = 0
            unit_grads.is_held = False
            unit_grads.deferred_grads.clear()
            for param in unit_grads.unit.params:
                param.grad = None
        self.end_step()

    # -- reading and replacing gradients ----------------------------------------------------------

    def check_backward_ended(self) -> None:
        """Raise ``ZeroEngineError`` if a backward is in progress, or if the last one raised."""
        if self._backward.in_progress:
            raise ZeroEngineError(
                "a gradient can be read and replaced after a backward, not during one, nor after one that raised"
            )

    def unreduced_gradient(self, unit_grads: UnitGradients, index: int) -> torch.Tensor | None:
        """Return this rank's contribution to the next reduce of a parameter's gradient, in fp32 or wider."""
        local = (unit_grads.deferred_grads.get(index), gradient_of(unit_grads.unit.params[index]))
        parts = [part.detach().to_dense() / self.predivide for part in local if part is not None]
        if not unit_grads.is_sharded and unit_grads.slot_filled[index] and not unit_grads.launched_in_step:
            parts.append(unit_grads.param_views[index])
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        return torch.stack(wide).sum(0) if wide else None

    def replace_gradient(self, unit_grads: UnitGradients, index: int, value: torch.Tensor) -> None:
        """Make ``value`` the sum over ranks of a parameter's gradient. Call this on every rank.

        If the unit was ``launched_in_step``, the caller has written the value into the shard.
        """
        unit_grads.deferred_grads.pop(index, None)
        unit_grads.unit.params[index].grad = None
        unit_grads.has_grad[index] = True
        if unit_grads.launched_in_step:
            # The kept norm belongs to the old sum. The norm of the step is then computed from the new values.
            unit_grads.squared_norm = None
            return
        unit_grads.slot_filled[index] = False
        # The reduce that follows sums over the ranks, so one rank gives the value and the others give nothing.
        if unit_grads.unit.rank == 0:
            unit_grads.deferred_grads[index] = (value * self.predivide).to(unit_grads.dtype)

    def forget_errors(self) -> None:
        """Let the kept errors of quantized gradients restart from zero, if there are any."""
        if isinstance(self._channel, QuantizedReduce):
            self._channel.packing.forget_errors()

    def buffer_bytes(self) -> int:
        """Return the bytes of all gradient buffers and staging buffers."""
        return self._buffer_pool.nbytes + self._offloaded.nbytes
