"""The memory between hosts whose ranks share memory is predicted."""

from __future__ import annotations

import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_degrees import degree_config
from zeroengine.plan.state_bytes import Setting, predict_states

TRIPLES = ((4, 4, 4), (2, 2, 2), (1, 2, 4), (1, 1, 1))


def staging() -> list[tuple[int, int]]:
    """Bytes after two steps, and those that the planner predicts, for each of the degrees."""
    dist.init_process_group("gloo")
    imagine_hosts(2)
    found = []
    for triple in TRIPLES:
        engine = zeroengine.initialize(build(TinyLM), config=degree_config(triple))
        for number in range(2):
            engine.backward(engine(*batch(number, engine.rank)))
            engine.step()
        planner, transport = engine._parts.planner, engine._parts.transport
        setting = Setting(4, "cpu", transport.name, transport.ranks_per_host)
        predicted = predict_states(planner.plans, engine.config, setting).device["staging"]
        found.append((engine.memory().staging, predicted))
        engine.close()
    return found


def test_memory_between_hosts_is_predicted_and_counted() -> None:
    for answers in run_ranks(4, staging):
        for triple, (measured, predicted) in zip(TRIPLES, answers, strict=True):
            assert 0 < measured <= predicted <= 4 * measured, (triple, answers)
