"""Bring the parts of matrices from all shards to the matrices' owners, and parts of the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch

from zeroengine.comm.interfaces import Sizes, Transport
from zeroengine.comm.memory_reuse import REUSE_TIMEOUT_S
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.owners import ExchangePlan, Matrix, Part, assign_owners, matrices_of, rounds_of
from zeroengine.utils.work import Completed, Work

# While one round is at its owners, the parts of the next one travel.
NUM_SLOTS = 2


@dataclass(frozen=True)
class Round:
    """Matrices of consecutive units that are exchanged at a time.

    Attributes:
        shards: This rank's shards of the units.
        shard_of: The same, by the index of the unit.
        plan: What this rank sends and receives.
        ranks: The ranks that exchange; None: all.
        label: Names the exchange.
    """

    shards: Sequence[OptimizerShard]
    plan: ExchangePlan
    ranks: tuple[int, ...] | None
    label: str

    @cached_property
    def shard_of(self) -> dict[int, OptimizerShard]:
        """See above."""
        return {shard.index: shard for shard in self.shards}

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
        around: The round.
        in_shards: Memory for the parts in this rank's shards. At degree 1 it is also that of the owner.
        at_owner: Memory for the parts that arrive.
    """

    def __init__(
        self, transport: Transport, around: Round, in_shards: torch.Tensor, at_owner: torch.Tensor | None
    ) -> None:
        self.round, self._transport = around, transport
        self._in_shards = in_shards[: around.plan.num_sent]
        self._at_owner = self._in_shards if at_owner is None else at_owner[: around.plan.num_received]
        self._moves = at_owner is not None
        self._work: Work = Completed()

    def parts(self) -> Iterator[tuple[OptimizerShard, Part, torch.Tensor]]:
        """Yield this rank's parts of the round, each with its shard and its values."""
        for part, place in _places(self.round.plan.sent):
            yield self.round.shard_of[part.matrix.unit], part, self._in_shards[place]

    def send(self) -> None:
        """Begin to bring the values of ``parts`` to the owners."""
        self._move(self._at_owner, self._in_shards, self.round.plan.sizes)

    def matrices(self) -> list[tuple[Matrix, torch.Tensor]]:
        """Wait for the parts, and return the matrices that this rank owns, each with its values, 1-D."""
        self._work.wait_stream()
        values = self._at_owner
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
                self._at_owner[place].copy_(run)
        self._move(self._in_shards, self._at_owner, tuple(zip(*self.round.plan.sizes, strict=True)))

    def wait(self) -> None:
        """Wait for the results."""
        self._work.wait_stream()

    def is_read(self) -> bool:
        """Wait a while until all owners have their parts, and return whether they have."""
        return not self._moves or self._transport.gather.reusable(self._work, REUSE_TIMEOUT_S)

    def _move(self, received: torch.Tensor, sent: torch.Tensor, sizes: Sizes) -> None:
        if self._moves:
            channel, around = self._transport.gather, self.round
            self._work = channel.all_to_all(received, sent, around.label, around.ranks, sizes=sizes)


class OwnerExchange:
    """Exchanges the matrices of some units between shards and owners.

    Args:
        shards: The shards of the units, in the order of registration.
        num_matrices: For each shard, how many matrices each of its unit's parameters holds.
        cost: The cost of the update of a matrix, by its rows and columns, which owners are balanced by.
        transport: Moves the parts.

    Attributes:
        rounds: The rounds, in the order of the units.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        num_matrices: Sequence[Sequence[int]],
        cost: Callable[[int, int], int],
        transport: Transport,
    ) -> None:
        self._transport, self._memory = transport, dict[tuple[int, str, torch.dtype], torch.Tensor]()
        counts = dict(zip((shard.index for shard in shards), num_matrices, strict=True))
        self.rounds: list[Round] = []
        # Units of one number of shards are exchanged together. Nearly always that is one number.
        by_degree = sorted(shards, key=_degree)
        for degree, group in groupby(by_degree, _degree):
            of_unit = {shard.index: shard for shard in group}
            units = [matrices_of(shard.unit.layout, index, counts[index]) for index, shard in of_unit.items()]
            rounds = rounds_of(units, degree)
            owners = assign_owners([[cost(m.rows, m.columns) for m in matrices] for matrices in rounds], degree)
            self.rounds += [
                self._round(of_unit, matrices, of_matrix) for matrices, of_matrix in zip(rounds, owners, strict=True)
            ]

    def _round(self, shards: dict[int, OptimizerShard], matrices: Sequence[Matrix], owners: Sequence[int]) -> Round:
        inside = [shards[index] for index in dict.fromkeys(matrix.unit for matrix in matrices)]
        degrees, rank = inside[0].unit.degrees, inside[0].unit.rank
        ranks = tuple(sorted(degrees.owners(rank, degrees.optimizer)))
        numbers = [degrees.index(other, degrees.optimizer) for other in ranks]
        numels = [0] * (max(shards) + 1)
        for shard in inside:
            numels[shard.index] = shard.param.numel()
        plan = ExchangePlan.build(matrices, owners, numels, numbers, ranks.index(rank))
        label = f"the matrices of {inside[0].unit.name} to {inside[-1].unit.name}"
        return Round(inside, plan, ranks if len(ranks) < self._transport.world_size else None, label)

    def begin(self, around: Round, dtype: torch.dtype, slot: int = 0) -> RoundTrip:
        """Return a round trip, in memory that the last one of the same slot must no longer use.

        Args:
            around: The round.
            dtype: Of the values that travel.
            slot: Below ``NUM_SLOTS``.
        """
        in_shards = self._take(slot, "in shards", dtype, max(r.plan.num_sent for r in self.rounds))
        if len(around.plan.sizes) == 1:
            return RoundTrip(self._transport, around, in_shards, None)
        at_owner = self._take(slot, "at owner", dtype, max(r.plan.num_received for r in self.rounds))
        return RoundTrip(self._transport, around, in_shards, at_owner)

    def end_one_way(self, trip: RoundTrip) -> None:
        """Let the memory of a round trip serve again, although nothing comes back."""
        if not trip.is_read():
            # A peer that is far behind keeps what it still reads.
            self._memory.clear()

    def _take(self, slot: int, place: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        key = slot, place, dtype
        if key not in self._memory:
            self._memory[key] = self._transport.empty(max(numel, 1), dtype)
        return self._memory[key]

    def end(self) -> None:
        """Free the memory of round trips, where the transport can."""
        if not self._transport.keeps_memory:
            self._memory.clear()


def _degree(shard: OptimizerShard) -> int:
    return shard.unit.degrees.optimizer


def _places(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    ends = accumulate(part.numel for part in parts)
    return ((part, slice(end - part.numel, end)) for part, end in zip(parts, ends, strict=True))
