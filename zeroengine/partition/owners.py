"""Which rank updates which matrix, for optimizers whose rule needs matrices whole. Integers only.

Shards stay as they are, contiguous and equal, so that gathers, reduces, norms and checkpoints know nothing of matrices.
For the update each matrix has an *owner*, one of the ranks that together hold the optimizer's shards once. The parts of
a matrix go from the shards to its owner, and the parts of the result go back (``ExchangePlan``). This is a unit of
matrices a, b and c on two ranks:

    shard of rank 0    a a a a b b        rank 0 owns a and c    rank 0 sends 2 elements (of b) to rank 1
    shard of rank 1    b b c c c c        rank 1 owns b          rank 1 sends 4 elements (c) to rank 0

[Note: Matrices in slices]
Where parameters are split over the ranks of a model group (``partition/slices.py``), this is done for each slice, and
brings the part of a matrix in the slice to one rank. The ranks of a model group have the same place in their data
groups, and the owners of a matrix one place in all of them, so that the parts of it are then within one model group.
There they go to one of its ranks, which updates the matrix. A matrix that one slice has whole stays in its data group:
a head, or an expert. All ranks know the slices of the others, and decide alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.slices import Slice

# A round of exchanges has at least so many matrices for each owner, so that owners have equal work in each round, and
# so many elements, so that messages are long.
MATRICES_PER_ROUND = 4
NUMEL_PER_ROUND = 1 << 22


@dataclass(frozen=True)
class Matrix:
    """A matrix that its owner updates: a parameter, or one of equal blocks of its rows.

    Attributes:
        unit: The index of its unit.
        param_index: The index of the parameter in the unit's layout.
        param_offset: The first element within the flattened whole parameter.
        start: The first element that this rank's slice has of it, within the unit's flat buffer.
        rows: Its rows.
        columns: Its columns.
        slices: What the ranks that hold the parameter together have of it. One: it is not split.
        place: Which of them this rank has.
    """

    unit: int
    param_index: int
    param_offset: int
    start: int
    rows: int
    columns: int
    slices: tuple[Slice, ...] = field(repr=False, compare=False)
    place: int = 0

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.rows * self.columns

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The elements [start, stop) of each flattened slice that are of the matrix."""
        ends = self.param_offset, self.param_offset + self.numel
        return [(part.numel_before(ends[0]), part.numel_before(ends[1])) for part in self.slices]

    @property
    def holders(self) -> list[int]:
        """The slices that have it whole. None: it is cut."""
        return [place for place, (start, stop) in enumerate(self.runs) if stop - start == self.numel]


def matrix_shape(shape: Sequence[int], num_matrices: int = 1) -> tuple[int, int]:
    """Return the rows and columns of each matrix in a parameter.

    One matrix has the first dimension as rows, and all others as columns, as a convolution's kernel. Several are equal
    blocks of rows of the last dimension: the matrices of a fused projection, heads, or stacked experts.

    Args:
        shape: Of the parameter.
        num_matrices: How many matrices it holds. Divides the rows.
    """
    columns = math.prod(shape[1:]) if num_matrices == 1 else shape[-1]
    rows = math.prod(shape) // columns if columns else 0
    assert rows % num_matrices == 0, f"{num_matrices} matrices in a parameter of shape {tuple(shape)}"
    return rows // num_matrices, columns


def matrices_of(
    layout: FlatLayout,
    unit: int,
    num_matrices: Sequence[int],
    slices: Sequence[tuple[tuple[Slice, ...], int]] = (),
) -> list[Matrix]:
    """Return the matrices of a unit, in the order of its flat buffer. Parameters without elements have none.

    Those of split parameters are all matrices of the whole parameters, also those that this rank's slice lacks.

    Args:
        layout: The flat layout of the unit.
        unit: The index of the unit.
        num_matrices: For each parameter of the layout, how many matrices it holds.
        slices: For each parameter, see ``slices_of_ranks``. Empty: none is split.

    Raises:
        ZeroEngineError: Experts are split within a matrix.
    """
    matrices = []
    for index, (slot, count) in enumerate(zip(layout.slots, num_matrices, strict=True)):
        parts, place = slices[index] if slices else ((Slice(slot.shape, slot.shape),), 0)
        if numel := math.prod(parts[0].shape):
            rows, columns = matrix_shape(parts[0].shape, count)
            for offset in range(0, numel, rows * columns):
                start = slot.offset + parts[place].numel_before(offset)
                matrices.append(Matrix(unit, index, offset, start, rows, columns, parts, place))
                if parts[0].expert_ranks and not matrices[-1].holders:
                    raise ZeroEngineError(
                        f"parameter {slot.name} of shape {parts[0].shape} has experts that are split over ranks, and "
                        f"its matrices, {count} to Muon, would be cut: let each expert be one or more, by num_matrices "
                        'of Muon or "matrices" in optimizer.params'
                    )
    return matrices


