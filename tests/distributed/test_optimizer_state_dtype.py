"""`optimizer_state_dtype`: Adam's moments in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    adamw,
    assert_same_bits,
    check_every_stage,
    ordinary_loop,
    train_at,
)

BF16 = {"optimizer_state_dtype": "bf16"}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Segments of two rates, within each unit."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 1e-3}, {"params": params[1::2]}]
    return torch.optim.Adam(groups, lr=3e-3, eps=1e-5, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [adamw, two_groups])
def test_bf16_moments_give_the_same_bits_at_every_stage(optimizer: Any) -> None:
    task = Task(optimizer=optimizer, steps=6)
    exact = run_ranks(2, train_at, (2,), task, ordinary_loop, {})[0][0]
    for found in check_every_stage(task, tolerance=1e-2, **BF16):
        assert found.losses == pytest.approx(exact.losses, rel=1e-3)
        assert found.losses != exact.losses


def test_bf16_moments_give_the_same_bits_at_every_stage_in_mixed_precision() -> None:
    task, more = Task(steps=6), {"bf16": {"enabled": True}, **BF16}
    for found in run_ranks(2, train_at, STAGES, task, ordinary_loop, more):
        for trained in found[1:]:
            assert_same_bits(found[0], trained)
