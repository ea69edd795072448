"""Training with registered memory: which pool memory comes from, and that no number changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zeroengine
from tests.comm.transports.pools import Pool, pretended
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine.engine.initialize import make_engine
from zeroengine.offload.state_offloader import OFFLOADABLE_STATES

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
    spares: int  # received into beside what is kept


def check_pools(engine: zeroengine.Engine) -> None:
    """Whether all that moves comes from the pool of the channel that moves it, and nothing else does."""
    gather, reduce = Pool.all
    for unit in engine.units:
        engine.gatherer.pin(unit)
        assert gather.place(unit.full_buffer.tensor) and gather.place(unit.shard)
        engine.gatherer.unpin(unit)
    assert all(reduce.place(buffer.memory) for buffer in engine.reducer.reduces.buffer_pool._buffers)
    for grads in engine.reducer.gradients:
        assert (reduce.place(grads.flat_grads) is not None) == (grads.format.dtype is grads.format.reduce_dtype)
        assert not gather.place(grads.flat_grads)
    assert not any(pool.place(tensor) for pool in Pool.all for tensor in engine.optimizer.tensors())


def leave_and_come_back(engine: zeroengine.Engine, folder: Path) -> None:
    engine.offload_states(device="nvme", nvme_path=folder, include=OFFLOADABLE_STATES)
    assert not any(pool.place(unit.shard) for pool in Pool.all for unit in engine.units)
    engine.reload_states()


def trained(stage: int, how: bool, more: dict[str, Any], folder: Path) -> Seen:
    rank = start()
    with pretended():
        engine = make_engine(build(), None, config(stage, **more, comm={"register_buffers": how}), None)
        losses, buffers = [], engine.reducer.reduces.buffer_pool._buffers
        built, made = len(Pool.all[1].log) if how else 0, len(buffers)
        for number in range(7):
            loss = engine(*batch(number, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if how and number == 3:
                check_pools(engine)
                leave_and_come_back(engine, folder)
                check_pools(engine)
        log = Pool.all[1].log if how else []
        back = sum(grads.channel is not None for grads in engine.reducer.gradients)
        engine.close()
    came = sum(size > 0 for size, _ in log[built:])
    return Seen(losses, came - back - (len(buffers) - made))


NORMAL_CASES = {
    (0, "fp32"),
    (1, "accumulating in fp32"),
    (2, "in buckets"),
    (3, "accumulating in fp32"),
}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        pytest.param(*case, marks=() if case in NORMAL_CASES else pytest.mark.slow)
        for case in itertools.product(range(4), PRECISIONS)
    ],
)
def test_registered_memory_changes_no_loss_and_comes_from_the_channels_pool(
    stage: int, name: str, tmp_path: Path
) -> None:
    plain, registered = (run_ranks(2, trained, stage, how, PRECISIONS[name], tmp_path) for how in (False, True))
    assert [seen.losses for seen in registered] == [seen.losses for seen in plain]
    for seen in registered:
        assert (seen.spares > 0) == (stage > 1 and name == "accumulating in fp32")
