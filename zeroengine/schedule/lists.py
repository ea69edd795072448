"""Lists of units, such as experts, of which a rank may call only some. See ``partition/unit_lists.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from zeroengine.schedule.visits import Visit


class ItemList:
    """A list of items with units of their own, and whether forwards call them in order.

    Args:
        units: The releasable units of each item.
        followers: Modules, by number, before whose units all items are gathered.
        is_inside_block: Whether the module that holds them needs its other units as well.

    Attributes:
        index_of: By unit: the index of its item.
        is_in_order: Whether no forward has called the items in another order.
    """

    def __init__(self, units: Sequence[Sequence[int]], followers: Set[int], is_inside_block: bool) -> None:
        self.units, self.followers, self.is_inside_block = units, followers, is_inside_block
        self.index_of = {unit: index for index, item in enumerate(units) for unit in item}
        self.is_in_order = True

    def __len__(self) -> int:
        return len(self.units)


class ListWalk:
    """The way of one forward through a list.

    Args:
        item_list: The list.
        has_grad: Whether the forward began with gradients enabled.
        node: The number of the first node of the forward.

    Attributes:
        last_node: The number of the last node of the latest item that was called, or of the first node of the
            forward. What is skipped next has its place there: a backward comes to it after everything else that the
            module has done since, as other ranks come to the item that they have called.
        next_index: The first item that is not gathered yet.
        skipped: The visits of items that this rank has not called.
        skipped_indices: The items that this rank has not called.
    """

    def __init__(self, item_list: ItemList, has_grad: bool, node: int) -> None:
        self.item_list, self.has_grad, self.last_node = item_list, has_grad, node
        self.next_index = 0
        self.skipped: list[Visit] = []
        self.skipped_indices: set[int] = set()

    def begin_call(self, index: int) -> bool:
        """Note that this rank calls an item. Return whether it is the first call of it after those before it."""
        # The units of one item follow one another.
        if not self.item_list.is_in_order or index == self.next_index - 1:
            return False
        # A loop that called every item may start again. After one that skipped some, this is another order.
        if index == 0 and self.next_index == len(self.item_list) and not self.skipped_indices:
            self.next_index = 0
        self.item_list.is_in_order = index >= self.next_index
        return self.item_list.is_in_order

    def skip(self, stop: int) -> Iterator[Sequence[int]]:
        """Yield the units of the items from the next one up to ``stop``, which this rank does not call here."""
        while self.item_list.is_in_order and self.next_index < stop:
            self.skipped_indices.add(self.next_index)
            self.next_index += 1
            yield self.item_list.units[self.next_index - 1]
