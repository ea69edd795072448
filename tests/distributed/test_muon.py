"""Optimizers that see whole matrices give the same numbers however the states are partitioned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import WIDTH, TinyLM
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Trained,
    assert_same_bits,
    check_every_stage,
    ordinary_loop,
    train_at,
)
from zeroengine.config.optimizers import MuonParams
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon_groups import build_muon

STEEP = {"lr": 0.01, "ns_dtype": "fp32", "adam_lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}


class Layer(nn.Module):
    """Matrices of several kinds: a fused projection, heads, stacked experts, a convolution, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH + 1) / 5)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.mix(x.mT).mT
        return x + self.down(F.gelu(sum(x @ expert for expert in self.experts)))


class Mixed(TinyLM):
    """Blocks of several kinds of matrices, a tied head, and a matrix that no forward uses."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    settings = MuonParams(**STEEP, matrices={"*.qkv.weight": 3, "*.out.weight": 4}).model_dump()
    return build_muon(model, [param for param in model.parameters() if param.requires_grad], settings)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2, eps=(None, 1e-3))


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    """torch's own Muon, whose iteration is in bf16, and an Adam that the fused kernel does not know."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "tok" not in name]
    rest = [p for p in model.parameters() if p not in set(matrices)]
    return MixedOptimizer(
        [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=3e-3, eps=1e-5, amsgrad=True)]
    )


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_muon_is_that_of_one_process_at_every_stage(micro_steps: int) -> None:
    """With clipping, tied, frozen and unused parameters. With accumulation the stages may add in another order."""
    task = Task(factory=Mixed, optimizer=muon, steps=4 // micro_steps, micro_steps=micro_steps)
    check_every_stage(task, stages=(1, 0) if micro_steps == 2 else (0, 2, 3), tolerance=1e-6)


@pytest.mark.parametrize("make", [adafactor, of_torch])
def test_an_optimizer_that_looks_at_whole_parameters_is_that_of_one_process_at_every_stage(make: Any) -> None:
    # torch's Muon rounds to bf16, where a difference in the last bit of a gradient may become one of bf16.
    check_every_stage(Task(optimizer=make), tolerance=1e-6 if make is adafactor else 1e-3)


DEGREES = [
    {"stage": 0},
    {"stage": 3},
    {"stage": 3, "degrees": {"parameters": 2, "gradients": 4, "optimizer": 4}},
    {"stage": 3, "degrees": {"parameters": 2, "gradients": 2, "optimizer": 2}},
    {
        "stage": 3,
        "degrees": {
            "parameters": 1,
            "gradients": 2,
            "optimizer": 2,
            "per_unit": [{"units": "blocks.0", "parameters": 4, "gradients": 4, "optimizer": 4}],
        },
    },
]


def train_with(task: Task, zeros: list[dict[str, Any]], transport: str) -> list[Trained]:
    return [
        train_at([zero["stage"]], task, ordinary_loop, {"zero_optimization": zero, "comm": {"transport": transport}})[0]
        for zero in zeros
    ]


@pytest.mark.parametrize(
    ("transport", "degrees"),
    [
        # Stage 0, degrees that differ from state to state, and those of one unit.
        pytest.param("shm", DEGREES[::2], id="shm-some"),
        *(pytest.param(name, DEGREES, id=f"{name}-all", marks=pytest.mark.slow) for name in ("shm", "gloo")),
    ],
)
def test_all_degrees_have_the_bits_of_stage_0(transport: str, degrees: list[dict[str, Any]]) -> None:
    tasks = (Task(factory=Mixed, optimizer=muon, steps=3), Task(optimizer=adafactor, steps=3))
    for task in tasks[: 2 if transport == "shm" else 1]:
        for found in run_ranks(4, train_with, task, degrees, transport):
            for zero, trained in zip(degrees, found, strict=True):
                assert_same_bits(found[0], trained, zero)
