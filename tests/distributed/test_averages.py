"""An average of the weights that the optimizer keeps is that of torch's AveragedModel, at every stage."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start

DECAY = 0.9


class Averaging(torch.optim.AdamW):
    """The class in ``docs/averages.md``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("average", param.clone()).lerp_(param, 1 - DECAY)


def train(stage: int, **more: Any) -> dict[str, torch.Tensor]:
    """Train. Return the optimizer's average, after a comparison with ``AveragedModel`` where the weights are fp32."""
    rank = start()
    model = build(TinyLM)
    optimizer = functools.partial(Averaging, lr=1e-2)
    engine = zeroengine.initialize(model, optimizer, config(stage, optimizer=None, **more))
    with zeroengine.gathered(model):
        average_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(4):
        engine.backward(engine(*batch(step, rank)))
        engine.step()
        with zeroengine.gathered(model):
            average_model.update_parameters(model)
    averages = {name: zeroengine.full_optimizer_state(param, "average") for name, param in model.named_parameters()}
    if not more:
        for name, param in average_model.module.named_parameters():
            torch.testing.assert_close(param.detach(), averages[name])
    return averages


def compare() -> None:
    whole, *partitioned = (train(stage) for stage in (0, 2, 3))
    assert all(torch.equal(whole[name], averages[name]) for averages in partitioned for name in whole)
    # In bf16 the average is one of the fp32 master weights: close to that of fp32, and no bf16 value.
    low = train(3, bf16={"enabled": True})["norm.weight"]
    torch.testing.assert_close(low, whole["norm.weight"], rtol=0, atol=2e-2)
    assert (low != low.bfloat16()).any()


def test_an_average_that_the_optimizer_keeps_is_that_of_averaged_model_at_every_stage() -> None:
    run_ranks(2, compare)
