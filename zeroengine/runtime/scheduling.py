"""Makes the schedule of a model's units."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.config import Config
from zeroengine.config.zero import ZeroOptimization
from zeroengine.partition.unit_lists import find_unit_lists
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.schedule.lists import ItemList
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import Ahead, UnitFacts
from zeroengine.schedule.schedule import Schedule


class ModuleNumbers:
    """The modules that need units or hold lists of units, and their numbers in the schedule.

    Args:
        model: The model.
        units: All units, by number.

    Attributes:
        number_of: By module: its number.
        units_of: By number: the units that the module's forward needs.
        lists: By number: the list of units that the module holds.
        lookups: The numbers of the modules that ``is_lookup`` names.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.number_of: dict[nn.Module, int] = {}
        self.units_of: list[list[int]] = []
        self.lists: dict[int, ItemList] = {}
        self.lookups: set[int] = set()
        for unit in units:
            for module in unit.modules:
                self.units_of[self._number(module)].append(unit.number)
                if is_lookup(module, unit.modules):
                    self.lookups.add(self._number(module))
        self._find_lists(model, units)

    def _number(self, module: nn.Module) -> int:
        if module not in self.number_of:
            self.number_of[module] = len(self.units_of)
            self.units_of.append([])
        return self.number_of[module]

    def _find_lists(self, model: nn.Module, units: Sequence[Unit]) -> None:
        units_of_root: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            if unit.root is not None:
                units_of_root.setdefault(unit.root, []).append(unit)
        for listed in find_unit_lists(model, units_of_root.keys()):
            items = [[unit.number for unit in units_of_root[root] if unit.is_releasable] for root in listed.items]
            if any(items):
                modules = set() if listed.is_inside_block else listed.followers()
                followers = {self._number(module) for module in modules}
                self.lists[self._number(listed.holder)] = ItemList(items, followers, listed.is_inside_block)


def is_lookup(module: nn.Module, modules_of_unit: Sequence[nn.Module]) -> bool:
    """Return whether ``module`` is an embedding that shares its unit with other modules.

    The backward of an embedding reads its indices, and no weights. So the unit can be released before it, as soon as no
    other module needs it.
    """
    # Subclasses may compute more.
    return type(module) is nn.Embedding and len(modules_of_unit) > 1


def prefetch_limits(zero: ZeroOptimization, *, overlaps: bool, reads_shards: bool) -> PrefetchLimits:
    """Return how far a configuration lets units be gathered ahead.

    Args:
        zero: The section of the configuration.
        overlaps: Whether collectives overlap the computation (``Transport.overlaps``).
        reads_shards: Whether shards are offloaded.
    """
    # A gather that does not overlap the computation gains nothing from an early start, and would hold memory for
    # longer. A read from the host's memory or a disk overlaps on every transport.
    prefetches = zero.overlap_comm and (overlaps or reads_shards)
    return PrefetchLimits(zero.prefetch_bucket_size if prefetches else 0, zero.max_live_parameters)


def make_schedule(
    units: Sequence[Unit],
    gradients: Iterable[UnitGradients],
    modules: ModuleNumbers,
    transport: Transport,
    config: Config,
) -> Schedule:
    """Return the schedule of units, whose numbers are their indices.

    Args:
        units: All units.
        gradients: The gradients of the trainable ones.
        modules: The modules that need them.
        transport: Moves bytes between the ranks.
        config: The resolved configuration.
    """
    zero = config.zero_optimization
    is_sharded = {unit_grads.unit: unit_grads.format.is_sharded for unit_grads in gradients}
    items = {unit for item_list in modules.lists.values() for unit in item_list.index_of}
    facts = [
        UnitFacts(
            unit.name,
            unit.numel,
            unit.is_releasable,
            unit.trainable,
            is_sharded.get(unit, False),
            unit.number in items,
            _ahead(unit, transport),
        )
        for unit in units
    ]
    reads_shards = any(unit.offloaded_shards is not None for unit in units)
    limits = prefetch_limits(zero, overlaps=transport.overlaps, reads_shards=reads_shards)
    return Schedule(
        facts,
        [len(unit.params) for unit in units],
        modules.units_of,
        modules.lists,
        limits,
        zero.reduce_bucket_size or 0,
        threading.get_ident(),
        modules.lookups,
    )


def _ahead(unit: Unit, transport: Transport) -> Ahead:
    shards = unit.offloaded_shards
    # A collective is started early only if it proceeds by itself.
    if transport.overlaps if shards is None else shards.can_gather_ahead:
        return Ahead.GATHER
    return Ahead.NOTHING if shards is None else Ahead.READ
