"""Which gradients are to come, and which units are reduced next.

[Note: Units are reduced in one order]
Every rank reduces the units in the reverse of their order. A unit that is complete early waits for the units before
it. A unit with unused parameters never completes. It is reduced with zeros for the missing gradients when all visits of
it are over (see "One order of collectives" in ``visits.py``), or when the whole backward ends. So ranks that use
different parameters agree on every collective, and a rank that waits for memory of an earlier reduce does not wait for
the end of another rank's backward, which may need its own gathers.

[Note: Several gradients of one parameter]
Within one backward autograd adds up all gradients of a parameter and passes on their sum. But a backward may contain
others: each reentrant checkpoint runs its own, and so does a Function whose backward calls ``torch.autograd``. A
parameter that several of them use gets a gradient from each. So a unit is complete when each parameter has received as
many gradients as in the previous backward. The first time, gradients may arrive after their unit was complete. Such
*late* gradients wait on this rank and are reduced with those of the next micro-step, or before the update
(``Reducer.reduce_late_gradients``). No other rank knows of them. Before a step, the backends on the host ask all ranks
whether they have any. ``AsyncUpdate`` cannot ask without waiting, so there all ranks must have late gradients or none.

Several plain ``loss.backward()`` calls without a forward in between are one backward, too. Only in the last of them are
gradients counted and units complete, which is the call with the number that the last call of the previous backward had.
The gradients of the calls before it wait where they are reduced from, and those of further calls are late.

Whether a gradient is late decides in which order gradients are added, and so their last bits. It depends on these
counts alone, never on the moment at which a reduce is launched, so the degrees of parameters change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zeroengine.schedule.actions import Action, Complete, Fate, Reduce, TakeWaiting
from zeroengine.schedule.bucket_queue import BucketQueue
from zeroengine.schedule.events import GradientsBegan
from zeroengine.schedule.residency import UnitFacts


class Arrivals:
    """The gradients of one unit in the backward in progress. Lists have one entry for each parameter.

    Args:
        num_params: The number of parameters.

    Attributes:
        expected: The number of gradients that each parameter got in the previous backward.
        arrived: The number that each has got in this backward.
        num_pending: The number of parameters that have not got theirs.
        is_launched: Whether the unit was reduced in this step.
    """

    __slots__ = ("arrived", "expected", "is_launched", "num_pending")

    def __init__(self, num_params: int) -> None:
        self.expected, self.arrived, self.num_pending = [1] * num_params, [0] * num_params, 0
        self.is_launched = False

    def expect(self) -> None:
        """Wait for as many gradients of each parameter as in the previous backward."""
        self.arrived = [0] * len(self.expected)
        self.num_pending = len(self.expected)

    def stop(self) -> None:
        """Remember how many gradients each parameter got in this backward, and wait for no more."""
        # A parameter without a gradient in this backward may get one in the next, so at least one is expected.
        self.expected = [count or 1 for count in self.arrived]
        self.num_pending = 0


class ReduceOrder:
    """The gradients that are to come, and the order of reduces.

    Args:
        units: All units, by number.
        num_params: The number of parameters of each.
        bucket_numel: See ``BucketQueue``.
        actions: What is to be done is added to it.

    Attributes:
        order: The trained units, in the order in which they are reduced.
        is_producing: Whether the backward that runs now accumulates gradients.
    """

    def __init__(
        self, units: Sequence[UnitFacts], num_params: Sequence[int], bucket_numel: int, actions: list[Action]
    ) -> None:
        self._units, self._actions = units, actions
        self.order = [unit for unit, facts in enumerate(units) if facts.is_trained][::-1]
        self._arrivals = {unit: Arrivals(num_params[unit]) for unit in self.order}
        self._queue = BucketQueue(self.order, [unit.numel for unit in units], bucket_numel)
        # What the latest ``GradientsBegan`` says.
        self._reduces = self._is_last = True
        self.is_producing = False
        # The number of plain ``loss.backward()`` calls that the backward in progress is expected to have, and that have
        # ended. ``Engine.backward`` counts as none.
        self._expected_calls, self._num_ended_calls = 1, 0
        # The number of plain calls that are expected after the present one: a backward is expected to have as many as
        # the previous one had. Below 0: it has had more.
        self._num_further_calls = 0

    # -- what has arrived -------------------------------------------------------------------------

    def arrived(self, unit: int) -> Sequence[int]:
        """Return the number of gradients that each parameter of ``unit`` has got in this backward."""
        return self._arrivals[unit].arrived

    def num_pending(self, unit: int) -> int:
        """Return the number of parameters of ``unit`` that have not got their gradients."""
        return self._arrivals[unit].num_pending

    def is_complete(self, unit: int) -> bool:
        """Return whether no gradient of ``unit`` is to come."""
        return not self._arrivals[unit].num_pending

    def _is_reduced_in_backward(self, unit: int) -> bool:
        """Return whether the backward in progress reduces ``unit``, now or at its end."""
        if self._units[unit].is_sharded:
            return self._reduces
        # These gradients are reduced once, at the end of a step.
        return self._reduces and self._is_last and not self._arrivals[unit].is_launched

    def fate(self, unit: int) -> Fate:
        """Return what becomes of a gradient of ``unit`` that this rank computes now."""
        arrivals = self._arrivals[unit]
        is_reduced = self._is_reduced_in_backward(unit)
        if is_reduced:
            # A complete unit may still wait for those before it. How long it waits must not change the order of sums.
            waits = not arrivals.num_pending
        else:
            # Gradients that are not sharded are added to the kept sum even inside no_sync.
            waits = self._units[unit].is_sharded or arrivals.is_launched
        if not waits:
            return Fate.TAKEN
        # A gradient that waits after its unit was reduced is late. The other ranks do not know about it.
        return Fate.LATE if is_reduced or arrivals.is_launched else Fate.WAITING

    # -- a backward -------------------------------------------------------------------------------

    def begin(self, event: GradientsBegan) -> None:
        """Wait for the gradients of every unit."""
        self._reduces, self._is_last = event.reduces, event.is_last
        self._num_ended_calls, self._num_further_calls = 0, 0 if event.by_engine else self._expected_calls - 1
        self._queue.restart()
        for unit in self.order:
            self._arrivals[unit].expect()

    def count(self, unit: int, params: Iterable[int]) -> bool:
        """Count gradients that have arrived. Return whether no gradient of ``unit`` is to come."""
        arrivals = self._arrivals[unit]
        if self._num_further_calls == 0:
            for param in params:
                arrivals.arrived[param] += 1
                # A gradient beyond the expected number completes nothing, so the test is for equality. Such a gradient
                # is late if the unit was complete already.
                if arrivals.num_pending and arrivals.arrived[param] == arrivals.expected[param]:
                    arrivals.num_pending -= 1
        return not arrivals.num_pending

    def lacks(self, unit: int) -> bool:
        """Return whether ``unit`` lacks gradients that no further call of the backward is expected to bring."""
        arrivals = self._arrivals.get(unit)
        return arrivals is not None and arrivals.num_pending > 0 and self._num_further_calls <= 0

    def complete_with_zeros(self, unit: int) -> None:
        """Let ``unit`` be reduced without the gradients that it lacks."""
        self._actions.append(Complete(unit, self.fate(unit), takes_written=True, takes_waiting=True))
        self._arrivals[unit].num_pending = 0

    def advance(self, is_pending: Callable[[int], bool] | None = None) -> None:
        """Move units into the bucket, up to the first one that is not ready. Launch the bucket when it is full.

        Args:
            is_pending: Returns whether a backward that runs has visits of a unit to come. None: no backward runs.
        """

        def is_ready(unit: int) -> bool:
            return self.is_complete(unit) and not (is_pending is not None and is_pending(unit))

        self._launch(self._queue.queue_in_order(is_ready, self._is_reduced_in_backward))

    def _launch(self, units: Sequence[int]) -> None:
        for unit in units:
            self._arrivals[unit].is_launched = True
            self._actions.append(Reduce(unit))

    def end_call(self) -> None:
        """Note that a plain call has ended. Let all units be reduced that have not been, unless another is expected."""
        self.is_producing = False
        self._end_units(takes_written=True, ends=self._num_further_calls <= 0)
        self._num_ended_calls += 1
        self._num_further_calls -= 1

    def end(self) -> None:
        """Note that the backward has ended: reduce what was not reduced during it, in order."""
        self.is_producing = False
        self._expected_calls = self._num_ended_calls or self._expected_calls
        # After a plain call the user may have assigned gradients since the call ended.
        self._end_units(takes_written=not self._num_ended_calls)
        self._launch(self._queue.take_bucket())

    def _end_units(self, *, takes_written: bool, ends: bool = True) -> None:
        # Unit by unit, so that the buffer of one serves another as soon as it was reduced.
        for unit in self.order:
            self._actions.append(Complete(unit, self.fate(unit), takes_written, takes_waiting=ends))
            if ends:
                self._arrivals[unit].stop()
                self.advance()

    @property
    def num_calls(self) -> int:
        """The number of plain calls that the backward consists of so far; 0 for ``Engine.backward``."""
        return self._num_ended_calls

    # -- a step -----------------------------------------------------------------------------------

    def reduce_remaining(self) -> None:
        """Reduce the units that were not reduced in this step, as where all of its micro-steps were in no_sync."""
        for unit in self.order:
            if not self._arrivals[unit].is_launched:
                self._actions.append(TakeWaiting(unit))
                self._launch([unit])

    def forget(self, units: Iterable[int]) -> None:
        """Note that units were not reduced, because launching that has failed."""
        for unit in units:
            self._arrivals[unit].is_launched = False

    def end_step(self) -> None:
        """Let the next gradients be those of another step."""
        for arrivals in self._arrivals.values():
            arrivals.is_launched = False

    def drop(self) -> None:
        """Expect no gradient, and reduce nothing of what has arrived."""
        self._queue.take_bucket()
        self.is_producing = False
        for arrivals in self._arrivals.values():
            arrivals.num_pending = 0
        self.end_step()
