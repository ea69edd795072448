"""Bring the parts of matrices from all shards to the matrices' owners, and parts of the results back."""

from __future__ import annotations

import math
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
from zeroengine.partition.boxes import boxes_of_run
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.owners import ExchangedUnit, Matrix, Part, PlannedRound, plan_rounds
from zeroengine.partition.slices import slices_of_ranks
from zeroengine.utils.work import Completed, Work

# While one round is at its owners, the parts of the next one travel.
NUM_SLOTS = 2
# What names the memory of round trips: ``PlannedRound.among``, the slot, and the dtype of the values.
Memory = tuple[str, int, torch.dtype]
GroupOfParam = Mapping[torch.nn.Parameter, Mapping[str, Any]]


@dataclass(frozen=True)
class Round:
    """Matrices of consecutive units that are exchanged at a time.

    Attributes:
        shards: This rank's shards of the units.
        planned: The ranks that exchange, and what this rank sends and receives.
    """

    shards: Sequence[OptimizerShard]
    planned: PlannedRound

    @cached_property
    def of_slices(self) -> Round | None:
        """The round that follows within the model group; None: there is none."""
        return None if self.planned.of_slices is None else Round(self.shards, self.planned.of_slices)

    @cached_property
    def owned(self) -> list[tuple[Matrix, list[slice]]]:
        """The matrices whose parts arrive at this rank, with the places at which they arrive, in order."""
        # With hybrid degrees the shards are not in the order of the ranks, from which parts arrive.
        in_order = sorted(
            _places(self.planned.plan.received), key=lambda arrived: (arrived[0].number, arrived[0].offset)
        )
        by_matrix = groupby(in_order, lambda arrived: arrived[0].matrix)
        return [(matrix, [place for _, place in arrived]) for matrix, arrived in by_matrix]


