"""What ``CONTRIBUTING.md`` says of another transport is enough: it trains, and is planned for, by its traits alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import zeroengine
from tests.comm.transports.toy import ToyTransport, add_toy_transport
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, Trained, assert_same_bits, ordinary_loop, train_at
from tests.emulated import cpu_alone
from tests.plan.test_step_time import CPUS
from zeroengine.config import load
from zeroengine.plan.seconds.step_time import topology_of

TASK = Task(steps=2)


def train() -> tuple[list[Trained], list[Trained], list[tuple[int, int]]]:
    """Over Gloo, over the toy, and the bytes of the memory that its sums pass through, as they are and as predicted."""
    dist.init_process_group("gloo")
    staged = []

    def loop(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
        numbers = ordinary_loop(task, engine)
        planned = engine._parts.setup.state_memory
        staged.append((engine.memory().staging, planned.requirement(planned.current()).states.device["staging"]))
        assert isinstance(engine._parts.ranks.transport, ToyTransport)
        return numbers

    gloo = train_at(STAGES, TASK, ordinary_loop, {"bf16": {"enabled": True}, "comm": {"transport": "gloo"}})
    with pytest.MonkeyPatch.context() as patch:
        add_toy_transport(patch)
        return gloo, train_at(STAGES, TASK, loop, {"bf16": {"enabled": True}}), staged


@cpu_alone("the toy moves host memory")
def test_a_transport_that_is_listed_chosen_and_opened_trains_with_the_same_bits() -> None:
    for gloo, toy, staged in run_ranks(2, train):
        for stage, first, second in zip(STAGES, gloo, toy, strict=True):
            assert_same_bits(first, second, stage)
        assert len(staged) == len(STAGES)
        assert all(0 < found <= predicted <= 3 * found for found, predicted in staged), staged


def test_the_plan_of_a_machine_chooses_it_by_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy_transport(monkeypatch)
    setting = topology_of(CPUS, load({}).resolve(world_size=2))
    assert (setting.transport, setting.traits.shard_align_bytes) == ("toy", 64)
