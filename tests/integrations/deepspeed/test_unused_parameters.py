"""``"ignore_unused_parameters": false``: parameters without a gradient are an error, as in DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        return (self.second(hidden) if both else hidden).sum()


def check() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 2, "ignore_unused_parameters": False},
    }
    engine, *_ = deepspeed.initialize(model=HalfUsed(), config=config)
    # One micro-step of a step is enough to use a parameter.
    for both in (True, False, False, False):
        engine.backward(engine(torch.ones(2, 4), both))
        if engine.micro_steps < 3:
            engine.step()
    with pytest.raises(AssertionError, match=r"second\.weight, second\.bias.*\"ignore_unused_parameters\": true"):
        engine.step()
    assert engine.global_steps == 1


def test_a_step_with_a_parameter_without_gradient_is_an_error() -> None:
    run_ranks(1, check)
