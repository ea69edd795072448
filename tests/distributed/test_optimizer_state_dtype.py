"""`optimizer_state_dtype`: Adam's moments in bf16, and what is read and written of those in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    adamw,
    assert_same_bits,
    check_every_stage,
    ordinary_loop,
    start,
    train_at,
)
from zeroengine import full_master, full_optimizer_state, set_full_optimizer_state
from zeroengine.integrations.deepspeed.optimizer import LocalStateOptimizer
from zeroengine.integrations.deepspeed.parameters import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_local_optimizer_state,
)

BF16 = {"optimizer_state_dtype": "bf16"}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Segments of two rates, within each unit."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 1e-3}, {"params": params[1::2]}]
    return torch.optim.Adam(groups, lr=3e-3, eps=1e-5, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [pytest.param(adamw, marks=pytest.mark.slow), two_groups])
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


class ScalesMoments(torch.optim.AdamW):
    """An optimizer with a method of its own, which writes the state in place."""

    def scale_moments(self, factor: float) -> None:
        for state in self.state.values():
            state["exp_avg"].mul_(factor)


def values_in_8_bits(folder: str) -> None:
    """Each way to read or write moments of 8 bits, which are fp32 values to whoever does."""
    start()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 97), nn.Linear(97, 3))
    config = {"optimizer_state_dtype": "int8", "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    engine = zeroengine.initialize(model, ScalesMoments(model.parameters()), config)
    inputs = torch.randn(2, 65)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    large, small = model[0].weight, model[1].weight

    def read() -> dict[str, torch.Tensor]:
        params, keys = {"large": large, "small": small}, ("exp_avg", "exp_avg_sq", "step")
        return {f"{n} {key}": full_optimizer_state(param, key) for n, param in params.items() for key in keys}

    before = read()
    # Masters are the parameters here, and the step has changed them by the moments.
    assert before["large exp_avg"].dtype is torch.float32 and before["large exp_avg"].unique().numel() > 1000
    engine.optimizer.scale_moments(2.0)
    doubled = {name: value * (2 if name.endswith("exp_avg") else 1) for name, value in before.items()}
    assert_values(read(), doubled)
    engine.offload_states(device="nvme", nvme_path=folder)
    engine.reload_states()
    assert_values(read(), doubled)
    # The codes of values that 8 bits have are exact.
    for key in ("exp_avg", "exp_avg_sq"):
        set_full_optimizer_state(large, key, before[f"large {key}"])
        set_full_optimizer_state(small, key, before[f"small {key}"])
    assert_values(read(), before)
    other = torch.rand_like(large)
    set_full_optimizer_state(large, "exp_avg", other)
    error = (full_optimizer_state(large, "exp_avg") - other).abs()
    assert 0 < error.max() < 0.02
    # Under the names of DeepSpeed.
    assert torch.equal(safe_get_full_optimizer_state(large, "exp_avg"), full_optimizer_state(large, "exp_avg"))
    local = safe_get_local_optimizer_state(large, "exp_avg_sq")
    assert local is not None and local.dtype is torch.float32
    safe_set_local_optimizer_state(large, 4 * local, "exp_avg_sq")
    assert torch.equal(full_optimizer_state(large, "exp_avg_sq"), 4 * before["large exp_avg_sq"])
    owned = LocalStateOptimizer(engine).state[large]
    assert torch.equal(owned["exp_avg_sq"].flatten(), 4 * local) and owned["step"].flatten().unique().tolist() == [1.0]
    engine.close()


def assert_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_moments_of_8_bits_are_read_and_written_as_fp32_values(tmp_path: Path) -> None:
    run_ranks(2, values_in_8_bits, str(tmp_path))


def test_momentum_that_is_written_before_the_first_step_counts() -> None:
    run_ranks(1, momentum_before_the_first_step)


def momentum_before_the_first_step() -> None:
    start()
    model = nn.Linear(4, 4)
    # Without a momentum the first step would not dampen its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, dampening=0.75)
    engine = zeroengine.initialize(model, optimizer, {"train_micro_batch_size_per_gpu": 2})
    set_full_optimizer_state(model.weight, "momentum_buffer", torch.full((4, 4), 2.0))
    before = full_master(model.weight)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    torch.testing.assert_close(full_master(model.weight), before - (0.5 * 2 + 0.25 * 2))
    engine.close()


def test_moments_of_8_bits_begin_with_the_initial_value_of_the_optimizer() -> None:
    run_ranks(1, initial_values_in_8_bits)


def initial_values_in_8_bits() -> None:
    start()
    model = nn.Linear(65, 97)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    config = {"optimizer_state_dtype": "int8", "train_micro_batch_size_per_gpu": 2}
    engine = zeroengine.initialize(model, optimizer, config)
    assert (full_optimizer_state(model.weight, "sum") == 0.5).all()
    engine.close()
