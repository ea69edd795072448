"""The memory that transports of several hosts keep is predicted: that of Gloo, and between hosts that share memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_degrees import degree_config
from zeroengine.memory.state_bytes import RankTopology, predict_states

TRIPLES = ((4, 4, 4), (2, 2, 2), (1, 2, 4), (1, 1, 1))
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {}}


def staging(transport: str, zero: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    """Bytes after two steps, and those that the planner predicts, for each of the degrees."""
    dist.init_process_group("gloo")
    imagine_hosts(2)
    found = []
    for triple in TRIPLES:
        settings = degree_config(triple)
        settings["comm"]["transport"] = transport
        settings["zero_optimization"] |= zero
        engine = zeroengine.initialize(build(TinyLM), config=settings)
        for number in range(2):
            engine.backward(engine(*batch(number, engine.rank)))
            engine.step()
        state_memory, opened = engine._parts.setup.state_memory, engine._parts.ranks.transport
        topology = RankTopology(4, "cpu", opened.name, opened.ranks_per_host)
        predicted, memory = predict_states(state_memory.plans, engine.config, topology).device, engine.memory()
        found.append({name: (getattr(memory, name), predicted[name]) for name in ("staging", "quantized")})
        engine.close()
    return found


@pytest.mark.parametrize(
    ("transport", "zero"),
    [("auto", {}), ("auto", QUANTIZED), pytest.param("gloo", {}, marks=pytest.mark.slow)],
    ids=["exact", "quantized", "gloo"],
)
def test_memory_that_a_transport_keeps_is_predicted_and_counted(transport: str, zero: dict[str, Any]) -> None:
    for answers in run_ranks(4, staging, transport, zero):
        for triple, found in zip(TRIPLES, answers, strict=True):
            measured, predicted = found["staging"]
            # The slower the network, the more sums are on their way: those of one unit, or of all four.
            assert 0 < measured <= predicted <= 6 * measured, (triple, answers)
            measured, predicted = found["quantized"]
            assert (measured > 0) == bool(zero)
            assert measured <= predicted <= 4 * measured, (triple, answers)
