"""bf16 compute over an fp32 master, and settings that change speed but no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import TinyLM
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Skipping, skipping_on_all_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    assert_same_bits,
    check_every_stage,
    make_engine,
    ordinary_loop,
    start,
    train_at,
)
from tests.emulated import a_real_gpu

BF16 = {"bf16": {"enabled": True}}


class Slope(nn.Module):
    """Its gradient is 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Scale(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean() * x


class TwoDtypes(nn.Module):
    """Two units of one shape, which their dtypes pad to different lengths, and one that fills a bucket before them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.wide, self.large = Scale(5000), Scale(5000), Scale(9000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.wide(self.low(x))).float().sum()


def input_of_step(step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.full((8,), 1.0 + step + rank),)


def by_name(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    more = {"weight_decay": 0.0} if name == "AdamW" else {}
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=1e-3, **more)


def small_steps(name: str) -> list[tuple[set[float], set[str]]]:
    start()
    found = []
    for stage in STAGES:
        engine = make_engine(Task(factory=Slope, optimizer=by_name(name), clip=0.0), stage, **BF16)
        for _ in range(20):
            engine.backward(engine(torch.ones(700)))
            engine.step()
        state = engine.full_state_dict()["weight"]
        found.append((set(state.float().tolist()), {str(state.dtype), str(engine.module.weight.dtype)}))
    return found


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_updates_below_bf16_s_resolution_add_up_in_the_master(name: str) -> None:
    """A thousandth is less than half of bf16's spacing below 1, so without a master nothing would move."""
    for found in run_ranks(2, small_steps, name):
        for values, dtypes in found:
            assert dtypes == {"torch.bfloat16"}
            (value,) = values
            assert value == pytest.approx(0.98, abs=2**-8)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize(
    ("task", "transport"),
    [
        pytest.param(Task(micro_steps=3), "shm", marks=pytest.mark.slow),
        (Task(micro_steps=3), "gloo"),
        pytest.param(Task(factory=Skipping, data=skipping_on_all_ranks, steps=5), "shm", marks=pytest.mark.slow),
        (Task(optimizer=sgd), "gloo"),
    ],
    ids=["accumulation", "accumulation over Gloo", "unused parameters", "an optimizer on shards"],
)
def test_bf16_stages_give_the_same_bits(task: Task, transport: str) -> None:
    more = BF16 | {"comm": {"transport": transport}}
    for found in run_ranks(2, train_at, (0, 1, 2, 3), task, ordinary_loop, more):
        assert_same_bits(found[0], found[1])
        assert_same_bits(found[2], found[3])
        if task.micro_steps == 1:
            assert_same_bits(found[0], found[2])


SETTINGS: dict[str, dict[str, Any]] = {
    "small units stay whole": {"stage3_param_persistence_threshold": 2000},
    "all units stay whole": {"stage3_param_persistence_threshold": 10**9},
    "no prefetching": {"overlap_comm": False},
    "little prefetching": {"prefetch_bucket_size": 4000},
    "little may be live": {"max_live_parameters": 1},
    "small buckets": {"reduce_bucket_size": 1},
    "one bucket": {"reduce_bucket_size": 10**9},
}


def with_settings(transport: str, every: int) -> dict[str, Any]:
    """The usual settings, and every so many of the others, with each of two cuts in turn or both."""
    found = {}
    for number, (name, zero) in enumerate(({"usual": {}} | SETTINGS).items()):
        for units in (None, ["blocks.*.up", "tok"]):
            if name != "usual" and (number + (units is None)) % every:
                continue
            more = {"zero_optimization": zero, "comm": {"transport": transport}, "units": units}
            found[name, units is None] = train_at((3,), Task(steps=3), ordinary_loop, more)[0]
    return found


@pytest.mark.parametrize(
    ("transport", "every"),
    [("shm", 2), *(pytest.param(transport, 1, marks=pytest.mark.slow) for transport in ("shm", "gloo"))],
)
def test_settings_that_cost_only_time_or_memory_change_no_bit(transport: str, every: int) -> None:
    if every == 1:
        check_every_stage(Task(steps=3), comm={"transport": transport})
    for found in run_ranks(2, with_settings, transport, every):
        for (name, ruled), trained in found.items():
            assert_same_bits(found["usual", ruled], trained, name)
        # Another cut adds the norm's squares in another order.
        assert found["usual", True].losses == pytest.approx(found["usual", False].losses, rel=1e-6)


def sparse() -> nn.Module:
    model = TinyLM(tied=False)
    model.tok.sparse = True
    return model


@a_real_gpu("sparse tensors")
def test_sparse_gradients_of_embeddings_are_as_good_as_dense_ones() -> None:
    expected = run_ranks(2, train_at, (0, 3), Task(factory=dense), ordinary_loop, {})
    for found, others in zip(
        run_ranks(2, train_at, (0, 3), Task(factory=sparse), ordinary_loop, {}), expected, strict=True
    ):
        for trained, other in zip(found, others, strict=True):
            assert_same_bits(trained, other)


def dense() -> nn.Module:
    return TinyLM(tied=False)


def test_units_of_two_dtypes_that_share_a_bucket_leave_no_padding_in_the_norm() -> None:
    task = Task(factory=TwoDtypes, data=input_of_step, clip=1e-2)
    more = BF16 | {
        "keep_fp32_modules": ["wide"],
        "communication_data_type": "fp32",
        "units": ["low", "wide", "large"],
        "comm": {"transport": "shm"},  # whose shards are whole pages, of more elements in bf16 than in fp32
    }
    for found in run_ranks(2, train_at, STAGES, task, ordinary_loop, more):
        for trained in found[1:]:
            assert_same_bits(found[0], trained)
