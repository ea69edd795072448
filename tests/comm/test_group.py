"""Who shares a GPU, and which backends have a transport."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from zeroengine import ZeroEngineError
from zeroengine.comm.group import Group, check_gpus
from zeroengine.comm.transports.choose import open_transport
from zeroengine.utils.process_groups import destroy_group


def told(gpus: list[str]) -> list[str]:
    """What each of these ranks is told."""
    store = dist.HashStore()

    def check(rank: int) -> str:
        try:
            check_gpus(store, rank, len(gpus), gpus[rank])
        except ZeroEngineError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(check, range(len(gpus))))


def test_more_ranks_than_gpus_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROENGINE_HOST", "node-a")
    assert told(["GPU-1", "GPU-2", "GPU-3"]) == ["", "", ""]
    first, *others = told(["GPU-1", "GPU-2", "GPU-1", "GPU-1"])
    assert others == [first] * 3
    assert first.startswith("ranks 0 and 2 have the same GPU (GPU-1 on node-a): NCCL needs one for each.")
    assert "--nproc" in first and "LOCAL_RANK" in first


def test_a_backend_without_a_transport_is_refused_with_the_names_of_those_that_have_one() -> None:
    group = object.__new__(Group)
    group.world_size, group.backend, group.device = 2, "mpi", torch.device("cpu")
    with pytest.raises(ZeroEngineError, match=r"'mpi' for cpu tensors, .* \"nccl\" on GPUs and \"gloo\" on CPUs"):
        open_transport(group, "auto", 1.0)


def sums_in_groups_of_groups() -> tuple[tuple[int, ...], list[float]]:
    """Make and destroy groups of one half of the ranks, from all ranks and from the half itself; sum ranks in each."""
    dist.init_process_group("gloo")
    everyone = Group(None, torch.device("cpu"))
    half = [rank for rank in range(4) if rank // 2 == everyone.rank // 2]
    sums = []
    for _ in range(3):
        part = everyone.subgroup(half, None)
        groups = [part.new_group("gloo"), part.new_group("gloo"), everyone.new_group("gloo", members=half)]
        for group in (*groups, part.process_group):
            value = torch.tensor(float(everyone.rank))
            dist.all_reduce(value, group=group)
            sums.append(value.item())
            destroy_group(group)
    return part.numbers, sums


def test_groups_of_the_same_ranks_do_not_meet_whichever_group_makes_them() -> None:
    for rank, (numbers, sums) in enumerate(run_ranks(4, sums_in_groups_of_groups)):
        assert numbers == ((0, 1) if rank < 2 else (2, 3))
        assert sums == [1.0 if rank < 2 else 5.0] * 12
