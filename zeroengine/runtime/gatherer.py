"""Gathers units and releases them, when the schedule says so. See the note in ``schedule/residency.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.monitor.record import Kind
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.deferred_frees import DeferredFrees
from zeroengine.runtime.executor import Executor
from zeroengine.runtime.unit import Unit, received_bytes
from zeroengine.schedule import events
from zeroengine.schedule.actions import Gather, Prefetch, ReadAhead, Release
from zeroengine.schedule.residency import GatherState
from zeroengine.utils.compiler_disable import outside_torch_func
from zeroengine.utils.torch_internals import functorch_active
from zeroengine.utils.work import Work

log = logging.getLogger("zeroengine")


class Gatherer:
    """Gathers units, and releases them. It knows nothing of gradients, nor of what runs.

    Args:
        executor: Lets this do the gathers and releases of the schedule.
        transport: Gathers.
        max_live_numel: ``zero_optimization.max_live_parameters``.
        timer: Times gathers.
        gather_for_use: Called with a parameter that is used while its unit is released, and with the operation's name.
        abandon_forward: Forgets forwards whose end no hook reported, and releases their unhooked uses.

    Attributes:
        deferred_frees: The units whose full buffers are not freed yet because other tensors alias them.
        has_averages: Whether parameters have the moving averages of the weights, for an evaluation.
        refuse_calls: Ends the stream of the weights that is open and raises, if one is, with the name of a call.
        has_values: Whether the shards hold values. They do not while the parameters are offloaded for a while.
        state_reads: What still reads states on a stream of its own. The next change of values waits for it.
        gather_on_demand: Gathers a parameter that is used while it is not None, when every rank runs the same code.
    """

    def __init__(
        self,
        executor: Executor,
        transport: Transport,
        max_live_numel: int,
        timer: Timer,
        gather_for_use: Callable[[nn.Parameter, str], None],
        abandon_forward: Callable[[], None],
    ) -> None:
        self._executor, self._transport, self._timer = executor, transport, timer
        self._units, self._residency = executor.units, executor.schedule.residency
        self._max_live_numel = max_live_numel
        self._gather_for_use, self._abandon_forward = gather_for_use, abandon_forward
        self.has_averages, self.has_values = False, True
        self.refuse_calls: Callable[[str], None] | None = None
        self.deferred_frees = DeferredFrees()
        self.state_reads: list[Work] = []
        self.gather_on_demand: Callable[[nn.Parameter, str], None] | None = None
        self._has_noticed_refused = False
        executor.let_perform(Gather, self._gather)
        executor.let_perform(Prefetch, self._prefetch)
        executor.let_perform(ReadAhead, self._read_ahead)
        executor.let_perform(Release, self._release)
        # The full buffers of releasable units have no memory yet.
        for unit in self._units:
            if unit.is_releasable:
                unit.mark_released(gather_for_use)

    @property
    def num_pins(self) -> int:
        """The number of pins now, such as those of ``zeroengine.gathered``."""
        return self._residency.num_pins

    # -- what the schedule says -------------------------------------------------------------------

    def _prefetch(self, action: Prefetch) -> None:
        self._start(self._units[action.unit])

    def _read_ahead(self, action: ReadAhead) -> None:
        unit = self._units[action.unit]
        assert unit.offloaded_shards is not None
        unit.offloaded_shards.prefetch(unit.shard)

    def _gather(self, action: Gather) -> None:
        self._ensure(self._units[action.unit], action.exact)
        if self._residency.live_numel_refused and not self._has_noticed_refused:
            self._notice_refused()

    def _release(self, action: Release) -> None:
        unit = self._units[action.unit]
        if self._timer.enabled:
            # Giving memory back is a part of what a gather costs.
            with self._timer.span("gather", unit.name):
                self._free(unit)
        else:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        unit.mark_released(self._gather_for_use)
        self.deferred_frees.free(unit)
        self.deferred_frees.retry()

    def _start(self, unit: Unit, exact: bool = False) -> None:
        """Launch the all-gather of a released unit. ``exact``: see ``Unit.start_gather``."""
        if not self.has_values:
            raise ReleasedParameterError(
                f"unit {unit.name} is used while the parameters are offloaded: call engine.reload_states() before"
            )
        if self._executor.tell_launch is not None:
            self._executor.tell_launch(Gather(unit.number, exact))
        if not (self._timer.is_watched or functorch_active()):
            unit.start_gather(exact)
        else:
            nbytes = unit.bytes_to_gather(exact)
            with outside_torch_func(), self._timer.span("gather", unit.name, "gather"):
                unit.start_gather(exact)
            self._timer.count("gather", nbytes)
        if self._executor.launches is not None:
            self._executor.launches.append(Gather(unit.number, exact))

    def _ensure(self, unit: Unit, exact: bool = False) -> None:
        """Return with the parameters of ``unit`` ready for use on the current stream. ``exact``: see ``Gather``."""
        if exact and not unit.is_released and not unit.has_exact_values:
            # Every rank has the rounded values, so every rank gathers again, into the same memory.
            self._ensure(unit)
            unit.mark_released(self._gather_for_use)
        if unit.state is GatherState.GATHERED:
            return
        if unit.state is GatherState.RELEASED:
            self._start(unit, exact)
        if not (self._timer.is_watched or functorch_active()):
            unit.finish_gather()
            return
        shards = unit.offloaded_shards
        kind: Kind = "offload" if shards is not None and shards.is_read_directly else "gather"
        with outside_torch_func(), self._timer.span(kind, unit.name, "await"):
            unit.finish_gather()

    def _notice_refused(self) -> None:
        """Say once that a limit stops what the other one allows."""
        self._has_noticed_refused = True
        if self._transport.rank == 0:
            log.info(
                f"zero_optimization.max_live_parameters ({self._max_live_numel}) stops gathers that "
                f"prefetch_bucket_size allows: write at least {self._residency.live_numel_refused} for them, or ignore "
                "this if the memory is needed"
            )

    # -- calls ------------------------------------------------------------------------------------

    def pin(self, unit: Unit) -> None:
        """Gather the exact values of ``unit`` and keep them gathered until ``unpin``. Pins count."""
        self._executor.tell(events.Pinned(unit.number))

    def unpin(self, unit: Unit) -> None:
        """Undo one ``pin``, and release ``unit`` if it has no other."""
        self._executor.tell(events.Unpinned(unit.number))

    def check_has_weights(self, call: str) -> None:
        """Check that parameters have their weights, and not averages, and that no stream of them is open.

        Raises:
            ZeroEngineError: They have averages, or a stream is open, which this ends.
        """
        self.check_no_stream(call)
        if self.has_averages:
            raise ZeroEngineError(
                f"{call} inside `with engine.average_weights()` or `gathered(..., ema=True)`, where the model has the "
                "moving averages and not its weights: leave the `with` first"
            )

    def check_no_stream(self, call: str) -> None:
        """Check that no stream of the weights is open.

        Raises:
            ZeroEngineError: One is, which this ends.
        """
        if self.refuse_calls is not None:
            self.refuse_calls(call)

    # -- steps ------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Prepare an update: ``quiesce``, and replace even the buffers that graphs saved through the user's hooks."""
        # Those graphs belong to the forward before this update.
        self.deferred_frees.begin_update()
        self.quiesce(values_change=False)

    def publish_updates(self, units: Sequence[Unit]) -> None:
        """Let all ranks compute with the updated parameters of ``units``, which are in order. Call it on every rank."""
        # Autograd then refuses a backward through a graph that saved the previous values.
        torch.autograd.graph.increment_version([param for unit in units for param in unit.params])
        waiting = self.deferred_frees.waiting
        for unit in units:
            # In a released buffer without memory nothing is written, and a gather looks for writes anew.
            if unit.state is not GatherState.RELEASED or unit in waiting:
                unit.forget_writes(())
            if unit.secondary is not None:
                unit.forget_secondary()
            # At equal degrees this rank has updated its whole full buffer, or the unit is released and its next use
            # gathers the new values.
            if unit.degrees.optimizer > unit.degrees.parameters:
                with self._timer.span("gather", unit.name, "gather"):
                    unit.start_gather_of_update(self._gather_for_use)
                    if not unit.is_releasable:
                        self._executor.tell(events.Published(unit.number))
                self._timer.count("gather", received_bytes(unit, unit.degrees.optimizer, unit.degrees.parameters))

    def end_update(self) -> None:
        """Complete the update. If peers read this rank's parameters in place, return when all of them have done so."""
        # On a transport that overlaps, the all-gathers of the update run on, and the next use of each unit waits for
        # its own. A transport that does not overlap gains nothing from that, and its peers may read in place.
        if not self._transport.overlaps:
            self.quiesce(values_change=False)
            with self._timer.span("gather"):
                self._transport.fence()

    def await_state_reads(self) -> None:
        """Order the current stream behind what still reads states, such as a checkpoint's copy, before they change."""
        for work in self.state_reads:
            work.wait_stream()
        self.state_reads.clear()

    def quiesce(self, *, values_change: bool = True) -> None:
        """Return with no gather in progress and every unit released that is not pinned, so that values may change.

        Call this where no forward can be in progress: a forward that Ctrl-C ended is forgotten. A full buffer that
        other tensors still alias is left to them, with its present values, and the unit takes a new one.

        Args:
            values_change: Whether values of any unit may change. Otherwise only those that ``publish_updates`` is
                called for.

        Raises:
            ZeroEngineError: A parameter is not what ``initialize`` made of it. See ``Unit.check_parameters``.
        """
        self._abandon_forward()
        self.await_state_reads()
        for unit in self._units:
            # Most units are released, and then neither event does anything.
            if unit.state is not GatherState.RELEASED:
                # A prefetch that was never used still reads the shards of all ranks, which the caller is about to
                # change.
                self._executor.tell(events.Settled(unit.number))
            unit.wait_for_update()
            if values_change:
                unit.forget_secondary()
            if unit.state is not GatherState.RELEASED or unit.writes.reshaped:
                unit.check_parameters()
            if unit.state is not GatherState.RELEASED:
                self._executor.tell(events.ValuesChange(unit.number))
            if unit.offloaded_shards is not None:
                # The prefetched values would be outdated.
                unit.offloaded_shards.discard_prefetched()
        self.deferred_frees.replace_buffers()
