"""Lists of modules whose elements are units, the modules that hold them, and one time through a list.

``unit_lists.py`` says what they are for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from zeroengine.runtime.forward_graphs import ForwardGraph, ForwardGraphs
from zeroengine.runtime.unit import Unit

# Forwards of a module after which a list that it has not called is taken for one that it never calls.
NUM_FORWARDS = 10


@dataclass(eq=False)
class UnitList:
    """A list of modules whose elements are units."""

    elements: list[list[Unit]]  # the units of each element
    element_of: dict[nn.Module, int]  # by module inside the list: the index of its element
    is_in_order: bool = True  # no forward has called the elements in another order
    # Passes whose backward may run, or is running. The graphs own them.
    passes: weakref.WeakSet[ListPass] = field(default_factory=weakref.WeakSet)


class ListUser:
    """A module that holds a list, directly or in a list of lists, and what its forwards have shown.

    Args:
        module: The module.
        unit_list: The list.
        number: The place among all users, which is the same on every rank.

    Attributes:
        is_called: Whether some rank called an element while the ranks agreed on where the list is called.
        is_settled: Whether they need not agree any more: an element has been called, or ``NUM_FORWARDS`` have ended.
        modules_before: Modules outside of the list that have been called before elements.
        modules_after: Likewise after elements.
    """

    def __init__(self, module: nn.Module, unit_list: UnitList, number: int) -> None:
        self.module, self.unit_list, self.number = module, unit_list, number
        self.is_called = self.is_settled = False
        self._num_forwards = 0
        self.modules_before: set[nn.Module] = set()
        self.modules_after: set[nn.Module] = set()
        places = {inner: place for place, inner in enumerate(module.modules())}
        last_place = max(places[element] for element in unit_list.element_of)
        self._registered_after = {inner for inner, place in places.items() if place > last_place}

    def end_forward(self) -> bool:
        """Note that a forward of the module has ended. Return whether the list is now taken for one never called."""
        self._num_forwards += 1
        was_settled = self.is_settled
        self.is_settled = was_settled or self._num_forwards == NUM_FORWARDS
        return self.is_settled and not was_settled

    def is_followed_by(self, module: nn.Module) -> bool:
        """Return whether forwards call ``module``, which is outside of the list, after the elements only.

        Where no forward has shown it, the order of registration decides, which all ranks know.
        """
        if not self.is_called or not (module in self.modules_before or module in self.modules_after):
            return self.is_settled and module in self._registered_after
        return module not in self.modules_before

    def contains(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the one that holds the list, or inside an element."""
        return module is self.module or module in self.unit_list.element_of


class ListPass:
    """One time that a forward goes through a list, and the backward of that part.

    Graphs own passes and may outlive the engine, so a pass refers weakly to the list. The forward of the whole model
    owns them as well, so a pass refers weakly to it.

    Attributes:
        number: The place among all passes, in the order in which their forwards end.
        next_index: The first element that is not gathered yet in forward.
        skipped: The elements that this rank did not call, ascending.
        is_recomputed: Whether an activation checkpoint ran the forward again, inside a backward.
        has_run: Whether a backward of the pass has ended.
        is_missed: Whether a backward through a later pass has ended that did not contain this one.
        remaining: In backward: the skipped elements that are not gathered yet, ascending. None: it has not begun.
        lowest_index: In backward: the lowest called element that it has come to, or None.
        depth: In backward: the number of nested backwards that it is in.
    """

    def __init__(self, user: ListUser, model_forward: ForwardGraph) -> None:
        self._user = weakref.ref(user)
        self.number = 0
        self._model_forward = weakref.ref(model_forward)
        self.next_index = 0
        self.skipped: list[int] = []
        self.is_recomputed = self.has_run = self.is_missed = False
        self.remaining: list[int] | None = None
        self.lowest_index: int | None = None
        self.depth = 0

    @property
    def user(self) -> ListUser:
        """The list and the module that holds it."""
        user = self._user()
        assert user is not None
        return user

    @property
    def unit_list(self) -> UnitList:
        """The list."""
        return self.user.unit_list

    def awaits(self, index: int, forwards: ForwardGraphs, last_number: int) -> bool:
        """Return whether a backward is to gather a skipped element for other ranks.

        Args:
            index: The element.
            forwards: The forwards of the whole model.
            last_number: Autograd has passed all later passes.
        """
        if self.remaining is not None:
            return index in self.remaining
        if index not in self.skipped or self.number > last_number:
            return False
        model_forward = self._model_forward()
        if model_forward is None or (forwards.contains(model_forward) is None and self.is_missed):
            return False
        return forwards.may_run(model_forward, has_begun=False, has_run=self.has_run)


def find_users(model: nn.Module, units_of: Mapping[nn.Module, list[Unit]]) -> dict[nn.Module, list[ListUser]]:
    """Return the lists that each module holds. Lists of the same modules count as one."""
    list_of: dict[tuple[nn.Module, ...], UnitList] = {}
    listed: set[Unit] = set()
    users: dict[nn.Module, list[ListUser]] = {}
    for holder, module in _holders_and_lists(model):
        key = tuple(child for child in module._modules.values() if child is not None and _own_units(child, units_of))
        if key not in list_of:
            elements = [_own_units(child, units_of) for child in key]
            # One element has no order, and a module that occurs twice has two places.
            if len(key) < 2 or len(set(key)) < len(key):
                continue
            if any(unit in listed for element in elements for unit in element):
                continue
            listed.update(unit for element in elements for unit in element)
            inside = {module: index for index, child in enumerate(key) for module in child.modules()}
            list_of[key] = UnitList(elements, inside)
        of_holder = users.setdefault(holder, [])
        if all(user.unit_list is not list_of[key] for user in of_holder):
            of_holder.append(ListUser(holder, list_of[key], number=sum(map(len, users.values()))))
    return users


def _own_units(module: nn.Module, units_of: Mapping[nn.Module, list[Unit]]) -> list[Unit]:
    return [unit for unit in units_of.get(module, []) if unit.modules[0] is module and unit.is_releasable]


def _holders_and_lists(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each list of modules with each module that holds it, directly or in a list of lists."""
    for holder in model.modules():
        if _is_list(holder):
            continue
        lists = [child for child in holder.children() if _is_list(child)]
        while lists:
            module = lists.pop(0)
            yield holder, module
            lists += [child for child in module.children() if _is_list(child)]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
