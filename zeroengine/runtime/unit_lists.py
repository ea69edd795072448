"""Lists of units of which a rank may use only some, such as experts: all ranks gather all of them, in one order.

[Note: Units that a rank skips]
A gather takes all ranks. Where the elements of a ``ModuleList`` or ``ModuleDict`` are units, a forward of the module
that holds the list may call some of them, and on another rank others. So a rank that comes to element 3 after element 1
first takes part in the gather of element 2, and releases it at once. What it has not called is gathered when it comes
to a unit that is no element, or at the end of the forward. In backward the same happens in descending order, for the
elements that the forward skipped:

    forward, rank 0   gathers 0, 1, [2], 3     calls 0, 1 and 3; [] is gathered for the others
    forward, rank 1   gathers [0], 1, 2, [3]   calls 1 and 2
    backward, rank 0  gathers 3, [2], 1, 0
    backward, rank 1  gathers [3], 2, 1, [0]

A list whose elements are all called once, in order, as the layers of a dense model, has the same gathers as without
this. Elements that no rank calls are gathered for nothing. If a rank calls the elements in another order, or units of
another list between them, the list is gathered as needed from then on: all ranks must then call the same elements.

Several modules may hold a list, such as experts that all layers share, and each forward of such a module goes through
the list once more. Each time is a ``ListPass``. Autograd runs the backwards of passes in the reverse order. An element
is released when the backward of a pass has gone beyond it. A rank that calls the element in an earlier pass as well
would otherwise keep it, and another rank would not.

[Note: Reduces of units that a rank skips]
A unit that a rank has not used is reduced with zeros (``Reducer.unit_past``). The rank could reduce it when its
backward begins, but a rank that uses the unit cannot, and has gathers to do before. The first rank would soon wait for
memory that the peers read, and they for its gathers. So a skipped unit is *held* until the backward of the pass has
gathered it: each rank gathers element 3, reduces it, gathers element 2, and so on.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from zeroengine.runtime.backward_order import Key
from zeroengine.runtime.first_list_calls import Arrival, ArrivalExchange, first_element
from zeroengine.runtime.forward_graphs import ForwardGraph, ForwardGraphs
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_list import NUM_FORWARDS, ListPass, ListUser, UnitList, find_users

log = logging.getLogger("zeroengine")

# Higher than the number of any pass.
_NO_BACKWARD = sys.maxsize


class UserForward:
    """A forward in progress of a module that holds lists.

    Attributes:
        module: The module.
        order_key: See ``Operation``.
        passes: Its passes through all of its lists, in order.
        current: By list: the last one of them.
        modules_before: By list: modules that the forward has called before elements.
    """

    def __init__(self, module: nn.Module, users: list[ListUser], model_forward: ForwardGraph) -> None:
        self.module, self._model_forward = module, weakref.ref(model_forward)
        self.order_key: Key | None = None
        self.passes = [ListPass(user, model_forward) for user in users]
        self.current = {user.unit_list: list_pass for user, list_pass in zip(users, self.passes, strict=True)}
        self.modules_before: dict[UnitList, list[nn.Module]] = {user.unit_list: [] for user in users}

    @property
    def model_forward(self) -> ForwardGraph:
        """See ``Operation``."""
        forward = self._model_forward()
        assert forward is not None
        return forward

    @property
    def called_nothing_trainable(self) -> bool:
        """Whether lists have trainable elements, and this rank has called none of these."""
        has_trainable = False
        for list_pass in self.passes:
            # A list that no rank called in its first forwards is probably never called.
            if not list_pass.user.is_called:
                continue
            skipped = set(list_pass.skipped)
            for index, element in enumerate(list_pass.unit_list.elements):
                if any(unit.gets_gradients for unit in element):
                    has_trainable = True
                    if index not in skipped:
                        return False
        return has_trainable

    def begin_pass(self, previous: ListPass) -> ListPass:
        """Begin another pass through the list of ``previous``, and return it."""
        list_pass = ListPass(previous.user, self.model_forward)
        self.passes.append(list_pass)
        self.current[previous.unit_list] = list_pass
        return list_pass


class UnitLists:
    """Decides which units a rank gathers for the others. See the notes above.

    Args:
        model: The model.
        units_of: The units that each module's forward needs.
        model_forwards: The forwards of the whole model.
        gather_for_others: Gathers a unit that this rank does not use, and releases it. It is also called with whether
            a backward needs the unit.
        release: Releases a unit.
        not_held: Called with a unit that ``hold`` returned, once the backward has gathered it for other ranks.
        exchange: Exchanges where the ranks are in first forwards.

    Attributes:
        users: The lists of each module whose forwards are to be reported.
    """

    def __init__(
        self,
        model: nn.Module,
        units_of: Mapping[nn.Module, list[Unit]],
        model_forwards: ForwardGraphs,
        gather_for_others: Callable[[Unit, bool], None],
        release: Callable[[Unit], None],
        not_held: Callable[[Unit], None],
        exchange: ArrivalExchange,
    ) -> None:
        self._exchange = exchange
        self._gather_for_others, self._release, self._not_held = gather_for_others, release, not_held
        self.users = find_users(model, units_of)
        self._lists = list(dict.fromkeys(user.unit_list for users in self.users.values() for user in users))
        self._index_of: dict[Unit, tuple[UnitList, int]] = {}
        for unit_list in self._lists:
            for index, element in enumerate(unit_list.elements):
                self._index_of.update((unit, (unit_list, index)) for unit in element)
        self._model_forwards = model_forwards
        self._numbers = itertools.count()
        self._forwards: list[UserForward] = []
        # Passes without gradients inside a reentrant checkpoint. Recomputations replace them by others.
        self._awaiting_recomputation: list[ListPass] = []
        # Passes whose backward is in progress, in the order in which autograd comes to them.
        self._backwards: list[ListPass] = []
        # Of the backward in progress: autograd has passed all passes with a higher number.
        self._last_number = _NO_BACKWARD
        self._held: set[Unit] = set()

    def begin_model_forward(self) -> None:
        """Note that a forward of the whole model begins with gradients, outside of any backward."""
        self._awaiting_recomputation = [
            list_pass for list_pass in self._awaiting_recomputation if not list_pass.is_missed
        ]

    # -- forward ----------------------------------------------------------------------------------

    def begin_forward(self, module: nn.Module) -> None:
        """Note that a forward of ``module``, which holds lists, begins."""
        self._forwards.append(UserForward(module, self.users[module], self._model_forwards.latest))

    def end_forward(self, module: nn.Module, *, raised: bool) -> UserForward | None:
        """Gather what the forward of ``module`` has not called. Return the forward, if its backward may run."""
        depth = next((i for i in reversed(range(len(self._forwards))) if self._forwards[i].module is module), None)
        if depth is None:
            return None
        forward = self._forwards[depth]
        # Forwards inside this one that are still listed ended without their hooks.
        del self._forwards[depth + 1 :]
        if not raised:
            self._agree(None, None)
        self._forwards.pop()
        if raised:
            forward.passes = []
            return None
        for list_pass in forward.current.values():
            if list_pass.user.is_settled:
                self._gather_up_to(list_pass, len(list_pass.unit_list.elements))
            if list_pass.user.end_forward():
                log.warning(
                    "No rank has called %s and the other elements of their list in %d forwards. Every rank gathers "
                    "them from now on, because some rank may call them later. Delete them if none will.",
                    list_pass.unit_list.elements[0][0].name,
                    NUM_FORWARDS,
                )
        forward.passes = [
            list_pass for list_pass in forward.passes if list_pass.next_index and list_pass.unit_list.is_in_order
        ]
        for list_pass in forward.passes:
            list_pass.number = next(self._numbers)
        # The graph may own the forward for longer than the engine lives.
        forward.current.clear()
        forward.modules_before.clear()
        return forward if forward.passes else None

    def forget_forwards(self) -> None:
        """Forget forwards whose end was not reported."""
        self._forwards.clear()

    def expect_backward(self, forward: UserForward) -> None:
        """Hold what ``forward`` skipped until its backward. The graph must own ``forward``."""
        for list_pass in forward.passes:
            list_pass.unit_list.passes.add(list_pass)

    def expect_recomputation(self, forward: UserForward) -> None:
        """Hold what ``forward`` skipped, which ran without gradients in a reentrant checkpoint."""
        self.expect_backward(forward)
        self._awaiting_recomputation += forward.passes

    # -- backward ---------------------------------------------------------------------------------

    def hold(self, units: Iterable[Unit]) -> set[Unit]:
        """Return those of ``units`` that the backward which begins now is to gather for other ranks."""
        self._held = {unit for unit in units if self._is_awaited(unit)}
        return self._held

    def _is_awaited(self, unit: Unit) -> bool:
        unit_list, index = self._index_of.get(unit, (None, 0))
        return unit_list is not None and any(
            list_pass.awaits(index, self._model_forwards, self._last_number) for list_pass in unit_list.passes
        )

    def _report_not_held(self, units: Iterable[Unit]) -> None:
        for unit in [unit for unit in units if unit in self._held and not self._is_awaited(unit)]:
            self._held.remove(unit)
            self._not_held(unit)

    def begin_backward(self, forward: UserForward, depth: int) -> None:
        """Note that the backward of ``forward`` begins, unless it has begun.

        Args:
            forward: What ``end_forward`` has returned.
            depth: The number of nested backwards in progress.
        """
        if not forward.passes or forward.passes[0].remaining is not None:
            return
        # A graph that was not retained has no second backward on any rank.
        if forward.passes[0].has_run and not forward.model_forward.is_retained:
            return
        # Autograd has run every operation after this forward.
        for list_pass in list(self._backwards):
            if forward.module not in list_pass.unit_list.element_of:
                self._finish(list_pass)
        is_first = self._last_number == _NO_BACKWARD
        for list_pass in reversed(forward.passes):
            list_pass.remaining, list_pass.depth = list(list_pass.skipped), depth
            self._backwards.append(list_pass)
            list_pass.unit_list.passes.add(list_pass)
            if list_pass.is_recomputed:
                self._replace_awaiting(list_pass.unit_list)
            else:
                self._last_number = min(self._last_number, list_pass.number)
        if is_first:
            # Later forwards are not in this backward.
            self._report_not_held(list(self._held))

    def _replace_awaiting(self, unit_list: UnitList) -> None:
        """Forget the last pass through ``unit_list`` that awaits its recomputation, which has come."""
        awaiting = next((old for old in reversed(self._awaiting_recomputation) if old.unit_list is unit_list), None)
        if awaiting is not None:
            self._awaiting_recomputation.remove(awaiting)
            unit_list.passes.discard(awaiting)

    def end_nested_backward(self, depth: int) -> None:
        """Gather what is left for other ranks in backwards of which more than ``depth`` are nested."""
        for list_pass in list(self._backwards):
            if list_pass.depth > depth:
                self._finish(list_pass)

    def end_backward(self) -> None:
        """Forget the backward of the whole model, which has ended or raised."""
        self._backwards.clear()
        self._held.clear()
        for unit_list in self._lists:
            for list_pass in unit_list.passes:
                # A retained graph may have another backward.
                list_pass.has_run = list_pass.has_run or list_pass.remaining is not None
                is_earlier = self._last_number != _NO_BACKWARD and list_pass.number < self._last_number
                list_pass.is_missed = list_pass.is_missed or (is_earlier and not list_pass.has_run)
                list_pass.remaining = list_pass.lowest_index = None
        self._last_number = _NO_BACKWARD

    # -- both -------------------------------------------------------------------------------------

    def visit(self, unit: Unit, module: nn.Module | None, *, in_backward: bool) -> None:
        """Gather for other ranks what they gather before ``unit``. Call it before ``unit`` is gathered.

        Args:
            unit: The unit.
            module: The module that needs it; None: unknown.
            in_backward: Whether the backward of a module needs it, rather than a forward.
        """
        if not (self._forwards or self._backwards):
            return
        unit_list, index = self._index_of.get(unit, (None, 0))
        if in_backward:
            self._visit_in_backward(module, unit_list, index)
            return
        self._agree(unit, module)
        is_visited = False
        for forward in reversed(self._forwards):
            for list_pass in list(forward.current.values()):
                if list_pass.unit_list is unit_list:
                    # A module inside may hold the same list. Then its own forward goes through the list.
                    if not is_visited:
                        self._visit_element(forward, list_pass, index)
                    is_visited = True
                elif module is not None and not list_pass.user.contains(module):
                    self._visit_other(forward, list_pass, module)
        if unit_list is not None and not is_visited:
            self._visit_recomputed(unit_list, index)

    def _visit_element(self, forward: UserForward, list_pass: ListPass, index: int) -> None:
        unit_list = list_pass.unit_list
        self._note_called(forward, list_pass)
        # The units of one element follow one another.
        if not unit_list.is_in_order or index == list_pass.next_index - 1:
            return
        # A loop that called every element may start again. After one that skipped some, this is another order.
        if index == 0 and list_pass.next_index == len(unit_list.elements) and not list_pass.skipped:
            list_pass = forward.begin_pass(list_pass)
        if index < list_pass.next_index:
            unit_list.is_in_order = False
            return
        self._gather_up_to(list_pass, index)
        list_pass.next_index = index + 1

    def _note_called(self, forward: UserForward, list_pass: ListPass) -> None:
        """Note that this rank calls an element, or another one with which it agrees on first calls."""
        user, modules_before = list_pass.user, forward.modules_before[list_pass.unit_list]
        user.is_called = user.is_called or not user.is_settled
        user.is_settled = True
        user.modules_before.update(modules_before)
        modules_before.clear()

    def _visit_other(self, forward: UserForward, list_pass: ListPass, module: nn.Module) -> None:
        user = list_pass.user
        # Ranks that call no element have seen nothing of a list that none called in its first forwards.
        if list_pass.next_index and user.is_called:
            user.modules_after.add(module)
        elif not user.is_followed_by(module):
            forward.modules_before[list_pass.unit_list].append(module)
            return
        self._gather_up_to(list_pass, len(list_pass.unit_list.elements))

    # -- first forwards: see the note in first_list_calls.py ----------------------------------------

    def _agree(self, unit: Unit | None, module: nn.Module | None) -> None:
        """Take part in the gathers of other ranks before what this rank comes to, if lists have not been called yet.

        Args:
            unit: The unit that it comes to; None: the end of the innermost forward.
            module: The module that needs the unit.
        """
        if unit is None and all(list_pass.user.is_settled for list_pass in self._forwards[-1].passes):
            return
        while unsettled := {
            list_pass.user.number: (forward, list_pass)
            for forward in self._forwards
            for list_pass in forward.current.values()
            if not list_pass.user.is_settled
        }:
            element = None
            if unit in self._index_of:
                unit_list, index = self._index_of[unit]
                passes = (forward.current.get(unit_list) for forward in reversed(self._forwards))
                innermost = next((list_pass for list_pass in passes if list_pass is not None), None)
                # Not all ranks come to an element of a list that is settled.
                if innermost is None or innermost.user.is_settled:
                    return
                element = (innermost.user.number, index)
            elif unit is not None and (module is None or self._is_inside_element(module)):
                return
            # All ranks have gathered what comes before.
            self._complete_settled_passes(unit, module)
            first = first_element(self._exchange(Arrival(list(unsettled), element)))
            if first is None or first == element:
                return
            number, index = first
            forward, list_pass = unsettled[number]
            self._note_called(forward, list_pass)
            self._gather_up_to(list_pass, index + 1)

    def _complete_settled_passes(self, unit: Unit | None, module: nn.Module | None) -> None:
        """Gather the rest of lists whose elements come before what this rank comes to."""
        unit_list, _ = self._index_of.get(unit, (None, 0)) if unit is not None else (None, 0)
        for forward in reversed(self._forwards) if unit is not None else self._forwards[-1:]:
            for list_pass in list(forward.current.values()):
                if not list_pass.user.is_settled or list_pass.unit_list is unit_list:
                    continue
                if unit is None:
                    self._gather_up_to(list_pass, len(list_pass.unit_list.elements))
                elif module is not None and not list_pass.user.contains(module):
                    self._visit_other(forward, list_pass, module)

    def _is_inside_element(self, module: nn.Module) -> bool:
        return any(module in unit_list.element_of for forward in self._forwards for unit_list in forward.current)

    def _visit_recomputed(self, unit_list: UnitList, index: int) -> None:
        """Note that a checkpoint runs elements again in backward, without the module that holds their list."""
        for list_pass in self._backwards:
            if list_pass.unit_list is unit_list and index not in list_pass.skipped:
                self._gather_remaining(list_pass, index)
                return

    def _gather_up_to(self, list_pass: ListPass, stop: int) -> None:
        if list_pass.unit_list.is_in_order:
            for index in range(list_pass.next_index, stop):
                list_pass.skipped.append(index)
                self._gather(list_pass, index, in_backward=False)
            list_pass.next_index = max(list_pass.next_index, stop)

    def _visit_in_backward(self, module: nn.Module | None, unit_list: UnitList | None, index: int) -> None:
        is_visited = False
        for list_pass in list(self._backwards):
            user = list_pass.user
            if list_pass.unit_list is not unit_list:
                if module is None or user.contains(module):
                    continue
                if list_pass.lowest_index is not None or not user.is_followed_by(module):
                    self._finish(list_pass)
            elif not is_visited:
                # Elements come in descending order. Otherwise the visit belongs to an earlier pass.
                lowest = list_pass.lowest_index
                if index in list_pass.skipped or (lowest is not None and index > lowest):
                    self._finish(list_pass)
                else:
                    self._gather_down_to(list_pass, index)
                    is_visited, list_pass.lowest_index = True, index

    def _finish(self, list_pass: ListPass) -> None:
        self._gather_down_to(list_pass, -1)
        self._backwards.remove(list_pass)

    def _gather_down_to(self, list_pass: ListPass, stop: int) -> None:
        lowest = list_pass.lowest_index
        if lowest is not None and lowest > stop:
            for unit in list_pass.unit_list.elements[lowest]:
                self._release(unit)
        self._gather_remaining(list_pass, stop)

    def _gather_remaining(self, list_pass: ListPass, stop: int) -> None:
        while list_pass.remaining and list_pass.remaining[-1] > stop:
            # It is no longer held when it is gathered, so that its reduce comes before the next gather.
            self._gather(list_pass, list_pass.remaining.pop(), in_backward=True)

    def _gather(self, list_pass: ListPass, index: int, *, in_backward: bool) -> None:
        for unit in list_pass.unit_list.elements[index]:
            self._gather_for_others(unit, in_backward)
        if in_backward:
            self._report_not_held(list_pass.unit_list.elements[index])
