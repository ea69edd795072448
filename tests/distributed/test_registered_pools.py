"""Training with registered memory: what comes from which pool, and that all ranks take it alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zeroengine
from tests.comm.transports.pools import Place, Pool, pretended
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine.engine.initialize import make_engine
from zeroengine.offload.offload_states import STATES

pytestmark = cpu_alone("where memory would lie is modelled")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulating in fp32": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    "in buckets": {"zero_optimization": {"reduce_bucket_size": 6000, "prefetch_bucket_size": 6000}},
}


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    losses: list[float]
    logs: list[list[tuple[int, Place]]]  # of each pool
    segments: list[list[int]]  # of each pool, after each micro-step
    spares: int  # received into beside what is kept


def check_pools(engine: zeroengine.Engine) -> None:
    """Whether all that moves comes from the pool of the channel that moves it, and nothing else does."""
    gather, reduce = Pool.all
    for unit in engine._parts.units:
        engine.gatherer.pin(unit)
        assert gather.place(unit.full_buffer) and gather.place(unit.shard)
        engine.gatherer.unpin(unit)
    assert all(reduce.place(slot.memory) for slot in engine.reducer._slots._slots)
    for grads in engine.reducer.gradients:
        assert (reduce.place(grads.grad_shard) is not None) == (grads.dtype is grads.reduce_dtype)
        assert not gather.place(grads.grad_shard)
    assert not any(pool.place(tensor) for pool in Pool.all for tensor in engine.optimizer.tensors())


def leave_and_come_back(engine: zeroengine.Engine, folder: Path) -> None:
    engine.offload_states(device="nvme", nvme_path=folder, include=STATES)
    assert not any(pool.place(unit.shard) for pool in Pool.all for unit in engine._parts.units)
    engine.reload_states()


def trained(stage: int, how: Any, more: dict[str, Any], folder: Path) -> Seen:
    rank = start()
    with pretended():
        engine = make_engine(build(), None, config(stage, **more, comm={"register_buffers": how}), None)
        losses, segments, slots = [], [], engine.reducer._slots._slots
        built, made = [len(pool.log) for pool in Pool.all], len(slots)
        for number in range(7):
            loss = engine(*batch(number, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if how and number == 3:
                check_pools(engine)
                leave_and_come_back(engine, folder)
                check_pools(engine)
            segments.append([len(pool.segments) for pool in Pool.all])
        logs = [pool.log for pool in Pool.all]
        engine.close()
    came = sum(size > 0 for size, _ in logs[1][built[1] :]) if how else 0
    back = sum(grads.channel is not None for grads in engine.reducer.gradients)
    return Seen(losses, logs, segments, came - back - (len(slots) - made))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", PRECISIONS)
def test_ranks_take_memory_alike_and_no_more_than_was_reserved(stage: int, name: str, tmp_path: Path) -> None:
    plain, registered, symmetric = (
        run_ranks(2, trained, stage, how, PRECISIONS[name], tmp_path) for how in (False, True, "symmetric")
    )
    assert [seen.losses for seen in registered] == [seen.losses for seen in symmetric] == [s.losses for s in plain]
    assert symmetric[0].logs == symmetric[1].logs
    assert symmetric[0].segments == symmetric[1].segments == [[1, 1]] * 7
    for seen in (*registered, *symmetric):
        assert (seen.spares > 0) == (stage > 1 and name == "accumulating in fp32")


def holding_everything() -> tuple[list[list[tuple[int, Place]]], list[int]]:
    rank = start()
    with pretended():
        engine = make_engine(build(), None, config(3, comm={"register_buffers": "symmetric"}), None)
        for number in range(3):
            with zeroengine.gathered(engine.module):
                pass
            engine.backward(engine(*batch(number, rank)))
            engine.step()
        return [pool.log for pool in Pool.all], [len(pool.segments) for pool in Pool.all]


def test_what_is_more_than_was_reserved_is_taken_alike() -> None:
    first, second = run_ranks(2, holding_everything)
    assert first == second