def rounds_of(units: Sequence[Sequence[Matrix]], degree: int) -> list[list[Matrix]]:
    """Divide the matrices of consecutive units into rounds, in which all owners of a group have work.

    Args:
        units: The matrices of each unit.
        degree: The number of ranks that hold the units' shards once.
    """
    rounds: list[list[Matrix]] = [[]]
    for matrices in units:
        current = rounds[-1]
        numel = sum(matrix.numel for matrix in current)
        if len(current) >= MATRICES_PER_ROUND * degree and numel >= NUMEL_PER_ROUND * degree:
            rounds.append(current := [])
        current.extend(matrices)
    return [current for current in rounds if current]


def assign_owners(
    rounds: Sequence[Sequence[int]], degree: int, holders: Sequence[Sequence[Sequence[int]]] = (), num_slices: int = 1
) -> list[list[int]]:
    """Return the number of the owner of each matrix, such that all owners have about equal costs.

    The costliest matrix of a round goes first, each to the owner with the least cost so far (Graham, 1969: "longest
    processing time first"). So the costliest owner is above the mean by less than one matrix.

    Args:
        rounds: For each round, the cost of each of its matrices.
        degree: The number of owners. They are numbered as shards are.
        holders: The slices that have each matrix whole, of whose owners it gets one; none: it gets any. Empty: so do
            all matrices.
        num_slices: The number of slices, each with ``degree`` owners. Those of the next slice have the next numbers.
    """
    loads = [[(0, place * degree + owner) for owner in range(degree)] for place in range(num_slices)]
    owners = []
    for number, costs in enumerate(rounds):
        owner_of = [0] * len(costs)
        # Equal costs go in the order of the matrices, so that all ranks decide alike.
        for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
            places = (holders[number][index] if holders else ()) or range(num_slices)
            of_slice = min((loads[place] for place in places), key=lambda heap: heap[0])
            load, owner_of[index] = of_slice[0]
            heapq.heapreplace(of_slice, (load + costs[index], owner_of[index]))
        owners.append(owner_of)
    return owners


