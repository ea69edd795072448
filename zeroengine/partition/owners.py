"""Which rank updates which matrix, for optimizers whose rule needs matrices whole. Integers only.

Shards stay as they are, contiguous and equal, so that gathers, reduces, norms and checkpoints know nothing of matrices.
For the update each matrix has an *owner*, one of the ranks that together hold the optimizer's shards once. The parts of
a matrix go from the shards to its owner, and the parts of the result go back (``ExchangePlan``). This is a unit of
matrices a, b and c on two ranks:

    shard of rank 0    a a a a b b        rank 0 owns a and c    rank 0 sends 2 elements (of b) to rank 1
    shard of rank 1    b b c c c c        rank 1 owns b          rank 1 sends 4 elements (c) to rank 0
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from zeroengine.partition.layout import FlatLayout

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
        param_offset: The first element within the flattened parameter.
        start: The first element within the unit's flat buffer.
        rows: Its rows.
        columns: Its columns.
    """

    unit: int
    param_index: int
    param_offset: int
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.rows * self.columns


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


def matrices_of(layout: FlatLayout, unit: int, num_matrices: Sequence[int]) -> list[Matrix]:
    """Return the matrices of a unit, in the order of its flat buffer. Parameters without elements have none.

    Args:
        layout: The flat layout of the unit.
        unit: The index of the unit.
        num_matrices: For each parameter of the layout, how many matrices it holds.
    """
    matrices = []
    for index, (slot, count) in enumerate(zip(layout.slots, num_matrices, strict=True)):
        if slot.numel:
            rows, columns = matrix_shape(slot.shape, count)
            offsets = range(0, slot.numel, rows * columns)
            matrices += [Matrix(unit, index, offset, slot.offset + offset, rows, columns) for offset in offsets]
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


def assign_owners(rounds: Sequence[Sequence[int]], degree: int) -> list[list[int]]:
    """Return the number of the owner of each matrix, such that all owners have about equal costs.

    The costliest matrix of a round goes first, each to the owner with the least cost so far (Graham, 1969: "longest
    processing time first"). So the costliest owner is above the mean by less than one matrix.

    Args:
        rounds: For each round, the cost of each of its matrices.
        degree: The number of owners. They are numbered as shards are.
    """
    loads = [(0, owner) for owner in range(degree)]
    owners = []
    for costs in rounds:
        owner_of = [0] * len(costs)
        # Equal costs go in the order of the matrices, so that all ranks decide alike.
        for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
            load, owner = heapq.heappop(loads)
            owner_of[index] = owner
            heapq.heappush(loads, (load + costs[index], owner))
        owners.append(owner_of)
    return owners


class Part(NamedTuple):
    """The part of a matrix that lies in one shard.

    Attributes:
        number: The matrix's number in its round.
        matrix: The matrix.
        offset: The first element within the matrix.
        shard_offset: The first element within the shard.
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
        sizes = [[0] * len(numbers) for _ in numbers]
        # By the rank at the other end, because messages lie one after another.
        sent: list[list[Part]] = [[] for _ in numbers]
        received: list[list[Part]] = [[] for _ in numbers]
        for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            size, target = shard_numels[matrix.unit], place[owner]
            end = matrix.start + matrix.numel
            for shard in range(matrix.start // size, (end - 1) // size + 1):
                low, high = max(matrix.start, shard * size), min(end, (shard + 1) * size)
                part = Part(index, matrix, low - matrix.start, low - shard * size, high - low)
                source = place[shard]
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
    """

    unit: int
    layout: FlatLayout
    num_matrices: Sequence[int]
    dtypes: tuple[Any, ...]


class PlannedRound(NamedTuple):
    """What one rank does in one round.

    Attributes:
        units: The indices of the units of the round, in order.
        ranks: The ranks that exchange, ascending.
        dtypes: The dtypes that values travel in.
        plan: What the rank sends and receives.
    """

    units: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[Any, ...]
    plan: ExchangePlan


def plan_rounds(units: Sequence[ExchangedUnit], cost: Callable[[int, int], int], rank: int) -> list[PlannedRound]:
    """Return what one rank does in each of the rounds in which the matrices of all units go to owners.

    Args:
        units: The units, in the order of registration.
        cost: The cost of the update of a matrix, by its rows and columns, which owners are balanced by.
        rank: The rank.
    """
    # Units of one number of shards and of equal dtypes are exchanged together. Nearly always those are all.
    groups: dict[Any, list[ExchangedUnit]] = {}
    for unit in units:
        groups.setdefault((unit.layout.degrees.optimizer, unit.dtypes), []).append(unit)
    planned = []
    for (degree, dtypes), group in groups.items():
        degrees = group[0].layout.degrees
        ranks = tuple(sorted(degrees.owners(rank, degree)))
        numels = {unit.unit: unit.layout.shard_numel(degree) for unit in group}
        shards = numels, [degrees.index(other, degree) for other in ranks], ranks.index(rank)
        rounds = rounds_of([matrices_of(unit.layout, unit.unit, unit.num_matrices) for unit in group], degree)
        owners = assign_owners([[cost(m.rows, m.columns) for m in matrices] for matrices in rounds], degree)
        for matrices, of_matrix in zip(rounds, owners, strict=True):
            indices = tuple(dict.fromkeys(matrix.unit for matrix in matrices))
            planned.append(PlannedRound(indices, ranks, dtypes, ExchangePlan.build(matrices, of_matrix, *shards)))
    return planned
