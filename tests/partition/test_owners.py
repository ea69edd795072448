"""Owners of matrices: every element of every matrix reaches its owner once, and owners have equal work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zeroengine.optim.muon import update_cost
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.owners import ExchangePlan, assign_owners, matrices_of, matrix_shape, rounds_of

Shape = tuple[int, ...]
# Units of parameters: each with its shape and the number of matrices in it.
Unit = list[tuple[Shape, int]]


def block(hidden: int, mlp: int, kv: int | None = None) -> Unit:
    kv = kv or hidden
    return [((hidden, hidden), 1)] * 2 + [((kv, hidden), 1)] * 2 + [((mlp, hidden), 1)] * 2 + [((hidden, mlp), 1)]


MODELS: dict[str, list[Unit]] = {
    "one matrix": [[((5, 3), 1)]],
    "one row": [[((1, 9), 1)]],
    "one column": [[((9, 1), 1)]],
    "one element": [[((1, 1), 1)]],
    "fewer matrices than ranks": [[((7, 5), 1), ((3, 11), 1)]],
    "one larger than all others": [[((90, 80), 1)], [((8, 8), 1)] * 20],
    "odd shapes": [[((17, 3), 1), ((1, 129), 1), ((31, 63), 1)]] * 3,
    "primes": [[((101, 103), 1), ((97, 89), 1)]] * 2,
    "convolutions": [[((16, 3, 3, 3), 1), ((32, 16, 3, 3), 1), ((8, 32, 1, 1), 1)]],
    "convolutions of one dimension": [[((12, 4, 7), 1)]] * 4,
    "fused projections": [[((96, 32), 3), ((32, 32), 1)]] * 4,
    "heads": [[((64, 48), 8), ((64, 48), 8), ((48, 64), 1)]] * 2,
    "stacked experts": [[((6, 20, 12), 6), ((6, 12, 20), 6)]] * 2,
    "experts of several matrices": [[((4, 24, 10), 8)]],
    "a parameter without elements": [[((0, 4), 1), ((4, 4), 1)]],
    "transformer": [block(32, 128)] * 4,
    "grouped queries": [block(64, 224, 16)] * 3,
    "wide": [[((8, 1000), 1)]] * 5,
    "tall": [[((1000, 8), 1)]] * 5,
    "blocks that differ": [[((8 * n, 8), 1)] * n for n in range(1, 7)],
}
DEGREES = {
    "stage": lambda world: Degrees(world, world, world),
    "stage 1": lambda world: Degrees(world, 1, 1),
    "one shard": lambda world: Degrees(1, 1, 1),
    "three levels": lambda world: Degrees(world, world, max(world // 2, 1)),
    "hybrid": lambda world: Degrees(max(world // 2, 1), 1, 1),
}


@pytest.mark.parametrize("model", MODELS)
def test_each_element_of_a_matrix_goes_from_the_shard_that_holds_it_to_its_owner_alone(model: str) -> None:
    for world in (1, 2, 4, 8):
        for make in DEGREES.values():
            degrees = make(world)
            layouts = [
                FlatLayout.build(f"u{i}", [(f"p{j}", shape) for j, (shape, _) in enumerate(unit)], degrees, world)
                for i, unit in enumerate(MODELS[model])
            ]
            units = [
                matrices_of(layout, i, [count for _, count in MODELS[model][i]]) for i, layout in enumerate(layouts)
            ]
            for rank in range(0, world, degrees.optimizer):
                check_exchange(units, layouts, degrees, tuple(sorted(degrees.owners(rank, degrees.optimizer))))


def check_exchange(units: list, layouts: list[FlatLayout], degrees: Degrees, ranks: tuple[int, ...]) -> None:
    """Run the exchanges of one set of ranks, where each element has a value of its own."""
    degree = degrees.optimizer
    values = [torch.arange(layout.numel) + (i << 18) for i, layout in enumerate(layouts)]
    rounds = rounds_of(units, degree)
    assert [m for matrices in rounds for m in matrices] == [m for matrices in units for m in matrices]
    owned = assign_owners([[update_cost(m.rows, m.columns) for m in matrices] for matrices in rounds], degree)
    numbers = [degrees.index(rank, degree) for rank in ranks]
    numels = [layout.shard_numel(degree) for layout in layouts]
    for matrices, owners in zip(rounds, owned, strict=True):
        plans = [ExchangePlan.build(matrices, owners, numels, numbers, place) for place in range(len(ranks))]
        assert len({plan.sizes for plan in plans}) == 1
        # What each rank sends to each, as one message, in the order in which it is sent.
        sent = []
        for rank, plan, sizes in zip(ranks, plans, plans[0].sizes, strict=True):
            shards = [
                value[slice(*layout.shard_range(rank, degree))] for value, layout in zip(values, layouts, strict=True)
            ]
            parts = [shards[part.matrix.unit][part.shard_slice] for part in plan.sent]
            sent.append(torch.cat([torch.empty(0), *parts]).split(sizes))
            assert plan.num_sent == sum(sizes)
        results = {}
        for place, plan in enumerate(plans):
            arrived = torch.cat([messages[place] for messages in sent]).split([part.numel for part in plan.received])
            for part, run in zip(plan.received, arrived, strict=True):
                assert owners[part.number] == numbers[place]
                whole = results.setdefault(part.number, torch.full((part.matrix.numel,), -1.0))
                assert torch.equal(whole[part.offset :][: part.numel], torch.full((part.numel,), -1.0))
                whole[part.offset :][: part.numel] = run
        assert results.keys() == set(range(len(matrices)))
        for number, whole in results.items():
            expected = values[matrices[number].unit][matrices[number].start :][: matrices[number].numel]
            assert torch.equal(whole, expected.float())


SIZES = {"7 B": (4096, 11008, 4096, 32), "8 B": (4096, 14336, 1024, 32), "70 B": (8192, 28672, 1024, 80)}


def elements(rows: int, columns: int) -> int:
    """The cost by which owners of states of whole parameters are balanced."""
    return rows * columns


@pytest.mark.parametrize("cost", [update_cost, elements])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("size", SIZES)
def test_the_busiest_owner_has_little_more_work_and_state_than_an_equal_share(
    size: str, ranks: int, cost: Callable[[int, int], int]
) -> None:
    *shape, blocks = SIZES[size]
    degrees, unit = Degrees(ranks, ranks, ranks), block(*shape)
    layout = FlatLayout.build("block", [(str(i), shape) for i, (shape, _) in enumerate(unit)], degrees, ranks)
    rounds = rounds_of([matrices_of(layout, i, [1] * len(unit)) for i in range(blocks)], ranks)
    costs = [[cost(m.rows, m.columns) for m in matrices] for matrices in rounds]
    loads = [0] * ranks
    for of_round, owners in zip(costs, assign_owners(costs, ranks), strict=True):
        for cost, owner in zip(of_round, owners, strict=True):
            loads[owner] += cost
    assert max(loads) <= (1.1 if cost is elements else 1.15) * sum(loads) / ranks
    # Few rounds would take much memory, and one of few matrices leaves owners without work.
    assert all(len(of_round) >= ranks for of_round in costs[:-1])


def test_owners_of_slices_have_equal_work_and_a_matrix_in_one_slice_stays_there() -> None:
    ranks, slices, blocks = 4, 8, 8
    costs = [[7, 5, 5, 3, 2, 2] for _ in range(blocks)]
    holders = [[(), (), (), (), (number % slices,), ((number + 1) % slices,)] for number in range(blocks)]
    owned = assign_owners(costs, ranks, holders, slices)
    loads = [0] * (ranks * slices)
    for of_round, of_matrix, numbers in zip(costs, holders, owned, strict=True):
        for cost, places, number in zip(of_round, of_matrix, numbers, strict=True):
            loads[number] += cost
            assert not places or number // ranks in places
    assert max(loads) - sum(loads) / len(loads) < 7
    # Whole experts, of which each slice has one of each kind: all ranks with it have work.
    experts = assign_owners([[1] * 2 * slices], 2, [[(index % slices,) for index in range(2 * slices)]], slices)[0]
    assert sorted(experts) == list(range(2 * slices))


def test_the_matrices_of_a_parameter_are_blocks_of_its_rows() -> None:
    assert matrix_shape((6, 4)) == (6, 4)
    assert matrix_shape((6, 4), 3) == (2, 4)
    assert matrix_shape((6, 4, 5, 5)) == (6, 100)
    assert matrix_shape((8, 6, 4), 8) == (6, 4)
    assert matrix_shape((8, 6, 4), 16) == (3, 4)
