"""`ReplicaLayout`: each rank is in one replica, and replicas share work without gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroengine.partition.replicas import ReplicaLayout

SIZES = st.integers(1, 6)


def layouts(num_replicas: int, size: int) -> list[ReplicaLayout]:
    return [ReplicaLayout(rank, num_replicas, size) for rank in range(num_replicas * size)]


@given(SIZES, SIZES)
def test_replicas_and_counterparts_each_cut_the_ranks_into_equal_parts(num_replicas: int, size: int) -> None:
    ranks = layouts(num_replicas, size)
    for layout in ranks:
        assert set(layout.members) & set(layout.counterparts) == {layout.rank}
        assert layout.members[layout.local_rank] == layout.counterparts[layout.replica] == layout.rank
        assert len(layout.members) == size and len(layout.counterparts) == num_replicas
        assert all(ranks[other].members == layout.members for other in layout.members)
        assert all(ranks[other].counterparts == layout.counterparts for other in layout.counterparts)


@given(SIZES, SIZES, st.integers(0, 50), st.integers(0, 50))
def test_the_shares_of_counterparts_tile_a_range(num_replicas: int, size: int, start: int, numel: int) -> None:
    ranks = layouts(num_replicas, size)
    shares = [ranks[other].share(start, start + numel) for other in ranks[0].counterparts]
    assert [element for share in shares for element in range(*share)] == list(range(start, start + numel))