class RoundTrip:
    """One round's way to the owners and back.

    Args:
        transport: Moves the parts.
        exchange_round: The round.
        of_slices: The way of what arrives, within the model group; None: it ends here.
        shard_values: Memory for the parts in this rank's shards. At degree 1 it is also that of the owner.
        owner_values: Memory for the parts that arrive.
    """

    def __init__(
        self,
        transport: Transport,
        exchange_round: Round,
        of_slices: RoundTrip | None,
        shard_values: torch.Tensor,
        owner_values: torch.Tensor | None = None,
    ) -> None:
        self.round, self._transport, self._of_slices = exchange_round, transport, of_slices
        self._plan = exchange_round.planned.plan
        self._shard_values = shard_values[: self._plan.num_sent]
        self._owner_values = self._shard_values if owner_values is None else owner_values[: self._plan.num_received]
        self._moves = owner_values is not None
        self._work: Work = Completed()

    def parts(self) -> Iterator[tuple[OptimizerShard, Part, torch.Tensor]]:
        """Yield this rank's parts of the round, each with its shard and its values."""
        shards = {shard.index: shard for shard in self.round.shards}
        for part, place in _places(self._plan.sent):
            yield shards[part.matrix.unit], part, self._shard_values[place]

    def send(self) -> None:
        """Begin to bring the values of ``parts`` to the owners."""
        self._move(self._owner_values, self._shard_values, self._plan.sizes)

    def matrices(self) -> dict[Matrix, torch.Tensor]:
        """Wait for the parts, and return the matrices that this rank updates, each with its values, 1-D."""
        self._work.wait_stream()
        values = self._owner_values
        values_of = {
            matrix: values[places[0]] if len(places) == 1 else torch.cat([values[place] for place in places])
            for matrix, places in self.round.owned
        }
        if self._of_slices is not None:
            for _, part, sent in self._of_slices.parts():
                sent.copy_(values_of.pop(part.matrix))
            self._of_slices.send()
            for matrix, parts in self._of_slices.matrices().items():
                values_of[matrix] = torch.empty_like(parts)
                for in_whole, in_part in places_in_slices(matrix, values_of[matrix], parts):
                    in_whole.copy_(in_part)
        return values_of

    def send_back(self, results: Mapping[Matrix, torch.Tensor]) -> None:
        """Begin to bring results to the shards, where they become the values of ``parts``.

        Args:
            results: For each matrix of ``matrices`` a tensor of as many elements.
        """
        if self._of_slices is not None:
            in_parts = {matrix: results[matrix].new_empty(matrix.numel) for matrix, _ in self._of_slices.round.owned}
            for matrix, parts in in_parts.items():
                for in_whole, in_part in places_in_slices(matrix, results[matrix].reshape(-1), parts):
                    in_part.copy_(in_whole)
            self._of_slices.send_back(in_parts)
            self._of_slices.wait()
            results = {**results, **{part.matrix: values for _, part, values in self._of_slices.parts()}}
        for matrix, places in self.round.owned:
            runs = results[matrix].reshape(-1).split([place.stop - place.start for place in places])
            for place, run in zip(places, runs, strict=True):
                self._owner_values[place].copy_(run)
        self._move(self._shard_values, self._owner_values, tuple(zip(*self._plan.sizes, strict=True)))

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
            label, ranks = f"the matrices of {names[0]} to {names[-1]}", self.round.planned.ranks
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
        self, index: int, rank: int, layout: FlatLayout, groups: GroupOfParam, *dtypes: torch.dtype
    ) -> ExchangedUnit:
        """Return what is exchanged of a unit.

        Args:
            index: The index of the unit.
            rank: This rank's number among those that the unit is partitioned over.
            layout: Its layout.
            groups: Its parameters, in order, each with its group.
            dtypes: Of its gradient and its master.
        """
        counts, slices = map(self.num_matrices, groups.values()), map(slices_of_ranks, groups)
        return ExchangedUnit(
            index, layout, list(counts), self.dtypes(next(iter(groups.values())), *dtypes), rank, list(slices)
        )

    def memory_sizes(self, rounds: Sequence[PlannedRound]) -> dict[Memory, list[int]]:
        """Return the elements of each memory, equal on all ranks that exchange, which rounds use in turn.

        That is memory for the parts in shards and, unless each rank owns all of its matrices, for those at owners.
        """
        sizes: dict[Memory, list[int]] = {}
        every = [*rounds, *(planned.of_slices for planned in rounds if planned.of_slices is not None)]
        for among, dtype in dict.fromkeys((planned.among, dtype) for planned in every for dtype in planned.dtypes):
            tables = [planned.plan.sizes for planned in every if planned.among == among and dtype in planned.dtypes]
            numels_at_owners = [
                sum(column) for table in tables if len(table) > 1 for column in zip(*table, strict=True)
            ]
            numels = [max(map(sum, chain(*tables))), *([max(numels_at_owners)] if numels_at_owners else [])]
            sizes |= {(among, slot, dtype): numels for slot in range(min(self.num_slots, len(rounds)))}
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
        self._memory: dict[Memory, list[torch.Tensor]] = {}
        # The last trip in each memory.
        self._trips: dict[Memory, RoundTrip] = {}
        self._transports = {} if parts.between is None else {"model": parts.between}
        shards, units = {shard.index: shard for shard in parts.shards}, []
        for index, shard in shards.items():
            unit, dtypes = shard.unit, (shard.gradient.dtype, shard.master.dtype)
            self._transports["experts" if unit.expert_ranks else "data"] = shard.unit_grads.transport
            groups = {param: parts.base_optimizer.param_groups[parts.group_of_param[param]] for param in unit.params}
            units.append(rule.exchanged(index, unit.rank, unit.layout, groups, *dtypes))
        rounds = plan_rounds(units, rule.cost)
        self.rounds = [Round([shards[i] for i in planned.units], planned) for planned in rounds]
        self._sizes = rule.memory_sizes(rounds)
        for key in self._sizes:
            if self._transports[key[0]].keeps_memory:
                self._take(key)
        self.kept_bytes = sum(tensor.nbytes for tensor in chain(*self._memory.values()))

    def begin(self, exchange_round: Round, dtype: torch.dtype, slot: int = 0) -> RoundTrip:
        """Return a round trip, in the memory of the last one of the same slot. All ranks call it.

        Args:
            exchange_round: The round.
            dtype: Of the values that travel.
            slot: Below the number of slots.
        """
        planned, of_slices = exchange_round.planned, exchange_round.of_slices
        key = planned.among, slot, dtype
        if (last := self._trips.get(key)) is not None:
            last.wait_for_readers()
        # A rank that owns all of its matrices needs no other memory for them.
        memory = self._take(key)[: len(planned.plan.sizes)]
        way_of_slices = None if of_slices is None else self.begin(of_slices, dtype, slot)
        self._trips[key] = RoundTrip(self._transports[planned.among], exchange_round, way_of_slices, *memory)
        return self._trips[key]

    def _take(self, key: Memory) -> list[torch.Tensor]:
        if key not in self._memory:
            among, _, dtype = key
            self._memory[key] = [self._transports[among].empty(numel, dtype) for numel in self._sizes[key]]
        return self._memory[key]

    def end(self) -> None:
        """Free the memory of round trips, where the transport can."""
        for key in [key for key in self._memory if not self._transports[key[0]].keeps_memory]:
            # If making a trip has failed, there is memory alone.
            if (trip := self._trips.pop(key, None)) is not None:
                trip.wait_for_readers()
            del self._memory[key]


def places_in_slices(
    matrix: Matrix, whole: torch.Tensor, parts: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the places of a matrix, each with the place of the same elements in its parts, of slice after slice.

    Args:
        matrix: The matrix.
        whole: Its values, 1-D.
        parts: The values of its parts, 1-D.
    """
    for part, (start, stop) in zip(matrix.slices, matrix.runs, strict=True):
        strides = [math.prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
        for local in boxes_of_run(part.local_shape, start, stop):
            values = parts[local.start - start :][: local.numel].view(local.sizes)
            for box, place in part.boxes(local):
                yield whole[box.start - matrix.param_offset :].as_strided(box.sizes, strides), values[place]
        parts = parts[stop - start :]


def _places(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    ends = accumulate(part.numel for part in parts)
    return ((part, slice(end - part.numel, end)) for part, end in zip(parts, ends, strict=True))
