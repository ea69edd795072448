"""Gathers units, releases them, and gathers ahead those that are needed next.

``forward.py`` and ``traversal.py`` say when.

[Note: When a unit is gathered]
    forward of a module       the pre-forward hook gathers its units and prefetches the next ones; the post-forward hook
                              releases them
    backward of a module      the first gradient of its outputs gathers; when the backward goes on to what was made
                              before the module's forward, it releases (``traversal.py``)
    use without a hook        gathered on the spot, released when the pass ends
    ``zeroengine.gathered``   ``pin`` and ``unpin``
    not ``is_releasable``     never released; the next pre-forward hook waits for the all-gather of the step

Units that a backward gathered and did not release are released when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.monitor.record import Kind
from zeroengine.monitor.timer import Timer
from zeroengine.runtime.deferred_frees import DeferredFrees
from zeroengine.runtime.prefetch_order import PrefetchLimits, PrefetchOrder
from zeroengine.runtime.unit import GatherState, Unit, received_bytes
from zeroengine.utils.compiler_disable import outside_torch_func
from zeroengine.utils.work import Work

log = logging.getLogger("zeroengine")


class Gatherer:
    """The units that are gathered, and those that are pinned. It knows nothing of gradients, nor of what runs.

    Args:
        units: All units. Those that are releasable are released here.
        transport: Gathers.
        config: The resolved configuration.
        timer: Times gathers.
        gather_for_use: Called with a parameter that is used while its unit is released, and with the operation's name.
        is_in_use: Whether a forward in progress needs a unit, which is then not released.
        abandon_forward: Forgets forwards whose end no hook reported, and releases their unhooked uses.

    Attributes:
        num_pins: The number of pins now, such as those of ``zeroengine.gathered``; a unit that is pinned twice counts
            twice. Ranks may run different forwards meanwhile, so no order of units is learned or followed.
        live_numel: Elements of releasable units that are gathered now.
        deferred_frees: The units whose full buffers are not freed yet because other tensors alias them.
        unhooked_uses: The units that were gathered for a use without a hook. They are released when the pass ends.
        has_averages: Whether parameters have the moving averages of the weights, for an evaluation.
        refuse_calls: Ends the stream of the weights that is open and raises, if one is, with the name of a call.
        has_values: Whether the shards hold values. They do not while the parameters are offloaded for a while.
        state_reads: What still reads states on a stream of its own. The next change of values waits for it.
        gather_on_demand: Gathers a parameter that is used while it is not None, when every rank runs the same code.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        transport: Transport,
        config: Config,
        timer: Timer,
        gather_for_use: Callable[[nn.Parameter, str], None],
        is_in_use: Callable[[Unit], bool],
        abandon_forward: Callable[[], None],
    ) -> None:
        self._transport, self._timer = transport, timer
        self._gather_for_use, self._is_in_use, self._abandon_forward = gather_for_use, is_in_use, abandon_forward
        self._pins_of: dict[Unit, int] = dict.fromkeys(units, 0)
        self.num_pins = self.live_numel = 0
        self.has_averages, self.has_values = False, True
        self.refuse_calls: Callable[[str], None] | None = None
        self.deferred_frees = DeferredFrees()
        self.unhooked_uses: dict[Unit, None] = {}
        self.state_reads: list[Work] = []
        self.gather_on_demand: Callable[[nn.Parameter, str], None] | None = None
        self._prefetch_order: PrefetchOrder[Unit] = PrefetchOrder()
        self._last_in_forward: Unit | None = None
        self._has_noticed_refused = False
        self._prefetch_limits = PrefetchLimits.of_settings(
            config.zero_optimization,
            overlaps=transport.overlaps,
            reads_shards=any(unit.offloaded_shards is not None for unit in self._pins_of),
        )
        # The full buffers of releasable units have no memory yet.
        for unit in self._pins_of:
            if unit.is_releasable:
                unit.mark_released(gather_for_use)

    def pinned_units(self) -> list[Unit]:
        """Return the units that are pinned."""
        return [unit for unit, num_pins in self._pins_of.items() if num_pins]

    # -- passes: forwards and backwards of the whole model ------------------------------------------

    def begin_pass(self) -> None:
        """Begin a forward or a backward."""
        self._prefetch_order.start_pass()

    def end_forward_pass(self) -> None:
        """End the forward that has begun."""
        self._last_in_forward = self._prefetch_order.last
        self._prefetch_order.end_pass()

    def end_backward_pass(self) -> None:
        """End the backward that has begun, and release what it has gathered and not released."""
        self._prefetch_order.end_pass()
        for unit in self._pins_of:
            if unit not in self.unhooked_uses:
                self.release(unit)

    def gather_and_prefetch(self, unit: Unit, *, in_backward: bool) -> None:
        """Gather ``unit``, which a pass needs now, and gather ahead the units that followed it in the previous pass."""
        self.ensure(unit)
        # The order matters only for releasable units, and only where all ranks visit the same units.
        if self.num_pins or not unit.is_releasable:
            return
        self._prefetch_order.note_use(unit, in_backward)
        for following in self._prefetch_order.to_prefetch(self._prefetch_limits, self.live_numel):
            shards = following.offloaded_shards
            # A collective is started early only if it proceeds by itself. Otherwise at most this rank's own shard is
            # read ahead, which concerns no other rank.
            if self._transport.overlaps if shards is None else shards.can_gather_ahead:
                self.start(following)
            elif shards is not None:
                shards.prefetch(following.shard)
        self._notice_refused()

    def _notice_refused(self) -> None:
        """Say once that a limit stops what the other one allows."""
        needed = self._prefetch_order.live_numel_refused
        if not needed or self._has_noticed_refused:
            return
        self._has_noticed_refused = True
        if self._transport.rank == 0:
            limit = self._prefetch_limits.max_live_numel
            log.info(
                f"zero_optimization.max_live_parameters ({limit}) stops gathers that prefetch_bucket_size allows: "
                f"write at least {needed} for them, or ignore this if the memory is needed"
            )

    def is_kept_for_backward(self, unit: Unit) -> bool:
        """Return whether a forward that a backward follows keeps ``unit``: the last unit of a forward is its first."""
        return unit is self._last_in_forward

    def note_unhooked_use(self, unit: Unit) -> None:
        """Note that ``unit`` is gathered for a use that no hook announced."""
        self.unhooked_uses[unit] = None

    def release_unhooked_use(self, unit: Unit) -> None:
        """Release ``unit`` if it was gathered for a use that no hook announced."""
        if unit in self.unhooked_uses:
            del self.unhooked_uses[unit]
            self.release(unit)

    def release_unhooked_uses(self) -> None:
        """Release the units that were gathered for uses that no hook announced."""
        units, self.unhooked_uses = self.unhooked_uses, {}
        for unit in units:
            self.release(unit)
        self.deferred_frees.retry()

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

    # -- single units -----------------------------------------------------------------------------

    def start(self, unit: Unit, exact: bool = False) -> None:
        """Launch the all-gather of a released unit. ``exact``: see ``Unit.start_gather``."""
        if unit.is_released:
            if not self.has_values:
                raise ReleasedParameterError(
                    f"unit {unit.name} is used while the parameters are offloaded: call engine.reload_states() before"
                )
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

    # -- steps ------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Prepare an update: ``quiesce``, and replace even the buffers that graphs saved through the user's hooks."""
        # Those graphs belong to the forward before this update.
        self.deferred_frees.begin_update()
        self.quiesce(values_change=False)

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
            values_change: Whether values of any unit may change. Otherwise only those that ``publish_update`` is called
                for.

        Raises:
            ZeroEngineError: A parameter is not what ``initialize`` made of it. See ``Unit.check_parameters``.
        """
        self._abandon_forward()
        self.await_state_reads()
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
