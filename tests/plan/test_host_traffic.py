"""The bytes that cross between hosts of CPU ranks are predicted, to the byte."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.experts import SINGLE, ExpertsLM, Style, draw
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.plan.predicted import bytes_between_hosts
from zeroengine.comm.transports.gloo import GlooChannel
from zeroengine.memory.state_bytes import RankTopology

WORLD_SIZE, RANKS_PER_HOST, MICRO_STEPS = 4, 2, 2
NODE = {"parameters": "node", "gradients": "node"}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "node": {"degrees": {**NODE, "optimizer": "node"}},
    "node/node/all": {"degrees": {**NODE, "optimizer": "all"}},
    "node/all/all": {"degrees": {"parameters": "node", "gradients": "all"}},
    "hpZ": {"degrees": {"secondary_parameters": "node"}},
    "optimizer node": {"degrees": {"optimizer": "node"}},
    "quantized": {"stage": 3, **QUANTIZED},
    "hpZ, quantized": {"degrees": {"secondary_parameters": "node"}, **QUANTIZED},
    "node, quantized": {"degrees": {**NODE, "optimizer": "all"}, **QUANTIZED, "quantized_gradient_bits": 4},
}


def predicted_bytes(engine: Any) -> float:
    """What the planner says that a host sends in a step of an engine."""
    state_memory, transport = engine._parts.setup.state_memory, engine._parts.ranks.transport
    topology = RankTopology(WORLD_SIZE, "cpu", transport.name, RANKS_PER_HOST)
    return bytes_between_hosts(state_memory.plans, engine.config, topology, engine.config.micro_steps_in_mean)


def traffic(transport: str, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, float]]:
    """What this rank sends to other hosts in the second step of each case, and what the planner says for its host."""
    dist.init_process_group("gloo")
    imagine_hosts(RANKS_PER_HOST)
    sent: Counter[str] = Counter()
    exchange = GlooChannel.exchange

    def count(self: GlooChannel, kind: str, label: str, tensors: Any, *arguments: Any) -> Any:
        host = dist.get_rank() // RANKS_PER_HOST
        others = [tensor for rank, tensor in tensors.items() if rank // RANKS_PER_HOST != host]
        # The norm of a step travels in fp64.
        sent[kind] += sum(tensor.nbytes for tensor in others if tensor.dtype is not torch.float64)
        return exchange(self, kind, label, tensors, *arguments)

    found = []
    with mock.patch.object(GlooChannel, "exchange", count):
        for model, zero in cases:
            settings = config(0, gradient_accumulation_steps=MICRO_STEPS, comm={"transport": transport})
            settings["zero_optimization"] = {"param_persistence_threshold": 0, **zero}
            if model == "experts":
                settings["units"] = SINGLE
            module = build(partial(ExpertsLM, Style()) if model == "experts" else TinyLM)
            if model == "frozen":
                module.get_submodule("blocks.1").requires_grad_(False)
            engine = zeroengine.initialize(module, config=settings)
            for number in range(2 * MICRO_STEPS):
                if number == MICRO_STEPS:
                    sent.clear()
                # Each rank draws two of four experts.
                drawn = (draw(number, engine.rank, 1, 3),) if model == "experts" else ()
                engine.backward(engine(*batch(number, engine.rank, 1 if drawn else 2), *drawn))
                engine.step()
            found.append((sum(sent.values()), predicted_bytes(engine)))
            engine.close()
    return found


SHORT = ["stage 0", "node/all/all", "hpZ, quantized"]


@pytest.mark.parametrize(
    ("transport", "names", "of_experts"),
    [
        ("auto", SHORT, ["stage 3"]),
        ("gloo", ["stage 3"], []),
        pytest.param("auto", list(SETTINGS), ["node", "node/all/all", "hpZ"], marks=pytest.mark.slow),
        pytest.param("gloo", ["stage 0", "node", "quantized"], ["stage 3"], marks=pytest.mark.slow),
    ],
    ids=["two-level", "gloo", "two-level, all", "gloo, more"],
)
def test_bytes_between_hosts_are_predicted(transport: str, names: list[str], of_experts: list[str]) -> None:
    # The embedding is tied to the head. Of the experts, which are units of their own, a rank uses only some.
    cases = [("tiny", SETTINGS[name]) for name in names] + [("experts", SETTINGS[name]) for name in of_experts]
    cases += [("frozen", SETTINGS[name]) for name in names if name == "hpZ"]
    by_rank = run_ranks(WORLD_SIZE, traffic, transport, cases)
    for index, case in enumerate(cases):
        sent = sum(answers[index][0] for answers in by_rank[:RANKS_PER_HOST])
        assert sent == by_rank[0][index][1], case
