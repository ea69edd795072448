"""Functions that ``module:function`` names in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1 << 16, 1 << 16) for _ in range(4)))


def with_batch() -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), lambda samples: torch.zeros(samples, 4)


def reads_a_value() -> nn.Module:
    raise RuntimeError("no data here")


def allocates() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.detach().numpy()
    return model


def no_model() -> str:
    return "model"
