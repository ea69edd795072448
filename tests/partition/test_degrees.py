"""Stages as degrees, and the numbering of shards."""

from __future__ import annotations

import pytest

from zeroengine import ZeroEngineError
from zeroengine.partition.degrees import STAGES, Degrees, degrees_of_stage


@pytest.mark.parametrize(
    ("stage", "optimizer", "gradients", "parameters"), [(0, 1, 1, 1), (1, 8, 1, 1), (2, 8, 8, 1), (3, 8, 8, 8)]
)
def test_the_table_of_stages(stage: int, optimizer: int, gradients: int, parameters: int) -> None:
    assert degrees_of_stage(stage, 8) == Degrees(optimizer, gradients, parameters)


def test_one_rank_partitions_nothing_at_any_stage() -> None:
    assert {degrees_of_stage(stage, 1) for stage in STAGES} == {Degrees(1, 1, 1)}


@pytest.mark.parametrize("stage", [-1, 4, None, "2"])
def test_another_stage_is_an_error_that_names_the_stages(stage: int) -> None:
    with pytest.raises(ZeroEngineError, match=r"stage is one of \[0, 1, 2, 3\], found"):
        degrees_of_stage(stage, 8)


@pytest.mark.parametrize("degrees", [(0, 0, 0), (8, 8, 0), (8, 8, -1)])
def test_a_degree_below_one_is_an_error(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(ZeroEngineError, match="at least 1"):
        Degrees(*degrees)


@pytest.mark.parametrize("degrees", [(1, 2, 1), (1, 1, 2), (4, 8, 4), (8, 3, 1), (8, 4, 3), (6, 4, 2)])
def test_degrees_that_do_not_nest_are_an_error_that_shows_them(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(ZeroEngineError, match=rf"must nest .*optimizer={degrees[0]}, gradients={degrees[1]}"):
        Degrees(*degrees)


def test_hybrid_sharding_numbers_shards_as_the_docstring_shows() -> None:
    hybrid = Degrees(optimizer=8, gradients=8, parameters=4)
    assert [hybrid.index(rank, 4) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [hybrid.index(rank, 8) for rank in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
