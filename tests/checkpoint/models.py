"""A model with everything that checkpoints get wrong elsewhere, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, build, config
from tests.distributed.training import start


class Model(TinyLM):
    """Tied embedding and head, a frozen block, a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        for param in self.blocks[1].parameters():
            param.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.shape[0]
        return super().forward(ids, labels)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: no decay of vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def engine_at(stage: int, *, optimizer: Any = adamw, seed: int = 0, **more: Any) -> zeroengine.Engine:
    start()
    model = build(Model, seed)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    settings = config(stage, optimizer=None, scheduler=scheduler, **more)
    return zeroengine.initialize(model, optimizer(model), settings)
