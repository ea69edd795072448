"""Published memory of training runs, reproduced by the planner."""

from __future__ import annotations

import pytest

from zeroengine.config import load
from zeroengine.plan.model_facts import ModelFacts, from_numbers
from zeroengine.plan.state_bytes import STATES, Setting, predict_states

# ZeRO (arXiv 1910.02054), table 1: gigabytes of model states per device with Pos, Pos+g and Pos+g+p, which are stages 1
# to 3, by the number of ranks. Training is in fp16 with Adam.
ZERO_PAPER = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
# Layers and widths with about as many parameters, as in GPT-2 and GPT-3.
SHAPES = {7.5e9: (42, 3840), 128e9: (104, 10240), 1e12: (128, 25600)}


def decoder(params: float) -> ModelFacts:
    layers, width = SHAPES[params]
    return from_numbers(params, layers, width, vocab=50257, sequence=1024)


@pytest.mark.parametrize("params", ZERO_PAPER)
def test_model_states_are_those_of_the_table_in_the_zero_paper(params: float) -> None:
    model = decoder(params)
    config = {"fp16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    # How a model is cut depends on neither stage nor ranks.
    plans = model.plans(load(config).resolve(world_size=1))
    for world_size, row in ZERO_PAPER[params].items():
        for stage, gigabytes in enumerate(row, start=1):
            resolved = load({**config, "zero_optimization": {"stage": stage}}).resolve(world_size=world_size)
            setting = Setting(world_size, "cuda", "nccl" if world_size > 1 else "single")
            states = predict_states(plans, resolved, setting)
            predicted = sum(states.device[name] for name in STATES) / 1e9
            # The paper rounds, and its own formula (2 + 2 + 12) P decides between two roundings.
            assert predicted == pytest.approx(gigabytes, rel=0.01, abs=0.005), (world_size, stage)
