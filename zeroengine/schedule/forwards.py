"""Forwards in progress: what they gather and release, and the visits that they leave in the logs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from zeroengine.schedule.backwards import Backwards
from zeroengine.schedule.events import Entered, ForwardBegan, ForwardEnded, Left, ListEnded, Moment, Used
from zeroengine.schedule.lists import ItemList, ListWalk
from zeroengine.schedule.residency import Residency, UnitFacts
from zeroengine.schedule.visits import Visit, VisitLog, VisitLogs

log = logging.getLogger("zeroengine")


class Call(NamedTuple):
    """A forward in progress of a module that needs units or holds a list of units.

    Attributes:
        module: The module.
        visit: Its units, which stay gathered until the forward ends, and where it began.
        is_tracked: Whether a backward may follow.
        walk: Where it is in its list, if it holds one.
        log: What the visit is added to.
    """

    module: int
    visit: Visit
    is_tracked: bool
    walk: ListWalk | None
    log: VisitLog


class Forwards:
    """The forwards in progress.

    Args:
        units: All units, by number.
        units_of: By module: the units that its forward needs.
        lists: By module: the list of units that it holds.
        lookups: The modules whose backward needs no values of their units.
        logs: The logs of forwards.
        residency: The units that are gathered.
        backwards: The backwards in progress.

    Attributes:
        calls: The forwards of modules, the innermost last.
    """

    def __init__(
        self,
        units: Sequence[UnitFacts],
        units_of: Sequence[Sequence[int]],
        lists: Mapping[int, ItemList],
        lookups: Collection[int],
        logs: VisitLogs,
        residency: Residency,
        backwards: Backwards,
    ) -> None:
        self._units, self._units_of, self._lists, self._lookups = units, units_of, lists, lookups
        # By module: those of its units that are released between uses.
        self._releasable_of = [[unit for unit in needed if units[unit].is_releasable] for needed in units_of]
        self._logs, self._residency, self._backwards = logs, residency, backwards
        self.calls: list[Call] = []
        # Whether the outermost of ``calls`` is a pass, of a part of the model that was called by itself.
        # And whether a backward may follow the latest pass of a forward.
        self._is_part = self._has_grad = False

    # -- the whole model --------------------------------------------------------------------------

    def begin(self, event: ForwardBegan) -> None:
        """Begin a pass, if no forward and no backward is in progress."""
        residency = self._residency
        # A forward inside a backward is a recomputation: the pass in progress is the backward.
        in_backward = self._backwards.is_running
        if not residency.num_forwards:
            # Inside ``zeroengine.gathered`` ranks may run different forwards, which have no common order to learn.
            if not (in_backward or residency.num_pins):
                residency.begin_pass(has_backward=event.has_grad)
            self._has_grad = event.has_grad
            if event.has_grad and not in_backward:
                self._logs.begin(event.thread)
                # A use of parameters that stay gathered goes unnoticed.
                self._logs.latest.untracked.update(residency.pinned())
        residency.num_forwards += 1

    def end(self, event: ForwardEnded) -> None:
        """End a forward of the whole model. The outermost one ends the pass."""
        if event.shows_outputs:
            self._logs.latest.shows_outputs = True
        residency = self._residency
        # ``abandon`` may have reset the count before.
        residency.num_forwards = max(0, residency.num_forwards - 1)
        if residency.num_forwards:
            return
        if not (self._backwards.is_running or residency.num_pins):
            residency.end_forward_pass()
        residency.release_all_unhooked()

    def abandon(self) -> None:
        """Forget forwards whose end was not reported. None can be in progress."""
        self._residency.num_forwards = 0
        self._is_part = False
        self.calls.clear()
        self._residency.forget_uses()
        self._residency.release_all_unhooked()

    # -- modules ----------------------------------------------------------------------------------

    def enter(self, event: Entered) -> None:
        """Gather the units that the forward of a module needs, and begin its visit."""
        module, moment, is_tracked = event
        if self._backwards.is_running:
            # A recomputation begins where autograd reads the first tensor, which may be behind what it has reached.
            self._backwards.move_to_node(moment.task, moment.node)
        units, item_list = self._releasable_of[module], self._lists.get(module)
        needed = units if item_list is None else [*units, *item_list.index_of]
        if needed and not (self._residency.num_forwards or self.calls):
            self._begin_part(moment, has_list=item_list is not None)
        visit_log = self._enter_log(needed, moment) if needed else None
        for unit in self._units_of[module]:
            if self._units[unit].is_releasable:
                self._gather_skipped_before(unit, module, moment)
            self._gather(unit)
        # Units that stay gathered are never released, so they need no visit.
        if visit_log is None:
            return
        # Inside ``zeroengine.gathered`` ranks may run different numbers of forwards.
        follows = item_list is not None and not self._residency.num_pins
        walk = ListWalk(item_list, moment.has_grad, moment.next_node) if item_list is not None and follows else None
        if moment.has_grad and not is_tracked:
            self._mark_untracked(units)
        elif not moment.has_grad and units:
            self._log_recomputed(visit_log, units, moment)
        self._residency.begin_use(units)
        # A rank that skips an item does not know which modules of it the other ranks call.
        is_lookup = module in self._lookups and not any(self._units[unit].is_item for unit in units)
        visit = Visit(units, moment.next_node, needs_values=not is_lookup)
        self.calls.append(Call(module, visit, is_tracked, walk, visit_log))

    def _begin_part(self, moment: Moment, *, has_list: bool) -> None:
        """Begin a pass where a part of the model is called by itself, if its units have an order to learn."""
        # What is called between the steps of a training, unit by unit, is not followed by what follows it in a forward
        # of the model.
        residency = self._residency
        if (has_list or not residency.trains) and not (self._backwards.is_running or residency.num_pins):
            self._is_part = True
            self._has_grad = moment.has_backward
            residency.begin_pass(has_backward=moment.has_backward)

    def call_of(self, module: int) -> Call | None:
        """Return the innermost forward of a module. None: none is known, as a hook of the user raised before."""
        for call in reversed(self.calls):
            if call.module == module:
                return call
        return None

    def end_list(self, event: ListEnded) -> None:
        """Gather for other ranks the items that this rank does not call."""
        call = self._return_to(event.module)
        if call.walk is not None:
            self._gather_skipped(call.walk, len(call.walk.item_list), event.moment)

    def leave(self, event: Left) -> None:
        """Release the units of a module, and add its visit to the log."""
        call, moment = self._return_to(event.module), event.moment
        units, has_backward = call.visit.units, event.last_node is not None
        self._forget_calls(len(self.calls) - 1)
        if event.last_node is not None:
            self._log_visit(call, event.last_node, event)
        elif moment.has_grad:
            for visit in (call.visit, *(() if call.walk is None else call.walk.skipped)):
                self._mark_untracked(visit.units)
        walk = self._walk_of(units)
        if walk is not None:
            walk.last_node = moment.present_node
            if not has_backward and call.is_tracked and walk.has_grad and event.has_tensors:
                # A rank that skips this item cannot know that no backward comes to it.
                call.log.set_place(call.visit, walk.last_node)
                walk.skipped.append(call.visit)
        for unit in units:
            self._release(unit, has_backward=has_backward)
        if self._is_part and not self.calls:
            self._is_part = False
            self._residency.end_forward_pass()

    def _walk_of(self, units: Sequence[int]) -> ListWalk | None:
        """Return the innermost walk through a list that one of ``units`` belongs to."""
        for call in reversed(self.calls):
            if call.walk is not None and any(map(call.walk.item_list.index_of.__contains__, units)):
                return call.walk
        return None

    def _return_to(self, module: int) -> Call:
        """Return the innermost forward of a module. Those inside of it that are listed ended without a report."""
        while self.calls[-1].module != module:
            self._forget_calls(len(self.calls) - 1)
        return self.calls[-1]

    def _forget_calls(self, depth: int) -> None:
        for call in self.calls[depth:]:
            self._residency.end_use(self._releasable_of[call.module])
        del self.calls[depth:]

    def _log_visit(self, call: Call, last_node: int, event: Left) -> None:
        """Add the visit of a forward that has ended, and to which a backward comes, to its log."""
        visit, walk = call.visit, call.walk
        if walk is not None and event.in_checkpoint:
            # The recomputation needs all items. When it comes depends on what this rank has called, so the backward
            # gathers them when it comes to the module, and keeps them.
            visit.units = [*visit.units, *walk.item_list.index_of]
        call.log.set_place(visit, last_node)
        call.log.add([*(walk.skipped if walk is not None else ()), visit], event.moment.thread)

    def _release(self, unit: int, *, has_backward: bool) -> None:
        """Release ``unit`` after its use, on a rank that has called its module as on one that has skipped it."""
        # The backward of a recomputed module follows at once, and the last unit of a forward is the first unit that the
        # backward needs. So neither is released here.
        if not (self._backwards.is_running or (has_backward and self._residency.is_kept_for_backward(unit))):
            self._residency.release(unit)

    def _enter_log(self, units: Sequence[int], moment: Moment) -> VisitLog:
        """Return the log of a forward of a module that begins and needs ``units``. In a backward, go to its visit."""
        if self._backwards.is_running:
            return self._backwards.recompute(units, moment, is_nested=bool(self.calls))
        if not self._residency.num_forwards and moment.has_backward:
            self._logs.continue_latest(moment.thread)
        return self._logs.latest

    @property
    def logs_recomputed(self) -> bool:
        """Whether a use without gradients now is logged, if it is inside a reentrant checkpoint."""
        in_pass = self._is_part or self._residency.num_forwards > 0
        return self._has_grad or not in_pass or bool(self._backwards.cursors)

    def asks_for_checkpoint(self) -> bool:
        """Return whether ``Moment.checkpoint_node`` matters where a forward of a module without gradients is now."""
        if self.logs_recomputed:
            return True
        # A list that a forward without gradients goes through leaves no visits.
        for call in self.calls:
            if call.walk is not None and call.walk.has_grad:
                return True
        return False

    def _log_recomputed(self, visit_log: VisitLog, units: Sequence[int], moment: Moment) -> None:
        """Add ``units`` to the log if they are used inside a reentrant checkpoint, which runs without gradients."""
        if self.logs_recomputed and moment.checkpoint_node is not None:
            visit_log.add_recomputed(units, moment.checkpoint_node, moment.thread)

    def _mark_untracked(self, units: Iterable[int]) -> None:
        """Note that the backward of a use of ``units`` cannot be followed. A forward without gradients has none."""
        if not self._backwards.is_running and (self._has_grad or not self._residency.num_forwards):
            self._logs.latest.untracked.update(units)

    def _gather(self, unit: int) -> None:
        # Only inside a pass all ranks visit the same units in the same order. A module that holds a list keeps its
        # other units, so it does not matter when those inside of it need them.
        in_backward, residency = self._backwards.is_running, self._residency
        if (self._is_part or residency.num_forwards or in_backward) and not residency.is_in_use(unit):
            residency.gather_and_prefetch(unit, in_backward=in_backward)
        else:
            residency.gather(unit)

    # -- lists of units, of which a rank may call only some -------------------------------------------

    def _gather_skipped_before(self, unit: int, module: int | None, moment: Moment) -> None:
        """Gather for other ranks what they gather before ``unit``.

        Args:
            unit: The unit, which this rank is about to gather.
            module: The module that needs it; None: unknown.
            moment: Now.
        """
        is_item = False
        for call in reversed(self.calls):
            walk = call.walk
            if walk is None:
                continue
            index = walk.item_list.index_of.get(unit)
            if index is None and module in walk.item_list.followers:
                self._gather_skipped(walk, len(walk.item_list), moment)
            # A module inside may hold the same list. Then its own forward goes through the list.
            elif index is not None and not is_item:
                is_item = True
                was_in_order = walk.item_list.is_in_order
                if walk.begin_call(index):
                    self._gather_skipped(walk, index, moment)
                    walk.next_index = index + 1
                elif was_in_order and not walk.item_list.is_in_order:
                    log.info(
                        "a forward calls the modules of a list in another order than they are registered in, from unit "
                        "%s on: each rank gathers what it calls from now on, so all ranks must call the same ones",
                        self._units[walk.item_list.units[index][0]].name,
                    )

    def _gather_skipped(self, walk: ListWalk, stop: int, moment: Moment) -> None:
        """Gather for other ranks the items from the next one up to ``stop``, and note their visits."""
        for units in walk.skip(stop):
            visit_log = self._enter_log(units, moment)
            for unit in units:
                self._gather(unit)
                self._release(unit, has_backward=moment.has_grad)
            if walk.has_grad:
                node = walk.last_node if walk.item_list.is_inside_block else moment.present_node
                visit = Visit(units, node)
                visit_log.set_place(visit, node)
                walk.skipped.append(visit)
            else:
                self._log_recomputed(visit_log, units, moment)

    # -- uses that no hook announced --------------------------------------------------------------

    def use(self, event: Used) -> None:
        """Gather a unit that is used while its values are away."""
        unit, moment, node, is_saved = event
        if is_saved or self._units[unit].is_releasable:
            self._residency.use_unhooked(unit)
            if not is_saved:
                self._mark_untracked([unit])
            if is_saved or (self._backwards.is_running and not self.calls):
                self._backwards.move_to_node(moment.task, node)
            else:
                self._gather_skipped_before(unit, None, moment)
        self._residency.gather(unit)
