"""How many functions the engine calls for a block and a step: host time, for which a GPU waits if blocks are small."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import Block, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw

SOURCES = str(Path(zeroengine.__file__).parent)


class Calls(NamedTuple):
    """Functions that are called: those of the engine, and all, in Python and in C, of torch and the model as well."""

    own: float
    all: float


# For a block at stage 3. Raise them only with a reason.
MOST_CALLS = {
    "training": Calls(356, 660),
    "adapters": Calls(498, 960),
    "evaluation": Calls(92, 202),
}


class Adapted(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) + self.up(self.down(x))
        return result


class AdaptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.up, self.down = Adapted(self.up), Adapted(self.down)  # type: ignore[assignment]


class AdaptedLM(TinyLM):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(blocks))


def calls_of_a_step(case: str, blocks: int) -> Calls:
    model = build(lambda: (AdaptedLM if case == "adapters" else TinyLM)(blocks=blocks))
    engine = zeroengine.initialize(model, adamw(model), config(3, optimizer=None))
    own = total = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal own, total
        own += event == "call" and frame.f_code.co_filename.startswith(SOURCES)
        total += event in ("call", "c_call")

    for step in range(4):
        if step == 3:
            sys.setprofile(count)
        if case == "evaluation":
            with torch.no_grad():
                engine(*batch(step, 0))
            continue
        engine.backward(engine(*batch(step, 0)))
        engine.step()
    sys.setprofile(None)
    engine.close()
    return Calls(own, total)


def calls_of_a_block() -> dict[str, Calls]:
    init_fake_group(64)
    found = {}
    for case in MOST_CALLS:
        few, many = calls_of_a_step(case, 2), calls_of_a_step(case, 8)
        found[case] = Calls(*((more - less) / 6 for less, more in zip(few, many, strict=True)))
    return found


@pytest.fixture(scope="module")
def calls() -> dict[str, Calls]:
    (found,) = run_ranks(1, calls_of_a_block)
    return found


@pytest.mark.parametrize("case", MOST_CALLS)
def test_the_engine_calls_few_functions_for_each_block(case: str, calls: dict[str, Calls]) -> None:
    assert calls[case].own <= MOST_CALLS[case].own
    assert calls[case].all <= MOST_CALLS[case].all
