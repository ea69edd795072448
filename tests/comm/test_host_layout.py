"""Which ranks of several hosts may share memory within their hosts."""

from __future__ import annotations

import pytest

from zeroengine.comm.host_layout import HostLayout, layout_of
from zeroengine.partition.degrees import Degrees


@pytest.mark.parametrize(
    ("hosts", "fits"),
    [
        ([[0, 1], [2, 3]], True),
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], True),
        ([[0, 1, 2, 3]], False),
        ([[0], [1]], False),
        ([[0, 1], [2, 3, 4]], False),
        ([[0, 2], [1, 3]], False),
    ],
)
def test_hosts_with_equally_many_consecutive_ranks_have_a_layout(hosts: list[list[int]], fits: bool) -> None:
    layout = layout_of(hosts, 1)
    assert (layout is not None) == fits
    assert layout is None or layout.ranks_by_host() == hosts


@pytest.mark.parametrize(
    ("degrees", "unfit"),
    [
        (Degrees(6, 6, 6), []),
        (Degrees(6, 6, 3), []),
        (Degrees(6, 6, 2), [2]),
        (Degrees(6, 6, 6, secondary=3), []),
        (Degrees(6, 6, 6, secondary=2), [2]),
    ],
)
def test_groups_that_lie_differently_on_the_hosts_do_not_fit(degrees: Degrees, unfit: list[int]) -> None:
    assert HostLayout(0, num_hosts=2, ranks_per_host=3).unfit([degrees]) == unfit
