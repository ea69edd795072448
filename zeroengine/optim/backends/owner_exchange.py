"""Bring the parts of matrices from all shards to the matrices' owners, and parts of the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any

import torch

from zeroengine.comm.buffer_pool import REUSE_TIMEOUT_S
from zeroengine.comm.interfaces import Slices, Transport
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.owners import ExchangedUnit, ExchangePlan, Matrix, Part, PlannedRound, plan_rounds
from zeroengine.utils.work import Completed, Work

# While one round is at its owners, the parts of the next one travel.
NUM_SLOTS = 2


@dataclass(frozen=True)
class Round:
    """Matrices of consecutive units that are exchanged at a time.

    Attributes:
        shards: This rank's shards of the units.
        plan: What this rank sends and receives.
        ranks: The ranks that exchange.
    """

    shards: Sequence[OptimizerShard]
    plan: ExchangePlan
    ranks: tuple[int, ...]

    @cached_property
    def owned(self) -> list[tuple[Matrix, list[slice]]]:
        """The matrices that this rank owns, with the places at which their parts arrive, in order."""
        # With hybrid degrees the shards are not in the order of the ranks, from which parts arrive.
        in_order = sorted(_places(self.plan.received), key=lambda arrived: (arrived[0].number, arrived[0].offset))
        by_matrix = groupby(in_order, lambda arrived: arrived[0].matrix)
        return [(matrix, [place for _, place in arrived]) for matrix, arrived in by_matrix]


class RoundTrip:
    """One round's way to the owners and back.

    Args:
        transport: Moves the parts.
        exchange_round: The round.
        shard_values: Memory for the parts in this rank's shards. At degree 1 it is also that of the owner.
        owner_values: Memory for the parts that arrive.
    """

    def __init__(
        self,
        transport: Transport,
        exchange_round: Round,
        shard_values: torch.Tensor,
        owner_values: torch.Tensor | None = None,
    ) -> None:
        self.round, self._transport = exchange_round, transport
        self._shard_values = shard_values[: exchange_round.plan.num_sent]
        self._owner_values = (
            self._shard_values if owner_values is None else owner_values[: exchange_round.plan.num_received]
        )
        self._moves = owner_values is not None
        self._work: Work = Completed()

    def parts(self) -> Iterator[tuple[OptimizerShard, Part, torch.Tensor]]:
        """Yield this rank's parts of the round, each with its shard and its values."""
        shards = {shard.index: shard for shard in self.round.shards}
        for part, place in _places(self.round.plan.sent):
            yield shards[part.matrix.unit], part, self._shard_values[place]

    def send(self) -> None:
        """Begin to bring the values of ``parts`` to the owners."""
        self._move(self._owner_values, self._shard_values, self.round.plan.sizes)

    def matrices(self) -> list[tuple[Matrix, torch.Tensor]]:
        """Wait for the parts, and return the matrices that this rank owns, each with its values, 1-D."""
        self._work.wait_stream()
        values = self._owner_values
        return [
            (matrix, values[places[0]] if len(places) == 1 else torch.cat([values[place] for place in places]))
            for matrix, places in self.round.owned
        ]

    def send_back(self, results: Sequence[torch.Tensor]) -> None:
        """Begin to bring results to the shards, where they become the values of ``parts``.

        Args:
            results: For each matrix of ``matrices`` a tensor of as many elements.
        """
        for (_, places), result in zip(self.round.owned, results, strict=True):
            for place, run in zip(places, result.reshape(-1).split([p.stop - p.start for p in places]), strict=True):
                self._owner_values[place].copy_(run)
        self._move(self._shard_values, self._owner_values, tuple(zip(*self.round.plan.sizes, strict=True)))

    def wait(self) -> None:
        """Wait for the results."""
        self._work.wait_stream()

    def wait_for_readers(self) -> None:
        """Return when all ranks have read what the last way sends, so that the memory may be written or freed."""
        is_under_way = not isinstance(self._work, Completed)
        if is_under_way and not self._transport.gather.reusable(self._work, REUSE_TIMEOUT_S):
            # A rank that stalls is an error of this call.
            self._transport.fence()

    def _move(self, received: torch.Tensor, sent: torch.Tensor, sizes: tuple[tuple[int, ...], ...]) -> None:
        if self._moves:
            names = [shard.unit.name for shard in self.round.shards]
            label, ranks = f"the matrices of {names[0]} to {names[-1]}", self.round.ranks
            among = ranks if len(ranks) < self._transport.world_size else None
            self._work = self._transport.gather.all_to_all(received, sent, label, Slices(among, sizes=sizes))


