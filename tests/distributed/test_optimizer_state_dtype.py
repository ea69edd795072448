"""`optimizer_state_dtype`: Adam's moments in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    adamw,
    assert_same_bits,
    check_every_stage,
    make_engine,
    ordinary_loop,
    settings,
    start,
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


def same_data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, 0)


def test_bf16_moments_give_the_same_bits_on_any_number_of_ranks() -> None:
    task = Task(data=same_data, clip=0.0)  # the sum of equal gradients is exact
    alone, *others = [run_ranks(n, train_at, (0, 3), task, ordinary_loop, BF16)[0] for n in (1, 2, 4)]
    for found in others:
        for trained in found:
            assert trained.losses == alone[0].losses
            assert all(torch.equal(value, alone[0].state[name]) for name, value in trained.state.items())


def moments_and_bytes(stage: int) -> list[tuple[set[torch.dtype], int]]:
    start()
    found = []
    for more in ({}, BF16):
        engine = make_engine(Task(), stage, **more)
        moments = [
            tensor for shard in engine.optimizer.shards for tensor in engine.optimizer.state_of(shard).tensors(shard)
        ]
        found.append(({moment.dtype for moment in moments}, engine.memory().optimizer))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_moments_take_half_the_memory(stage: int) -> None:
    for (fp32, fp32_bytes), (bf16, bf16_bytes) in run_ranks(2, moments_and_bytes, stage):
        assert (fp32, bf16) == ({torch.float32}, {torch.bfloat16})
        assert 2 * bf16_bytes == fp32_bytes > 0


def refused() -> list[str]:
    start()
    messages = []
    for make in (torch.optim.SGD, torch.optim.RAdam):
        model = build(Task().factory)
        with pytest.raises(zeroengine.ZeroEngineError) as error:
            zeroengine.initialize(model, make(model.parameters(), lr=1e-3), settings(Task(), 2, **BF16))
        messages.append(str(error.value))
    return messages


def test_bf16_moments_of_an_optimizer_other_than_adam_are_refused() -> None:
    for messages in run_ranks(2, refused):
        for message, name in zip(messages, ("SGD", "RAdam"), strict=True):
            assert f"only Adam and AdamW on fp32 masters keep moments in bf16, not {name}" in message
