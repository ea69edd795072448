"""The slices of all ranks of a model group are the whole parameter, and are those that torch gives the ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine.config import load
from zeroengine.engine.initialize import _data_ranks_per_node
from zeroengine.optim.backends.owner_exchange import places_in_slices
from zeroengine.partition.boxes import Box
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.owners import matrices_of
from zeroengine.partition.slices import ModelLayout, Slice, make_slice


class Case(NamedTuple):
    """A parameter, how it is split, and over how many ranks."""

    shape: tuple[int, ...]
    placement: Placement
    num_ranks: int

    @property
    def whole(self) -> torch.Tensor:
        return torch.arange(math.prod(self.shape)).view(self.shape)

    def slices(self) -> list[Slice]:
        mesh = SimpleNamespace(size=lambda: self.num_ranks)
        param: Any = SimpleNamespace(shape=self.shape, placements=(self.placement,), device_mesh=mesh)
        return [make_slice("weight", param, rank) for rank in range(self.num_ranks)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim, num_parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    # A fused matrix has equal parts, which the ranks need not divide.
    shape[dim] *= num_parts
    # Torch counts dimensions from the end, too.
    written = draw(st.sampled_from((dim, dim - len(shape))))
    placement = Shard(written) if num_parts == 1 else _StridedShard(dim, split_factor=num_parts)
    return Case(tuple(shape), placement, draw(st.integers(1, 5)))


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize(
    ("model_group", "per_node", "expected"),
    [((0, 1), 4, 2), ((0, 4), 4, 4), ((2, 3, 6, 7), 4, 2), ((0, 1), 0, 0), ((2, 3, 4), 4, 0)],
)
def test_a_machine_has_as_many_data_ranks_as_it_has_ranks_with_one_slice(
    model_group: tuple[int, ...], per_node: int, expected: int
) -> None:
    assert _data_ranks_per_node(model_group, per_node) == expected


def test_an_elastic_run_with_all_ranks_keeps_its_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROENGINE_FULL_WORLD_SIZE", "4")
    settings = load({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4})
    assert settings.resolve(world_size=4, ranks_per_model=2).gradient_accumulation_steps == 1
    # One of two model groups is missing.
    assert settings.resolve(world_size=2, ranks_per_model=2).gradient_accumulation_steps == 2


@given(cases())
def test_the_slices_of_all_ranks_cover_the_parameter_once(case: Case) -> None:
    found = [number for piece in case.slices() for number in piece.cut(case.whole).flatten().tolist()]
    assert sorted(found) == list(range(case.whole.numel()))


@given(cases())
def test_a_slice_has_the_shape_that_it_says(case: Case) -> None:
    for piece in case.slices():
        assert tuple(piece.cut(case.whole).shape) == piece.local_shape
        assert not piece.is_whole and piece.shape == case.shape


@given(cases(), st.data())
def test_boxes_of_a_slice_hold_its_values_at_their_place_in_the_parameter(case: Case, data: st.DataObject) -> None:
    for piece in case.slices():
        local = piece.cut(case.whole)
        offsets = [data.draw(st.integers(0, size)) for size in local.shape]
        ends = [data.draw(st.integers(first, size)) for first, size in zip(offsets, local.shape, strict=True)]
        sizes = tuple(end - first for first, end in zip(offsets, ends, strict=True))
        own = part_of(local, Box(tuple(offsets), sizes, 0))
        found = []
        for box, place in piece.boxes(Box(tuple(offsets), sizes, 0)):
            values = part_of(case.whole, box)
            assert torch.equal(own[place], values)
            assert not box.numel or values.flatten()[0] == box.start
            found += values.flatten().tolist()
        assert sorted(found) == sorted(own.flatten().tolist())


@given(cases(), st.data())
def test_the_parts_of_each_matrix_are_put_together_and_cut_again(case: Case, data: st.DataObject) -> None:
    pieces, whole = case.slices(), case.whole.flatten()
    rows = math.prod(case.shape[:-1]) if len(case.shape) > 1 else 1
    count = data.draw(st.sampled_from([number for number in range(1, rows + 1) if rows % number == 0]))
    layouts = [FlatLayout.build("unit", [("weight", piece.local_shape)], Degrees(1, 1, 1), 1) for piece in pieces]
    of_ranks = [matrices_of(layout, 0, [count], [(tuple(pieces), place)]) for place, layout in enumerate(layouts)]
    # All ranks list the same matrices, each with what its own slice has of them.
    for same in zip(*of_ranks, strict=True):
        start, stop = same[0].param_offset, same[0].param_offset + same[0].numel
        parts = []
        for place, (matrix, piece) in enumerate(zip(same, pieces, strict=True)):
            assert matrix.runs == same[0].runs and matrix.param_offset == start
            first, last = matrix.runs[place]
            assert matrix.start == first
            parts.append(piece.cut(case.whole).flatten()[first:last])
        joined, result = torch.cat(parts), torch.full((stop - start,), -1)
        for in_whole, in_parts in places_in_slices(same[0], result, joined):
            in_whole.copy_(in_parts)
        assert torch.equal(result, whole[start:stop])
        again = torch.full_like(joined, -1)
        for in_whole, in_parts in places_in_slices(same[0], result, again):
            in_parts.copy_(in_whole)
        assert torch.equal(again, joined)


def test_a_replicated_parameter_is_whole_on_every_rank() -> None:
    for piece in Case((3, 4), Replicate(), 2).slices():
        box = Box((1, 0), (2, 4), 4)
        whole = torch.ones(3, 4)
        assert piece.is_whole and torch.equal(piece.cut(whole), whole)
        assert [found for found, _ in piece.boxes(box)] == [box]


TORCH_CASES = [
    *(Case((rows, 3), Shard(0), 4) for rows in (8, 7, 5, 3, 1)),
    *(Case((2, columns, 2), Shard(1), 4) for columns in (4, 6, 9)),
    Case((6,), Shard(-1), 4),
    *(Case((rows, 2), _StridedShard(0, split_factor=parts), 4) for rows, parts in ((16, 2), (24, 3), (10, 2), (6, 2))),
]


def slices_of_torch() -> list[torch.Tensor]:
    start()
    mesh = dist.init_device_mesh("cpu", (4,))
    return [
        # Every rank has the whole values, and nothing is sent: torch sends fused matrices of even sizes alone.
        distribute_tensor(case.whole, mesh, [case.placement], src_data_rank=None).to_local()
        for case in TORCH_CASES
    ]


@cpu_alone("the mesh is of the CPU")
def test_slices_are_those_of_torch_for_even_and_uneven_sizes() -> None:
    for rank, found in enumerate(run_ranks(4, slices_of_torch)):
        for case, local in zip(TORCH_CASES, found, strict=True):
            assert torch.equal(case.slices()[rank].cut(case.whole), local), (rank, case)


@pytest.mark.parametrize(
    "groups", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(1, 0), (2, 3)], [(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]], ids=str
)
def test_data_groups_have_one_rank_of_each_model_group_at_the_same_number(groups: list[tuple[int, ...]]) -> None:
    layouts = [ModelLayout.of_groups(groups, rank) for rank in range(4)]
    for rank, layout in enumerate(layouts):
        assert rank in layout.model_group and rank in layout.data_group
        assert layout.model_group[layout.number] == rank
        # All ranks of a group agree on its ranks.
        assert all(layouts[other].data_group == layout.data_group for other in layout.data_group)
        assert {layouts[other].number for other in layout.data_group} == {layout.number}
        assert [layouts[other].number for other in layout.model_group] == list(range(len(layout.model_group)))
