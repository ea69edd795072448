"""Copies gradients to where they are reduced, and launches the reduces of units. The schedule decides when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Levels, Transport
from zeroengine.comm.quantized_transport import QuantizedReduce
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.gradient_buffers import CastCopies, GradientBuffer, GradientBufferPool
from zeroengine.runtime.gradient_hooks import ArrivingGradients
from zeroengine.runtime.offloaded_gradients import OffloadedGradients
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.work import Then, Work


class ReduceLauncher:
    """The reduces in progress, and the gradient buffers. It knows nothing of backwards.

    Args:
        gradients: The gradients of each trainable unit, in the order of registration.
        transport: Reduces.
        config: The resolved configuration.
        collects_copies: Whether copies into buffers are collected and launched together, which saves time on a GPU.
        timer: Times reduces.

    Attributes:
        predivide: The number that gradients are divided by before they are summed, so that the sum of many ranks does
            not overflow. The update multiplies by it again.
        buffer_pools: The gradient buffers, by what sends them.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        transport: Transport,
        config: Config,
        collects_copies: bool,
        timer: Timer,
    ) -> None:
        self._transport, self._timer = transport, timer
        # None where gradients travel exactly.
        self._gradient_bits = config.zero_optimization.gradient_bits if transport.world_size > 1 else None
        self.predivide = config.predivide(transport.world_size)
        self._offloaded = OffloadedGradients(timer)
        self._copies = CastCopies(collects_copies)
        # The reduces in progress, and the units that they are for.
        self._works: list[tuple[str, Work]] = []
        # Memory that is sent belongs to a transport, and experts may have one of their own.
        by_transport: dict[Transport, list[UnitGradients]] = {transport: []}
        for unit_grads in gradients:
            by_transport.setdefault(unit_grads.transport, []).append(unit_grads)
        self.buffer_pools = {own: GradientBufferPool(own, members) for own, members in by_transport.items()}
        # The gradient buffers that are being filled.
        self._buffer_of: dict[UnitGradients, GradientBuffer] = {}

    def copy_to_slot(self, unit_grads: UnitGradients, index: int, latest: torch.Tensor | None = None) -> None:
        """Copy a gradient to where it is reduced from, or add it to an earlier gradient there. See ``_copy_to``."""
        self._copies.follow_stream()
        filled = unit_grads.slot_filled
        self._copy_to(unit_grads, index, self._views(unit_grads)[index], latest, accumulate=filled[index])
        filled[index] = True

    def _views(self, unit_grads: UnitGradients) -> Sequence[torch.Tensor]:
        """Return where the gradients of a unit are copied to: a buffer, if they are sharded."""
        if not unit_grads.format.is_sharded:
            return unit_grads.param_views
        buffer = self._buffer_of.get(unit_grads)
        if buffer is None:
            buffer = self._buffer_of[unit_grads] = self._acquire(unit_grads)
        return buffer.param_views

    def open(self, unit_grads: UnitGradients, arriving: ArrivingGradients, num_pending: int) -> None:
        """Let the next gradients of a unit be copied without asking, where all that is to do is a copy.

        Args:
            unit_grads: The gradients of the unit, of which one was just copied.
            arriving: The unit whose gradients arrive now.
            num_pending: The gradients that are to come.
        """
        if not (unit_grads.has_slices or unit_grads.deferred_grads or self.predivide != 1):
            copies = self._copies if self._copies.collects else None
            views, filled, has_grad = self._views(unit_grads), unit_grads.slot_filled, unit_grads.has_grad
            progress = self._transport.progress
            arriving.open(unit_grads.unit.number, views, filled, has_grad, copies, progress, num_pending)

    def _copy_to(
        self,
        unit_grads: UnitGradients,
        index: int,
        target: torch.Tensor,
        latest: torch.Tensor | None = None,
        *,
        accumulate: bool,
    ) -> None:
        """Move the deferred gradients of a parameter, and its latest gradient if there is one, into ``target``."""
        gradient = unit_grads.deferred_grads.pop(index, None)
        if latest is not None:
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

    def launch(self, unit_grads: UnitGradients) -> None:
        """Launch the collective of one unit. Parameters without a gradient count as zeros."""
        if self._transport.runs_on_streams:
            self._finish_done()
        if self._timer.is_watched:
            with self._timer.span("reduce", unit_grads.unit.name, "reduce"):
                self._launch(unit_grads)
        else:
            self._launch(unit_grads)

    def _finish_done(self) -> None:
        """Finish the reduces that a device has run, which frees their temporary memory before the step waits for all.

        Elsewhere the host's wait may be what runs a reduce, and then all ranks have to wait in one order.
        """
        while self._works and self._works[0][1].done():
            self._works.pop(0)[1].wait_stream()

    def _launch(self, unit_grads: UnitGradients) -> None:
        unit = unit_grads.unit
        # The collective reads the buffer, into which copies of gradients may still wait for their launch.
        self._copies.flush()
        # If no parameter of the unit has a gradient on this rank, another rank may have one. All ranks must launch the
        # same collectives, so this rank sends zeros.
        if unit_grads.format.is_sharded:
            buffer = self._buffer_of.pop(unit_grads, None) or self._acquire(unit_grads)
            self._zero_unfilled(unit_grads, buffer.param_views)
            self._launch_from_buffer(buffer, unit_grads, unit_grads.flat_grads, accumulate=unit_grads.launched_in_step)
            # The next micro-step fills another buffer. The sums of all micro-steps accumulate in ``flat_grads``.
            unit_grads.forget_filled()
            unit_grads.launched_in_step = True
            return
        self._zero_unfilled(unit_grads, unit_grads.param_views)
        shard = unit_grads.shard_of_degree(unit.degrees.optimizer)
        if not unit_grads.format.reduced_in_place:
            buffer = self._acquire(unit_grads)
            # The micro-steps accumulated in one dtype and are sent in another: this copy rounds their sum once.
            buffer.flat.copy_(unit_grads.flat_grads)
            self._launch_from_buffer(buffer, unit_grads, shard, accumulate=False)
        elif unit.degrees.optimizer == 1:
            channel = unit_grads.transport.reduce
            self._works.append((unit.name, channel.all_reduce(unit_grads.flat_grads, unit.name)))
            self._count_bytes(unit_grads, unit_grads.flat_grads, 1)
        else:
            levels = unit.degrees.levels_to(unit.degrees.optimizer)
            channel = unit_grads.transport.reduce
            work = channel.reduce_scatter(shard, unit_grads.flat_grads, unit.name, levels=levels)
            self._works.append((unit.name, work))
            self._count_bytes(unit_grads, unit_grads.flat_grads, unit.degrees.optimizer)
        unit_grads.launched_in_step = True

    def _launch_from_buffer(
        self, buffer: GradientBuffer, unit_grads: UnitGradients, target: torch.Tensor, accumulate: bool
    ) -> None:
        """Reduce ``buffer`` into ``target`` (1-D): the unit's whole gradient, or this rank's shard of it."""
        unit, flat = unit_grads.unit, buffer.flat
        degree = flat.numel() // target.numel()
        # A slice of a whole gradient is no shard of the unit.
        levels = unit.degrees.levels_to(degree) if unit.degrees.optimizer > 1 else None
        if unit_grads.store is not None:
            reduce = partial(self._launch_collective, buffer, unit_grads, flat=flat, levels=levels, accumulate=False)
            buffer.work = self._offloaded.reduce_and_store(unit_grads, reduce, accumulate)
        else:
            buffer.work = self._launch_collective(buffer, unit_grads, target, flat, levels, accumulate)
            self._works.append((unit.name, buffer.work))
        self.buffer_pools[unit_grads.transport].put_back(buffer)

    def _acquire(self, unit_grads: UnitGradients) -> GradientBuffer:
        """Return a buffer to fill. This waits for the reduce of an earlier unit if all buffers are in use."""
        if not self._timer.enabled:
            return self.buffer_pools[unit_grads.transport].acquire(unit_grads)
        with self._timer.span("reduce", unit_grads.unit.name):
            return self.buffer_pools[unit_grads.transport].acquire(unit_grads)

    def _count_bytes(self, unit_grads: UnitGradients, flat: torch.Tensor, degree: int) -> None:
        """Count what a reduce of ``flat`` to shards of ``degree`` brings to this rank.

        Every other rank sends a slice. An all-reduce is a reduce-scatter to all ranks and an all-gather.
        """
        if not self._timer.enabled:
            return
        world_size = unit_grads.transport.world_size
        slices = 2 * (world_size - 1) / world_size if degree == 1 else (world_size - 1) / degree
        bits = self._gradient_bits if flat.dtype in ops.DTYPE_CODES else None
        nbytes = flat.nbytes if bits is None else ops.packet_bytes(flat.numel(), bits)
        self._timer.count("reduce", int(nbytes * slices))

    def _launch_collective(
        self,
        buffer: GradientBuffer,
        unit_grads: UnitGradients,
        target: torch.Tensor,
        flat: torch.Tensor,
        levels: Levels,
        accumulate: bool,
    ) -> Work:
        channel, label = unit_grads.transport.reduce, unit_grads.unit.name
        self._count_bytes(unit_grads, flat, flat.numel() // target.numel())
        if target.numel() < flat.numel():
            buffer.collective = channel.reduce_scatter(target, flat, label, accumulate, levels)
            return buffer.collective
        # An all-reduce leaves the sum in the buffer, so it is copied to where the gradients are kept.
        buffer.collective = channel.all_reduce(flat, label)
        return Then(buffer.collective, partial(torch.Tensor.add_ if accumulate else torch.Tensor.copy_, target, flat))

    def _zero_unfilled(self, unit_grads: UnitGradients, views: list[torch.Tensor]) -> None:
        for filled, view in zip(unit_grads.slot_filled, views, strict=True):
            # The memory may hold gradients of another unit, or of an earlier micro-step of this unit.
            if not filled:
                view.zero_()

    def reduce_late(self, units: Sequence[UnitGradients]) -> None:
        """Add the deferred gradients of ``units``, which were reduced before, to the sums. Call it on every rank."""
        self.wait()
        # No rank knows which units have late gradients on the others, so all ranks reduce every unit.
        for unit_grads in units:
            buffer = self._acquire(unit_grads)
            for index, view in enumerate(buffer.param_views):
                if index in unit_grads.deferred_grads:
                    self._copy_to(unit_grads, index, view, accumulate=False)
                else:
                    view.zero_()
            self._copies.flush()
            self._launch_from_buffer(buffer, unit_grads, self._late_target(unit_grads), accumulate=True)
        self.wait()
        for unit_grads in units:
            if self._adds_late_by_slices(unit_grads):
                own_slice, name = self._late_target(unit_grads), unit_grads.unit.name
                channel = unit_grads.transport.reduce
                self._works.append((name, channel.all_gather(unit_grads.flat_grads, own_slice, name)))
        self.wait()

    def _adds_late_by_slices(self, unit_grads: UnitGradients) -> bool:
        """Return whether each rank adds a slice of late gradients to a sum that every rank keeps whole.

        An all-reduce of 16 bits would round the late gradients before they are added, which no other degree does.
        """
        return unit_grads.format.reduced_in_place and unit_grads.unit.degrees.optimizer == 1

    def _late_target(self, unit_grads: UnitGradients) -> torch.Tensor:
        """Return where this rank adds late gradients of a unit."""
        if self._adds_late_by_slices(unit_grads):
            return unit_grads.unreplicated_part(unit_grads.flat_grads)
        return unit_grads.shard_of_degree(unit_grads.unit.degrees.optimizer)

    def wait(self) -> None:
        """Order the current stream behind every reduce; on the CPU wait for every reduce. Call it on every rank.

        Some transports need the host of each rank to finish a reduce.
        """
        for unit_name, work in self._works:
            with self._timer.span("reduce", unit_name):
                work.wait_stream()
        self._works.clear()
        self._offloaded.wait_all()

    def flush_copies(self) -> None:
        """Launch all pending copies."""
        self._copies.flush()

    def drop(self) -> None:
        """Forget the gradients that were copied. Reduces that were launched finish first. Call it on every rank."""
        # A launched collective cannot be canceled, and its peers wait for this rank.
        self.wait()
        self._copies.discard()
        for unit_grads, buffer in self._buffer_of.items():
            self.buffer_pools[unit_grads.transport].put_back(buffer)
        self._buffer_of.clear()

    def forget_errors(self) -> None:
        """Let the kept errors of quantized gradients restart from zero, if there are any."""
        if isinstance(self._transport.reduce, QuantizedReduce):
            self._transport.reduce.packing.forget_errors()

    def kept_errors(self) -> list[torch.Tensor]:
        """Return the kept errors of quantized gradients, if there are any."""
        channel = self._transport.reduce
        return channel.packing.errors if isinstance(channel, QuantizedReduce) else []

    @property
    def nbytes(self) -> int:
        """The bytes of all gradient buffers and staging buffers."""
        return sum(pool.nbytes for pool in self.buffer_pools.values()) + self._offloaded.nbytes
