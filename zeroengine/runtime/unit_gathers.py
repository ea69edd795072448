"""Gathers and releases units. ``gatherer.py`` decides when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.monitor.record import Kind
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.deferred_frees import DeferredFrees
from zeroengine.runtime.unit import GatherState, Unit
from zeroengine.utils.compiler_disable import outside_torch_func


class UnitGathers:
    """The units that are gathered, and those that are pinned. It knows nothing of forwards and backwards.

    Args:
        units: All units. Those that are releasable are released here.
        transport: Gathers.
        timer: Times gathers.
        gather_for_use: Called with a parameter that is used while its unit is released, and with the operation's name.
        is_in_use: Whether a forward in progress needs a unit, which is then not released.

    Attributes:
        num_pins: The number of pins now, such as those of ``zeroengine.gathered``; a unit that is pinned twice counts
            twice. Ranks may run different forwards meanwhile, so no order of units is learned or followed.
        live_numel: Elements of releasable units that are gathered now.
        deferred_frees: The units whose full buffers are not freed yet because other tensors alias them.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        transport: Transport,
        timer: Timer,
        gather_for_use: Callable[[nn.Parameter, str], None],
        is_in_use: Callable[[Unit], bool],
    ) -> None:
        self._transport, self._timer = transport, timer
        self._gather_for_use, self._is_in_use = gather_for_use, is_in_use
        self._pins_of: dict[Unit, int] = dict.fromkeys(units, 0)
        self.num_pins = self.live_numel = 0
        self.deferred_frees = DeferredFrees()
        # The full buffers of releasable units have no memory yet.
        for unit in self._pins_of:
            if unit.is_releasable:
                unit.mark_released(gather_for_use)

    def pinned_units(self) -> list[Unit]:
        """Return the units that are pinned."""
        return [unit for unit, num_pins in self._pins_of.items() if num_pins]

    def start(self, unit: Unit, exact: bool = False) -> None:
        """Launch the all-gather of a released unit. ``exact``: see ``Unit.start_gather``."""
        if unit.is_released:
            nbytes = unit.bytes_to_gather(exact)
            with outside_torch_func(), self._timer.span("gather", unit.name, "gather"):
                unit.start_gather(exact)
            self._timer.count("gather", nbytes)
            self.live_numel += unit.numel

    def ensure(self, unit: Unit, exact: bool = False) -> None:
        """Return with the parameters of ``unit`` ready for use on the current stream.

        Args:
            unit: The unit.
            exact: Whether they must have the values of the shards, which quantized gathers round.
        """
        if exact and not unit.is_released and not unit.has_exact_values:
            # Every rank has the rounded values, so every rank gathers again, into the same memory.
            self.ensure(unit)
            self.live_numel -= unit.numel
            unit.mark_released(self._gather_for_use)
        if unit.is_gathered:
            return
        self.start(unit, exact)
        assert unit.gather_work is not None
        shards = unit.offloaded_shards
        kind: Kind = "offload" if shards is not None and shards.is_read_directly else "gather"
        with outside_torch_func(), self._timer.span(kind, unit.name, "await"):
            unit.gather_work.wait_stream()
            unit.finish_gather()

    def pin(self, unit: Unit) -> None:
        """Gather the exact values of ``unit`` and keep them gathered until ``unpin``. Pins count."""
        self.ensure(unit, exact=True)
        self._pins_of[unit] += 1
        self.num_pins += 1

    def unpin(self, unit: Unit) -> None:
        """Undo one ``pin``, and release ``unit`` if it has no other."""
        self._pins_of[unit] -= 1
        self.num_pins -= 1
        self.release(unit)

    def release(self, unit: Unit) -> None:
        """Release ``unit`` unless it is pinned or a forward in progress needs it."""
        if not unit.is_releasable or not unit.is_gathered or self._pins_of[unit]:
            return
        if self._is_in_use(unit):
            return
        self.live_numel -= unit.numel
        # Giving memory back is a part of what a gather costs.
        with self._timer.span("gather", unit.name):
            unit.mark_released(self._gather_for_use)
            self.deferred_frees.free(unit)

    def publish_update(self, unit: Unit) -> None:
        """Let all ranks compute with the updated parameters of ``unit``. Call it on every rank, in the units' order."""
        # Autograd then refuses a backward through a graph that saved the previous values.
        torch.autograd.graph.increment_version(unit.params)
        unit.forget_writes(())
        unit.forget_secondary()
        # At equal degrees this rank has updated its whole full buffer, or the unit is released and its next use gathers
        # the new values.
        if unit.degrees.optimizer > unit.degrees.parameters:
            with self._timer.span("gather", unit.name, "gather"):
                unit.start_gather_of_update(self._gather_for_use)
            self._timer.count("gather", received_bytes(unit, unit.degrees.optimizer, unit.degrees.parameters))

    def quiesce(self, values_change: bool) -> None:
        """Return with no gather in progress, and every unit released that is not pinned. See ``Gatherer.quiesce``."""
        for unit in self._pins_of:
            # A prefetch that was never used still reads the shards of all ranks, which the caller is about to change.
            if unit.state is GatherState.GATHERING:
                self.ensure(unit)
            unit.wait_for_update()
            if values_change:
                unit.forget_secondary()
            unit.check_parameters()
            self.release(unit)
            self.deferred_frees.replace_buffer(unit)
            if unit.offloaded_shards is not None:
                # The prefetched values would be outdated.
                unit.offloaded_shards.discard_prefetched()


def received_bytes(unit: Unit, degree: int, within: int = 1) -> int:
    """Return the bytes that an all-gather of shards at ``degree`` into one at ``within`` brings to this rank."""
    return unit.full_buffer.nbytes // within - unit.full_buffer.nbytes // degree
