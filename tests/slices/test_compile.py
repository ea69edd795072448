"""torch.compile of blocks whose layers are split over ranks, at the stages at which their parameters stay."""

from __future__ import annotations

import functools

import pytest
import torch

import zeroengine
from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, adamw, settings, start, take_steps
from tests.emulated import cpu_alone
from tests.slices.split_models import small_lm, split

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

STEPS = 3


def train(stage: int, compiles: bool) -> list[float]:
    torch._dynamo.reset()
    model = build(functools.partial(split, small_lm, 2))
    optimizer = adamw(model)
    if compiles:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    engine = zeroengine.initialize(model, optimizer, settings(Task(), stage))
    try:
        return take_steps(engine, range(STEPS), share=engine.sample_group)
    finally:
        engine.close()


def compare(stages: tuple[int, ...]) -> str:
    """On one rank: compare with eager at these stages, and return the error at stage 3."""
    start()
    for stage in stages:
        assert train(stage, True) == train(stage, False)
    with pytest.raises(Exception) as caught:
        train(3, True)
    return str(caught.value)


@pytest.mark.parametrize("stages", [(), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_compiled_blocks_train_as_in_eager_where_parameters_stay_and_are_refused_by_name_elsewhere(
    stages: tuple[int, ...],
) -> None:
    for message in run_ranks(4, compare, stages):
        assert "torch.compile works with layers that are split over ranks (DTensor) at stages 0 to 2" in message
