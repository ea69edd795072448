"""Who shares a GPU, and which backends have a transport."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from zeroengine import DivergenceError, ZeroEngineError
from zeroengine.comm import group as group_module
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


def objects_of_ranks_with_gpus() -> list[object]:
    """Two of three ranks exchange objects, and would need GPUs for tensors of the group's own backend."""
    dist.init_process_group("gloo")
    part = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    patch = pytest.MonkeyPatch()
    patch.setattr(group_module, "backend_of", lambda group, device_type: "nccl")
    patch.setattr(group_module, "check_gpus", lambda *_: None)
    patch.setattr(torch.cuda, "set_device", lambda _: None)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU"))
    group = Group(part, torch.device("cuda", 0))
    return group.all_gather_object((group.rank, "x" * group.rank))


def test_ranks_with_gpus_exchange_objects_in_host_memory() -> None:
    assert run_ranks(3, objects_of_ranks_with_gpus) == [[(0, ""), (1, "x")], [], [(0, ""), (1, "x")]]


def waits(watched: bool) -> float | str:
    """Rank 1 comes to an exchange later than torch's collectives of the group may take."""
    dist.init_process_group("gloo")
    group = Group(None, torch.device("cpu"))
    # Shared memory says what it waits for, and watches nothing.
    group.surround_long_waits(lambda _: nullcontext(), group_module.PATIENCE if watched else None)
    # The ranks have started when the short time begins to count.
    group.all_gather_object(0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), group.process_group)
    began = time.monotonic()
    if group.rank == 1:
        time.sleep(3)
    try:
        group.all_gather_object(group.rank)
    except ZeroEngineError as error:
        return str(error)
    return time.monotonic() - began


def test_patience_is_the_watchdog_s_and_not_that_of_torch_s_collectives() -> None:
    waited = run_ranks(2, waits, True)[0]
    assert isinstance(waited, float) and waited > 2.5
    assert "rank 0 lost its peers" in str(run_ranks(2, waits, False)[0])


@pytest.mark.parametrize("diverged", [False, True])
def test_nccl_is_not_ended_after_a_divergence_though_it_was_handled(
    diverged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(DivergenceError, "has_occurred", False)
    monkeypatch.setattr(group_module, "exits_with_error", lambda: False)
    if diverged:
        with pytest.raises(DivergenceError):
            raise DivergenceError("rank 1 does not answer")
    group_module._stop("nccl")
    assert bool(ended) is not diverged