class Part(NamedTuple):
    """The part of a matrix that lies in one shard, or in one slice.

    Attributes:
        number: The matrix's number in its round.
        matrix: The matrix.
        offset: The first element within what this rank's slice has of the matrix; 0 for the part of a slice.
        shard_offset: The first element within the shard, or within the flattened slice.
        numel: The number of elements.
    """

    number: int
    matrix: Matrix
    offset: int
    shard_offset: int
    numel: int

    @property
    def shard_slice(self) -> slice:
        """The part as a slice of the shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank sends to owners in one round, and what it receives as an owner, each in order.

    Attributes:
        sizes: ``sizes[i][j]`` elements go from the i-th to the j-th of the ranks that exchange, on all of them.
        sent: The parts in this rank's shards, in the order in which they are sent.
        received: The parts of the matrices that this rank owns, in the order in which they arrive.
    """

    sizes: tuple[tuple[int, ...], ...]
    sent: tuple[Part, ...]
    received: tuple[Part, ...]

    @classmethod
    def build(
        cls,
        matrices: Sequence[Matrix],
        owners: Sequence[int],
        shard_numels: Mapping[int, int],
        numbers: Sequence[int],
        rank_index: int,
    ) -> ExchangePlan:
        """Return the plan of one rank.

        Args:
            matrices: The matrices of the round.
            owners: The number of each matrix's owner.
            shard_numels: For each unit, by its index, the elements of a shard.
            numbers: For each rank that exchanges, in order, the number of its shards.
            rank_index: The index of this rank among them.
        """
        place = {number: index for index, number in enumerate(numbers)}
        ways = []
        for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            size, (first, last) = shard_numels[matrix.unit], matrix.runs[matrix.place]
            end = matrix.start + last - first
            for shard in range(matrix.start // size, -(-end // size) if first < last else 0):
                low, high = max(matrix.start, shard * size), min(end, (shard + 1) * size)
                part = Part(index, matrix, low - matrix.start, low - shard * size, high - low)
                ways.append((place[shard], place[owner], part))
        return cls.of_ways(ways, len(numbers), rank_index)

    @classmethod
    def of_ways(cls, ways: Sequence[tuple[int, int, Part]], size: int, rank_index: int) -> ExchangePlan:
        """Return the plan of one of ``size`` ranks, by the indices of the ranks that each part goes from and to."""
        sizes = [[0] * size for _ in range(size)]
        # By the rank at the other end, because messages lie one after another.
        sent: list[list[Part]] = [[] for _ in range(size)]
        received: list[list[Part]] = [[] for _ in range(size)]
        for source, target, part in ways:
            sizes[source][target] += part.numel
            if source == rank_index:
                sent[target].append(part)
            if target == rank_index:
                received[source].append(part)
        return cls(tuple(map(tuple, sizes)), tuple(chain(*sent)), tuple(chain(*received)))

    @property
    def num_sent(self) -> int:
        """The elements of all parts that are sent."""
        return sum(part.numel for part in self.sent)

    @property
    def num_received(self) -> int:
        """The elements of all parts that are received."""
        return sum(part.numel for part in self.received)


class ExchangedUnit(NamedTuple):
    """A unit whose matrices go to owners.

    Attributes:
        unit: The index of the unit, as in ``Matrix``.
        layout: Its flat layout.
        num_matrices: For each parameter of the layout, how many matrices it holds.
        dtypes: The dtypes that its values travel in.
        rank: This rank's number among those that the unit is partitioned over.
        slices: For each parameter, see ``slices_of_ranks``.
    """

    unit: int
    layout: FlatLayout
    num_matrices: Sequence[int]
    dtypes: tuple[Any, ...]
    rank: int
    slices: Sequence[tuple[tuple[Slice, ...], int]]


class PlannedRound(NamedTuple):
    """What one rank does in one round.

    Attributes:
        units: The indices of the units of the round, in order.
        ranks: The ranks that exchange, ascending.
        dtypes: The dtypes that values travel in.
        plan: What the rank sends and receives.
        among: Which ranks exchange: those that share the states of experts ("experts"), or of what is no expert
            ("data"), or those that hold a model together ("model").
        of_slices: What the rank then exchanges within its model group; None: it has all matrices whole.
    """

    units: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[Any, ...]
    plan: ExchangePlan
    among: str
    of_slices: PlannedRound | None = None


def plan_rounds(units: Sequence[ExchangedUnit], cost: Callable[[int, int], int]) -> list[PlannedRound]:
    """Return what one rank does in each of the rounds in which the matrices of all units go to owners.

    Args:
        units: The units, in the order of registration.
        cost: The cost of the update of a matrix, by its rows and columns, which owners are balanced by.
    """
    # Units of one number of shards and of equal dtypes are exchanged together. Nearly always those are all.
    groups: dict[Any, list[ExchangedUnit]] = {}
    for unit in units:
        # All parameters of a unit are split over the same ranks, or none is.
        parts, _ = unit.slices[0]
        key = unit.layout.degrees.optimizer, unit.dtypes, len(parts), "experts" if parts[0].expert_ranks else "data"
        groups.setdefault(key, []).append(unit)
    planned = []
    for (degree, dtypes, num_slices, among), group in groups.items():
        degrees, rank, (_, place) = group[0].layout.degrees, group[0].rank, group[0].slices[0]
        ranks, own = tuple(sorted(degrees.owners(rank, degree))), degrees.index(rank, degree)
        numels = {unit.unit: unit.layout.shard_numel(degree) for unit in group}
        shards = numels, [degrees.index(other, degree) for other in ranks], ranks.index(rank)
        of_units = [matrices_of(unit.layout, unit.unit, unit.num_matrices, unit.slices) for unit in group]
        rounds = rounds_of(of_units, degree * num_slices)
        costs = [[cost(m.rows, m.columns) for m in matrices] for matrices in rounds]
        owners = assign_owners(costs, degree, [[m.holders for m in matrices] for matrices in rounds], num_slices)
        for matrices, of_matrix in zip(rounds, owners, strict=True):
            indices = tuple(dict.fromkeys(matrix.unit for matrix in matrices))
            plan = ExchangePlan.build(matrices, [owner % degree for owner in of_matrix], *shards)
            # See "Matrices in slices" above. Parts that arrive from the ranks in order need no offset.
            ways = [
                (source, owner // degree, Part(index, matrix, 0, start, stop - start))
                for index, (matrix, owner) in enumerate(zip(matrices, of_matrix, strict=True))
                if owner % degree == own and not matrix.holders
                for source, (start, stop) in enumerate(matrix.runs)
                if start < stop
            ]
            within = ExchangePlan.of_ways(ways, num_slices, place)
            of_slices = PlannedRound(indices, tuple(range(num_slices)), dtypes, within, "model") if ways else None
            planned.append(PlannedRound(indices, ranks, dtypes, plan, among, of_slices))
    return planned
