"""A DeepSpeed script, which knows nothing of zeroengine: it trains a step, and reports what it imported."""

from __future__ import annotations

import importlib.metadata

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from tests.integrations.environments import report

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
before = model.weight.detach().clone()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(2, 4)).square().mean())
engine.step()
with GatheredParameters(list(model.parameters())):
    moved = (model.weight - before).abs().max().item()
try:
    import deepspeed.moe.sharded_moe

    message = ""
except ImportError as error:
    message = str(error)
report({"version": importlib.metadata.version("deepspeed"), "moved": moved, "message": message})
