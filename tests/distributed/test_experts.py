"""A mixture of experts whose ranks use different experts: no stall, and the losses of stage 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.nccl_over_gloo import use_nccl_transport
from tests.parametrization import in_turn

NUM_EXPERTS = 4
# What the units are: whole layers, or experts and the other parts of a layer.
LAYERS, SINGLE = ["layers.*"], ["layers.*.mixture.experts.*", "layers.*.norm", "layers.*.mixture.shared"]
UNITS = [pytest.param(LAYERS, id="layers"), pytest.param(SINGLE, id="experts")]
TRANSPORTS = ("shm", "gloo", "nccl")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*sizes) for sizes in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Two experts for each sample, which are drawn at random, and one for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.shared = Expert()

    def forward(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (drawn == number).any(-1).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, :, number, None])
        return out + self.shared(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.norm(x), drawn)  # type: ignore[no-any-return]


class ExpertsLM(nn.Module):
    checkpoint: Callable[..., Any] | None = None

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for number, layer in enumerate(self.layers):
            x = self.checkpoint(layer, x, drawn[number]) if self.checkpoint else layer(x, drawn[number])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def draw(step: int, rank: int, samples: int = 1, layers: int = 4) -> torch.Tensor:
    """Two different experts for each layer and sample: (layers, samples, 2)."""
    generator = torch.Generator().manual_seed(10**6 + 1000 * step + rank)
    return torch.rand(layers, samples, NUM_EXPERTS, generator=generator).topk(2, -1).indices


def train(transport: str, settings: dict[str, Any], steps: int) -> list[float]:
    """Each step's loss of this rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        if transport == "nccl":
            use_nccl_transport(patch)
            settings = settings | {"comm": {"timeout_seconds": 20}}
        else:
            settings = settings | {"comm": {"transport": transport, "timeout_seconds": 20}}
        model = build(ExpertsLM)
        model.checkpoint = settings.pop("checkpoint", None)
        engine = zeroengine.initialize(model, config=settings)
        losses = []
        for step in range(steps):
            if step % 3 == 2:
                with torch.no_grad():
                    engine(*batch(step, engine.rank, 1), draw(step, engine.rank))
            for micro in range(int(engine.config.gradient_accumulation_steps)):
                number = step * 7 + micro
                # Among many samples some use every expert, so this rank is complete where others are not.
                samples = 8 if (number + engine.rank) % 3 == 0 else 1
                loss = engine(*batch(number, engine.rank, samples), draw(number, engine.rank, samples))
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        engine.close()
    return losses


def compare(transport: str, units: list[str], steps: int, more: dict[str, Any]) -> list[tuple[float, float]]:
    """Pairs of losses, of stage 0 and of stage 3, that differ."""
    plain = {key: value for key, value in more.items() if key != "zero_optimization"}
    expected = train(transport, config(0, units=units, **plain), steps)
    # Without prefetching a gather waits for the ranks that come to it last.
    more = more | {"zero_optimization": {"prefetch_bucket_size": 0, **more.get("zero_optimization", {})}}
    losses = train(transport, config(3, units=units, **more), steps)
    # With accumulation stage 0 adds the micro-steps of a rank first. All-reduces of Gloo have an order of their own.
    tolerance = 1e-5 if transport == "nccl" or "gradient_accumulation_steps" in more else 0.0
    return [pair for pair in zip(expected, losses, strict=True) if abs(pair[0] - pair[1]) > tolerance]


def assert_same(*arguments: Any, world_size: int = 2, timeout: float = 90.0) -> None:
    assert run_ranks(world_size, compare, *arguments, timeout=timeout) == [[]] * world_size


@in_turn(("transport", "units"), TRANSPORTS, UNITS)
def test_ranks_that_use_different_experts_have_the_losses_of_stage_0(transport: str, units: list[str]) -> None:
    assert_same(transport, units, 8, {})


@pytest.mark.slow
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_differ_for_500_steps_without_a_stall(transport: str, units: list[str]) -> None:
    assert_same(transport, units, 500, {}, world_size=3, timeout=600)


OFFLOAD: dict[str, Any] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefetch": ("nccl", {"zero_optimization": {"prefetch_bucket_size": 10**6}}),
    "accumulation": ("gloo", {"gradient_accumulation_steps": 2}),
    "checkpointing": ("nccl", {"checkpoint": partial(checkpoint, use_reentrant=False)}),
    "reentrant checkpointing": ("gloo", {"checkpoint": partial(checkpoint, use_reentrant=True)}),
    "offload": ("nccl", {"zero_optimization": OFFLOAD}),
}


@in_turn(("variant", "units"), list(VARIANTS), UNITS[::-1])
def test_ranks_that_use_different_experts_may_train_in_other_ways(variant: str, units: list[str]) -> None:
    transport, more = VARIANTS[variant]
    assert_same(transport, units, 6, more)
