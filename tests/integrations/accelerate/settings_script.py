"""Reports the errors of contradicting settings, and what is filled in. Run by the tests on one rank."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    TorchDynamoPlugin,
)
from torch import nn

from tests.integrations.accelerate.loops import Small, config, data, forget, loss_of, message
from tests.integrations.environments import report
from zeroengine import engine_of
from zeroengine.integrations.accelerate import ZeroAccelerator

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


def error(more: dict[str, Any], variables: dict[str, str] | None = None, **arguments: Any) -> str:
    forget()
    os.environ.update(variables or {})
    try:
        return message(lambda: ZeroAccelerator(zero_config=config(0, **more), **arguments))
    finally:
        for name in variables or {}:
            del os.environ[name]


def errors() -> dict[str, str]:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    return {
        "bf16 against fp16": error(FP16, mixed_precision="bf16"),
        "no against bf16": error(BF16, mixed_precision="no"),
        "bf16 switched off": error({"bf16": {"enabled": False}}, mixed_precision="bf16"),
        "fp8": error({}, mixed_precision="fp8"),
        "launched with fp16": error(BF16, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        "launched with nothing": error(BF16, {"ACCELERATE_MIXED_PRECISION": "no"}),
        "deepspeed": error({}, deepspeed_plugin=object()),
        "fsdp": error({}, fsdp_plugin=FullyShardedDataParallelPlugin()),
        "launched with fsdp": error({}, {"ACCELERATE_USE_FSDP": "true"}),
        "hook": error({}, kwargs_handlers=[hook]),
        "accumulation": error({"gradient_accumulation_steps": 4}, gradient_accumulation_steps=2),
        "scale": error(FP16, kwargs_handlers=[GradScalerKwargs(growth_factor=3.0)]),
        # What transformers.Trainer passes.
        "trainer": error(
            BF16,
            mixed_precision="bf16",
            deepspeed_plugin=None,
            fsdp_plugin=None,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            dynamo_plugin=TorchDynamoPlugin(backend=None),
        ),
    }


def filled() -> dict[str, Any]:
    forget()
    handler = GradScalerKwargs(init_scale=2.0**10, growth_interval=50)
    accelerator = ZeroAccelerator(
        zero_config=config(0, gradient_accumulation_steps=4), mixed_precision="fp16", kwargs_handlers=[handler]
    )
    section = accelerator.zero_config.fp16
    return {
        "fp16": [section.enabled, section.initial_scale_power, section.loss_scale_window, accelerator.mixed_precision],
        "steps": accelerator.gradient_accumulation_steps,
    }


def compiled() -> list[Any]:
    """Train a model that accelerate compiles, with a backend that needs no compiler."""
    forget()
    accelerator = ZeroAccelerator(zero_config=config(3), dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    plain = Small()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.03))
    losses = []
    for _ in range(2):
        loss = loss_of(model, data()[:4])
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    names = isinstance(model, nn.Module) and model is not plain and unwrapped is plain
    accelerator.free_memory(model)
    return [losses[1] < losses[0], names, engine_of(plain) is None]


report({"errors": errors(), "filled": filled(), "compiled": compiled()})
