from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.ranks import run_ranks
from zeroengine.comm.group import Group
from zeroengine.errors import ZeroEngineError
from zeroengine.plan.measure import UNIT_BYTES, link_rates, measure
from zeroengine.plan.seconds.compute_rates import fit


def test_a_fit_finds_the_rates_that_made_the_times() -> None:
    rows = [(1e9, 1e6, 100.0), (5e9, 4e6, 120.0), (1e8, 8e7, 300.0), (1e7, 1e5, 5000.0)]
    inverse = (1 / 50e9, 1 / 8e9, 5e-6)
    times = [sum(a * b for a, b in zip(row, inverse, strict=True)) for row in rows]
    assert fit(rows, times) == pytest.approx(inverse, rel=1e-6)


def test_a_fit_gives_no_negative_rates() -> None:
    assert min(fit([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [1.0, 1.5, 1.9])) >= 0
    assert min(fit([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], [1.0, 2.5, 4.0])) >= 0


def links_of_two_nodes() -> tuple[float, ...]:
    dist.init_process_group("gloo")
    imagine_hosts(2)
    with mock.patch.dict(UNIT_BYTES, {"cpu": 1 << 20}):
        return tuple(link_rates(Group(None, torch.device("cpu")), 2).values())


@pytest.mark.slow
def test_links_within_nodes_are_measured_apart_from_the_network() -> None:
    first, *others = run_ranks(4, links_of_two_nodes)
    assert all(other == first for other in others), "all ranks plan for the same machine"
    link, _, node_link, latency = first
    assert min(first) > 0 and link != node_link and latency < 1


@pytest.mark.slow
def test_two_ranks_measure_every_rate(tmp_path: Path) -> None:
    said: list[str] = []
    machine = measure(said.append, ranks=2, threads=1, folder=tmp_path)
    assert machine.world_size == 2
    rates = machine.rates
    assert min(*rates.matmul.values(), *rates.elementwise.values(), rates.memory, rates.link, rates.reduce_link) > 1e6
    assert len(said) >= 4
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZeroEngineError, match="no-such-folder"):
        measure(ranks=1, threads=1, folder=tmp_path / "no-such-folder")
