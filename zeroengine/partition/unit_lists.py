"""Lists of modules whose items are units, such as experts, of which a rank may call only some.

[Note: Lists of units]
A gather takes all ranks, so every rank gathers all items of a list, in the order of registration, whichever it
calls. Each rank must therefore know where the others gather items that it does not call itself. No forward is
watched to learn this. It follows from the model alone:

1. A module inside a repeated block that holds lists, such as a mixture of experts inside a layer, needs its *other*
   units as well, whether or not it calls them: those of modules inside of it that belong to no list.
2. These units stand before the items in the order of units, so they are reduced after them.
3. They stay gathered until the module's call is over, in forward and in backward.

So the only units that such a module gathers while it is called are items. Where a rank calls no further item,
the end of the call gathers the rest. A module that is inside no repeated block, such as the one that holds all layers
of the model, would keep the embedding and the head gathered for as long as the model runs. There the items come in
the order of registration: the rest is gathered before the first unit of a module that is registered after the list.

Several lists of one module are one list, in the order of registration. If a forward calls items in another order,
they are gathered as needed from then on, and all ranks must call the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class UnitList:
    """The items of all lists of one module.

    Attributes:
        holder: The module that holds them, directly or in a list of lists.
        items: Modules, each of which is the root of units.
        is_inside_block: Whether the holder is inside a repeated block.
    """

    holder: nn.Module
    items: tuple[nn.Module, ...]
    is_inside_block: bool

    def modules_of_items(self) -> set[nn.Module]:
        """Return the modules of the items."""
        return {module for item in self.items for module in item.modules()}

    def followers(self) -> set[nn.Module]:
        """Return the modules that the holder registers after the items."""
        places = {module: place for place, module in enumerate(self.holder.modules())}
        last = max(places[module] for module in self.modules_of_items())
        return {module for module, place in places.items() if place > last}

    def others(self) -> set[nn.Module]:
        """Return the modules whose units the holder needs besides the items. Empty outside of repeated blocks."""
        return set(self.holder.modules()) - self.modules_of_items() if self.is_inside_block else set()


def find_unit_lists(model: nn.Module, roots: Collection[nn.Module]) -> list[UnitList]:
    """Return the lists of units of ``model``, in the order of registration of the modules that hold them.

    Args:
        model: The model.
        roots: The modules that are units, or several units, without those of blocks inside of them.
    """
    lists: list[UnitList] = []
    for holder, is_inside_block in _holders(model, is_inside_block=False, visited=set()):
        children = [child for module in _lists_of(holder) for child in module.children() if child in roots]
        # One item has no order, and a module that occurs twice has two places.
        if len(children) > 1 and len(set(children)) == len(children):
            lists.append(UnitList(holder, tuple(children), is_inside_block))
    return lists


def _holders(module: nn.Module, *, is_inside_block: bool, visited: set[nn.Module]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that may hold lists, and whether each is inside a repeated block."""
    if module in visited:
        return
    visited.add(module)
    if not _is_list(module):
        yield module, is_inside_block
    children = list(module.children())
    repeats = len(children) > 1 and isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in children:
        yield from _holders(child, is_inside_block=is_inside_block or repeats, visited=visited)


def _lists_of(holder: nn.Module) -> Iterable[nn.Module]:
    """Yield the lists of modules that ``holder`` holds, directly or in a list of lists."""
    for child in holder.children():
        if _is_list(child):
            yield child
            yield from _lists_of(child)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