@dataclass(frozen=True)
class ExchangeRule:
    """What a rule of updates exchanges.

    Attributes:
        cost: The cost of the update of a matrix, by its rows and columns, which owners are balanced by.
        num_matrices: Returns how many matrices a parameter of a group of the optimizer holds.
        dtypes: Returns what values travel in: by a group, and the dtypes of a unit's gradient and master.
        num_slots: The rounds that are under way at a time.
    """

    cost: Callable[[int, int], int]
    num_matrices: Callable[[Mapping[str, Any]], int]
    dtypes: Callable[[Mapping[str, Any], torch.dtype, torch.dtype], tuple[torch.dtype, ...]]
    num_slots: int

    def exchanged(
        self, index: int, layout: FlatLayout, groups: Sequence[Mapping[str, Any]], *dtypes: torch.dtype
    ) -> ExchangedUnit:
        """Return what is exchanged of a unit.

        Args:
            index: The index of the unit.
            layout: Its layout.
            groups: The group of each of its parameters.
            dtypes: Of its gradient and its master.
        """
        counts = [self.num_matrices(group) for group in groups]
        return ExchangedUnit(index, layout, counts, self.dtypes(groups[0], *dtypes))

    def memory_sizes(self, rounds: Sequence[PlannedRound]) -> dict[tuple[int, torch.dtype], list[int]]:
        """Return the elements of the memory of each slot and dtype, equal on all ranks, which rounds use in turn.

        That is memory for the parts in shards and, unless each rank owns all of its matrices, for those at owners.
        """
        sizes: dict[tuple[int, torch.dtype], list[int]] = {}
        for dtype in dict.fromkeys(chain(*(planned.dtypes for planned in rounds))):
            tables = [planned.plan.sizes for planned in rounds if dtype in planned.dtypes]
            numels_at_owners = [
                sum(column) for table in tables if len(table) > 1 for column in zip(*table, strict=True)
            ]
            numels = [max(map(sum, chain(*tables))), *([max(numels_at_owners)] if numels_at_owners else [])]
            sizes |= {(slot, dtype): numels for slot in range(min(self.num_slots, len(rounds)))}
        return sizes


class OwnerExchange:
    """Exchanges the matrices of some units between shards and owners.

    Where the transport keeps memory, that of round trips exists from the start, so that too little of it fails in
    ``initialize``. Elsewhere it exists during a step.

    Args:
        parts: The parts of the rule of updates.
        rule: What it exchanges.

    Attributes:
        rounds: The rounds.
        kept_bytes: The bytes of the memory that exists between steps.
    """

    def __init__(self, parts: BackendParts, rule: ExchangeRule) -> None:
        self._transport, self._memory = parts.transport, dict[tuple[int, torch.dtype], list[torch.Tensor]]()
        # The last trip of each slot and dtype.
        self._trips: dict[tuple[int, torch.dtype], RoundTrip] = {}
        shards, units = {shard.index: shard for shard in parts.shards}, []
        for index, shard in shards.items():
            groups = [parts.base_optimizer.param_groups[parts.group_of_param[param]] for param in shard.unit.params]
            units.append(rule.exchanged(index, shard.unit.layout, groups, shard.gradient.dtype, shard.master.dtype))
        rounds = plan_rounds(units, rule.cost, parts.shards[0].unit.rank) if units else []
        self.rounds = [Round([shards[i] for i in planned.units], planned.plan, planned.ranks) for planned in rounds]
        self._sizes = rule.memory_sizes(rounds)
        for key in self._sizes if self._transport.keeps_memory else ():
            self._take(*key)
        self.kept_bytes = sum(tensor.nbytes for tensor in chain(*self._memory.values()))

    def begin(self, exchange_round: Round, dtype: torch.dtype, slot: int = 0) -> RoundTrip:
        """Return a round trip, in the memory of the last one of the same slot. All ranks call it.

        Args:
            exchange_round: The round.
            dtype: Of the values that travel.
            slot: Below the number of slots.
        """
        if (last := self._trips.get((slot, dtype))) is not None:
            last.wait_for_readers()
        # A rank that owns all of its matrices needs no other memory for them.
        memory = self._take(slot, dtype)[: len(exchange_round.plan.sizes)]
        self._trips[slot, dtype] = RoundTrip(self._transport, exchange_round, *memory)
        return self._trips[slot, dtype]

    def _take(self, slot: int, dtype: torch.dtype) -> list[torch.Tensor]:
        key = slot, dtype
        if key not in self._memory:
            self._memory[key] = [self._transport.empty(numel, dtype) for numel in self._sizes[key]]
        return self._memory[key]

    def end(self) -> None:
        """Free the memory of round trips, where the transport can."""
        if not self._transport.keeps_memory:
            for trip in self._trips.values():
                trip.wait_for_readers()
            self._trips.clear()
            self._memory.clear()


def _places(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    ends = accumulate(part.numel for part in parts)
    return ((part, slice(end - part.numel, end)) for part, end in zip(parts, ends, strict=True))
