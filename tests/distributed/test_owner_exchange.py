"""Matrices travel between shards and owners without a loss, however many rounds there are and whatever their dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from zeroengine.partition import owners

ADAFACTOR = {"type": "torch.optim.Adafactor", "params": {"lr": 0.1}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "ns_dtype": "fp32"}}


class TwoDtypes(nn.Module):
    """Units of fp32 and of fp64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.wide = TinyLM(), nn.Linear(5, 7).double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.body(ids, labels) + self.wide(self.wide.weight.new_ones(2, 5) / 3).pow(2).mean()


def losses() -> dict[str, list[str]]:
    """On a rank: the losses at each stage, by optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        # Each unit is a round of its own.
        patch.setattr(owners, "MATRICES_PER_ROUND", 0)
        patch.setattr(owners, "NUMEL_PER_ROUND", 0)
        for optimizer, stages in ((ADAFACTOR, (0, 1, 3)), (MUON, (0, 2))):
            for stage in stages:
                zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
                config: dict[str, Any] = {"zero_optimization": zero, "optimizer": optimizer}
                engine = zeroengine.initialize(build(TwoDtypes), config=config)
                for step in range(3):
                    loss = engine(*batch(step, dist.get_rank()))
                    engine.backward(loss)
                    engine.step()
                found.setdefault(str(optimizer["type"]), []).append(loss.item().hex())
                engine.close()
    return found


def test_many_rounds_in_one_memory_give_the_losses_of_stage_0() -> None:
    for by_optimizer in run_ranks(3, losses):
        for of_stages in by_optimizer.values():
            assert len(set(of_stages)) == 1, by_optimizer
