"""Which ranks an engine is partitioned over, and who starts and ends what."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, ordinary_loop, start
from tests.emulated import cpu_alone


def without_start() -> tuple[bool, int, list[float]]:
    assert not dist.is_initialized()
    task = Task(steps=2)
    engine = make_engine(task, 3)
    return dist.is_initialized(), dist.get_world_size(), ordinary_loop(task, engine)[0]


def with_start(steps: int = 2) -> tuple[bool, int, list[float]]:
    start()
    task = Task(steps=steps)
    return dist.is_initialized(), dist.get_world_size(), ordinary_loop(task, make_engine(task, 3))[0]


def test_initialize_starts_the_process_group_of_the_launcher() -> None:
    started, given = run_ranks(2, without_start), run_ranks(2, with_start)
    assert started == given
    assert started[0][:2] == (True, 2)


def unlaunched() -> tuple[int, str, list[float]]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        del os.environ[name]
    task = Task(steps=2)
    engine = make_engine(task, 3)
    losses, _ = ordinary_loop(task, engine)
    assert engine.memory().gathered == 0 and engine.world_size == 1
    return dist.get_world_size(), dist.get_backend(), losses


def test_without_a_launcher_one_process_trains_alone() -> None:
    (world_size, _, losses), *_ = run_ranks(1, unlaunched)
    (_, _, alone), *_ = run_ranks(1, with_start)
    assert world_size == 1 and losses == alone


def as_groups(rank: int) -> Any:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


def as_mesh(rank: int) -> Any:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]


def in_pairs(transport: str, ranks: Callable[[int], Any]) -> list[float]:
    """Two groups of two ranks, each with an engine of its own; the members are not neighbours."""
    rank = start()
    task = Task(steps=3)
    model = build(task.factory)
    settings = config(3, optimizer=None, comm={"transport": transport})
    engine = zeroengine.initialize(model, task.optimizer(model), settings, process_group=ranks(rank))
    assert (engine.rank, engine.world_size) == (rank // 2, 2)
    losses = []
    for step in range(task.steps):
        loss = engine(*batch(step, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with zeroengine.gathered(model), torch.no_grad():
        if engine.rank == 1:
            model.norm.weight.fill_(float(rank))
    assert engine.full_state_dict()["norm.weight"][0] == (2 if rank % 2 == 0 else 3)
    return losses


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [("shm", as_groups), pytest.param("gloo", as_groups, marks=pytest.mark.slow), ("shm", as_mesh)],
)
def test_an_engine_is_partitioned_over_the_ranks_of_its_process_group(
    transport: str, ranks: Callable[[int], Any]
) -> None:
    found = run_ranks(4, in_pairs, transport, ranks)
    alone = [losses for _, _, losses in run_ranks(2, with_start, 3)]
    assert found == [alone[0], alone[0], alone[1], alone[1]]


def beside_other_groups(root: str) -> list[float]:
    """Two of three ranks, or all of two, which belong to different numbers of groups."""
    rank, world_size = start(), dist.get_world_size()
    pair, others = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([0, world_size - 1])]
    if rank == 2:
        return []
    losses = []
    for name in ("a", "b"):
        model, task = build(), Task(steps=2)
        settings = config(3, optimizer=None, comm={"transport": "gloo"})
        group = None if world_size == 2 else pair
        engine = zeroengine.initialize(model, task.optimizer(model), settings, process_group=group)
        losses, _ = ordinary_loop(task, engine)
        engine.save_checkpoint(root, name)  # by a group of its own
        engine.close()
        if rank == 0 and world_size == 2:
            dist.destroy_process_group(others.pop(0))
    return losses


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_may_belong_to_groups_that_the_others_do_not(world_size: int, tmp_path: Path) -> None:
    alone = [losses for _, _, losses in run_ranks(2, with_start)]
    assert run_ranks(world_size, beside_other_groups, str(tmp_path)) == alone + [[]] * (world_size - 2)


def deleted() -> None:
    """Without the engine and the model nothing of them stays: neither memory nor open files."""
    rank = start()
    before = len(os.listdir("/proc/self/fd"))
    for stage in (0, 2, 3):
        engine = make_engine(Task(factory=TinyLM), stage, comm={"transport": "shm"})
        engine.backward(engine(*batch(0, rank)))
        engine.step()
        references: list[weakref.ref[Any]] = [
            weakref.ref(engine),
            *(weakref.ref(p) for p in engine.module.parameters()),
            *(weakref.ref(unit.full_buffer.tensor) for unit in engine.units),
        ]
        del engine
        gc.collect()
        assert not [reference for reference in references if reference() is not None]
        dist.barrier()
    assert len(os.listdir("/proc/self/fd")) == before


@cpu_alone("torch keeps Gloo's sockets")
def test_a_deleted_engine_gives_everything_back() -> None:
    run_ranks(2, deleted)


def closed() -> None:
    rank = start()
    for transport in ("shm", "gloo"):
        for stage in (0, 1, 2, 3):
            engine = make_engine(Task(), stage, comm={"transport": transport})
            engine.backward(engine(*batch(0, rank)))
            engine.step()
            engine.close()
            engine.close()
            with torch.no_grad():
                assert engine.module(*batch(0, rank)).isfinite()


def test_a_closed_engine_s_model_still_runs() -> None:
    run_ranks(2, closed)
