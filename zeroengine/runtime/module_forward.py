"""A forward in progress of a module, and where it is in a list of units, if it goes through one.

See "Lists of units" in ``partition/unit_lists.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from zeroengine.partition.unit_lists import find_unit_lists
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.visit_log import Visit, VisitLog
from zeroengine.utils.torch_internals import next_node_number

log = logging.getLogger("zeroengine")


@dataclass(eq=False)
class ItemUnits:
    """The units of the items of a list, and whether forwards call them in order.

    Attributes:
        units: The releasable units of each item.
        index_of: By unit: the index of its item.
        followers: Modules before whose units all items are gathered.
        is_inside_block: Whether the module that holds them needs its other units as well.
        is_in_order: Whether no forward has called the items in another order.
    """

    units: list[list[Unit]]
    index_of: dict[Unit, int]
    followers: set[nn.Module]
    is_inside_block: bool
    is_in_order: bool = True

    def __len__(self) -> int:
        return len(self.units)


def find_lists(model: nn.Module, units: Iterable[Unit]) -> dict[nn.Module, ItemUnits]:
    """Return the lists of releasable units, by the module that holds them."""
    units_of_root: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        if unit.root is not None:
            units_of_root.setdefault(unit.root, []).append(unit)
    lists: dict[nn.Module, ItemUnits] = {}
    for unit_list in find_unit_lists(model, units_of_root.keys()):
        items = [[unit for unit in units_of_root[root] if unit.is_releasable] for root in unit_list.items]
        index_of = {unit: index for index, item in enumerate(items) for unit in item}
        followers = set() if unit_list.is_inside_block else unit_list.followers()
        if index_of:
            lists[unit_list.holder] = ItemUnits(items, index_of, followers, unit_list.is_inside_block)
    return lists


@dataclass(eq=False)
class ListWalk:
    """The way of one forward through a list.

    Attributes:
        item_units: The units of the list.
        has_grad: Whether the forward began with gradients enabled.
        last_node: The number of the last node of the latest item that was called, or of the first node of the
            forward. What is skipped next has its place there: a backward comes to it after everything else that the
            module has done since, as other ranks come to the item that they have called.
        next_index: The first item that is not gathered yet.
        skipped: The visits of items that this rank has not called.
    """

    item_units: ItemUnits
    has_grad: bool
    last_node: int = field(default_factory=next_node_number)
    next_index: int = 0
    skipped: list[Visit] = field(default_factory=list)
    _skipped_indices: set[int] = field(default_factory=set)

    def begin_call(self, index: int) -> bool:
        """Note that this rank calls an item. Return whether it is the first call of it after those before it."""
        # The units of one item follow one another.
        if not self.item_units.is_in_order or index == self.next_index - 1:
            return False
        # A loop that called every item may start again. After one that skipped some, this is another order.
        if index == 0 and self.next_index == len(self.item_units) and not self._skipped_indices:
            self.next_index = 0
        self.item_units.is_in_order = index >= self.next_index
        if not self.item_units.is_in_order:
            log.info(
                "a forward calls the modules of a list in another order than they are registered in, from unit %s on: "
                "each rank gathers what it calls from now on, so all ranks must call the same ones",
                self.item_units.units[index][0].name,
            )
        return self.item_units.is_in_order

    def skip(self, stop: int) -> Iterator[list[Unit]]:
        """Yield the units of the items from the next one up to ``stop``, which this rank does not call here."""
        while self.item_units.is_in_order and self.next_index < stop:
            self._skipped_indices.add(self.next_index)
            self.next_index += 1
            yield self.item_units.units[self.next_index - 1]

    @property
    def called_nothing_trainable(self) -> bool:
        """Whether the list has trainable items, and this rank has called none of these."""
        trainable = {
            index for index, units in enumerate(self.item_units.units) if any(unit.gets_gradients for unit in units)
        }
        return bool(trainable) and trainable <= self._skipped_indices


class ModuleForward(NamedTuple):
    """A forward in progress of a module that needs units or holds lists of units.

    Attributes:
        module: The module.
        visit: Its units, which stay gathered until the forward ends, and where it began.
        is_tracked: Whether a backward may follow.
        walk: Where it is in its list, if it holds one.
        log: What the visit is added to.
    """

    module: nn.Module
    visit: Visit
    is_tracked: bool
    walk: ListWalk | None
    log: VisitLog
