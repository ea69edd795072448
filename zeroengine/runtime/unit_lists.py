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

A list whose elements are all called in order, as the layers of a dense model, sees no difference. Elements that no rank
calls are gathered for nothing. A list that is called in another order on a rank, or together with another one in turns,
is left alone from then on: all ranks must then call the same elements.

Gradients need nothing of this kind: a unit that a rank has not used is reduced with zeros (``Reducer.unit_past``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from zeroengine.runtime.unit import Unit


@dataclass(eq=False)
class UnitList:
    """A list of modules whose elements are units."""

    user: nn.Module  # the module that holds the list, and calls its elements
    elements: list[list[Unit]]  # the units of each element
    inside: set[nn.Module]  # the modules of ``user``
    is_in_order: bool = True  # no forward has called the elements in another order
    is_called: bool = False  # some forward of ``user`` has called an element


@dataclass(eq=False)
class ListForward:
    """A forward of a list's user in progress."""

    units: UnitList
    next_index: int = 0  # the first element that is not gathered yet
    skipped: list[int] = field(default_factory=list)  # elements that this rank did not call


@dataclass(eq=False)
class ListBackward:
    """The backward of a list's user in progress, on a rank that skipped elements in its forward."""

    units: UnitList
    remaining: list[int]  # elements that this rank skipped and has not gathered yet, ascending
    is_begun: bool = False  # some element was gathered


class UnitLists:
    """Decides which units a rank gathers for the others. See the note above.

    Args:
        model: The model.
        units_of: The units that each module's forward needs.
        gather_for_others: Gathers a unit that this rank does not use, and releases it. It is also called with whether
            a backward needs the unit.

    Attributes:
        users: The modules whose forwards are to be reported.
    """

    def __init__(
        self,
        model: nn.Module,
        units_of: Mapping[nn.Module, list[Unit]],
        gather_for_others: Callable[[Unit, bool], None],
    ) -> None:
        self._gather_for_others = gather_for_others
        lists = _find_lists(model, units_of)
        self.users: dict[nn.Module, list[UnitList]] = {}
        self._index_of: dict[Unit, tuple[UnitList, int]] = {}
        for units in lists:
            self.users.setdefault(units.user, []).append(units)
            for index, element in enumerate(units.elements):
                self._index_of.update((unit, (units, index)) for unit in element)
        self._forwards: list[ListForward] = []
        self._backwards: list[ListBackward] = []

    def begin_forward(self, user: nn.Module) -> None:
        """Note that a forward of ``user`` begins."""
        self._forwards += [ListForward(units) for units in self.users[user]]

    def end_forward(self, user: nn.Module, *, raised: bool) -> list[ListForward]:
        """Gather what the forward of ``user`` has not called, and return what its backward must gather for others."""
        first = next((i for i, forward in enumerate(self._forwards) if forward.units.user is user), None)
        if first is None:
            return []
        ended = [forward for forward in self._forwards[first:] if forward.units.user is user]
        # Forwards inside this one that are still listed ended without their hooks.
        del self._forwards[first:]
        for forward in ended:
            if not raised and forward.units.is_called:
                self._gather_up_to(forward, len(forward.units.elements))
        return [forward for forward in ended if forward.skipped and forward.units.is_in_order]

    def forget_forwards(self) -> None:
        """Forget forwards whose end was not reported."""
        self._forwards.clear()

    def begin_backward(self, forward: ListForward) -> None:
        """Note that the backward of a forward that skipped elements begins."""
        if all(backward.units is not forward.units for backward in self._backwards):
            self._backwards.append(ListBackward(forward.units, sorted(forward.skipped)))

    def end_backwards(self) -> None:
        """Gather what is left for other ranks, at the end of a backward."""
        for backward in list(self._backwards):
            self._finish(backward)

    def forget_backwards(self) -> None:
        """Forget backwards that raised."""
        self._backwards.clear()

    def visit(self, unit: Unit, module: nn.Module | None, *, in_backward: bool) -> None:
        """Gather for other ranks what they gather before ``unit``. Call it before ``unit`` is gathered.

        Args:
            unit: The unit.
            module: The module that needs it; None: unknown.
            in_backward: Whether the backward of a module needs it, rather than a forward.
        """
        if not (self._forwards or self._backwards):
            return
        units, index = self._index_of.get(unit, (None, 0))
        if in_backward:
            for backward in list(self._backwards):
                if backward.units is units:
                    backward.is_begun = True
                    while backward.remaining and backward.remaining[-1] > index:
                        self._gather(backward.units, backward.remaining.pop(), in_backward=True)
                elif module is not None and (backward.is_begun or module not in backward.units.inside):
                    self._finish(backward)
            return
        for forward in self._forwards:
            if forward.units is units:
                self._visit_element(forward, index)
            elif module is not None and forward.next_index:
                self._gather_up_to(forward, len(forward.units.elements))

    def _visit_element(self, forward: ListForward, index: int) -> None:
        forward.units.is_called = True
        # The units of one element follow one another.
        if index == forward.next_index - 1:
            return
        # A loop over the whole list may start again.
        if index == 0 and forward.next_index == len(forward.units.elements):
            forward.next_index = 0
        if index < forward.next_index:
            forward.units.is_in_order = False
            return
        self._gather_up_to(forward, index)
        forward.next_index = index + 1

    def _gather_up_to(self, forward: ListForward, stop: int) -> None:
        if forward.units.is_in_order:
            for index in range(forward.next_index, stop):
                forward.skipped.append(index)
                self._gather(forward.units, index, in_backward=False)
            forward.next_index = max(forward.next_index, stop)

    def _finish(self, backward: ListBackward) -> None:
        self._backwards.remove(backward)
        while backward.remaining:
            self._gather(backward.units, backward.remaining.pop(), in_backward=True)

    def _gather(self, units: UnitList, index: int, *, in_backward: bool) -> None:
        for unit in units.elements[index]:
            self._gather_for_others(unit, in_backward)


def _find_lists(model: nn.Module, units_of: Mapping[nn.Module, list[Unit]]) -> list[UnitList]:
    modules = dict(model.named_modules())
    lists = []
    for name, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        elements = [
            [unit for unit in units_of.get(child, []) if unit.modules[0] is child and unit.is_releasable]
            for child in module.children()
        ]
        elements = [units for units in elements if units]
        user = module
        while name and isinstance(user, (nn.ModuleList, nn.ModuleDict)):
            name = name.rpartition(".")[0]
            user = modules[name]
        # One element has no order, and elements that occur twice have two places in it.
        if len(elements) > 1 and len(elements) == len({units[0] for units in elements}) and user is not module:
            lists.append(UnitList(user, elements, set(user.modules())))
    return lists
