"""What DeepSpeed's scripts get where they mix calls that exclude each other, and what they read of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks

WIDTH = 6


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}


ADAM = {"type": "Adam", "params": {"lr": 1e-3}}


def contexts() -> None:
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=build(), config=settings(2, optimizer=ADAM))
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        with pytest.raises(AssertionError, match="no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="nested"), engine.no_sync():
            pass
        # The boundary that is set inside ends with the context.
        engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync(), pytest.raises(AssertionError, match="nested"), engine.coalesce_grad_reduction():
        pass
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def forced_cpu_optimizer() -> None:
    from zeroengine.integrations.deepspeed.settings import ZeRORuntimeException

    deepspeed.init_distributed()
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    for forced, kind in ((True, deepspeed.ops.adam.DeepSpeedCPUAdam), (False, torch.optim.Adam)):
        model = build()
        config = settings(1, zero_optimization=offload, zero_force_ds_cpu_optimizer=forced)
        engine, *_ = deepspeed.initialize(model=model, optimizer=kind(model.parameters()), config=config)
        engine.destroy()
    model = build()
    config = settings(1, zero_optimization=offload, zero_force_ds_cpu_optimizer=True)
    with pytest.raises(ZeRORuntimeException, match="found Adam"):
        deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)


def moments_of_cpu_adam() -> None:
    deepspeed.init_distributed()
    for keys, dtype in (({}, torch.bfloat16), ({"optimizer_state_dtype": "fp32"}, torch.float32)):
        model = build()
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
        engine, view, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(1, **keys))
        assert {state["exp_avg"].dtype for state in view.state.values()} == {dtype}
        engine.destroy()


def run_on_one_rank() -> None:
    contexts()
    forced_cpu_optimizer()
    moments_of_cpu_adam()


def test_calls_that_exclude_each_other_are_errors_of_deepspeeds_classes() -> None:
    run_ranks(1, run_on_one_rank)


def norms_of_groups() -> None:
    deepspeed.init_distributed()
    model = build()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear])
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=settings(3, optimizer=ADAM, gradient_clipping=0.0)
    )
    assert list(optimizer.leaf_parameters) == [model[0], model[1]]
    engine.backward(engine(torch.full((1, WIDTH), 1.0 + dist.get_rank())).square().sum())
    norms = optimizer._get_norm_groups()
    assert len(norms) == 2 and norms[0] != norms[1]
    engine.step()
    assert float(torch.stack(norms).norm()) == pytest.approx(engine.get_global_grad_norm().item(), rel=1e-6)
    engine.destroy()


def test_norms_of_groups_make_up_the_norm_of_the_gradient() -> None:
    run_ranks(2, norms_of_groups)


def test_a_skipped_step_leaves_the_norm_of_before() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    norms = []
    for factor in (1e6, 1.0, 1e6, 2.0, 1e6):
        engine.backward(engine(torch.ones(1, 2, dtype=torch.float16)).sum().float() * factor)
        engine.step()
        # Nobody has to read the norm for it to be kept.
        norms += [engine.get_global_grad_norm()] if factor != 2.0 else []
    assert engine.skipped_steps == 3
    # The gradient is 1 for each of the three parameters.
    assert norms == pytest.approx([0.0, 3**0.5, 3**0.5, 2 * 3**0.5], rel=1e-3)
    assert engine.optimizer._global_grad_norm == norms[-1]
    engine.destroy()
