"""Where no compiler was found torch's own kernels serve, over Gloo, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zeroengine
from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Trained,
    assert_close,
    assert_same_bits,
    ordinary_loop,
    settings,
    train_at,
    train_plainly,
)
from zeroengine.ops import _library


def without_library(task: Task, more: dict[str, Any]) -> tuple[list[Trained], str]:
    _library.PATH = Path("nowhere")
    found = train_at((0, 1, 2, 3), task, ordinary_loop, more)
    model = build(task.factory)
    engine = zeroengine.initialize(model, task.optimizer(model), settings(task, 1))
    return found, engine._parts.ranks.transport.name


def test_without_the_compiled_library_training_gives_the_same_numbers() -> None:
    task = Task()
    ranks = run_ranks(2, without_library, task, {})
    for found, transport in ranks:
        assert transport == "gloo"
        for stage in (1, 2, 3):
            assert_same_bits(found[0], found[stage], f"stage {stage}")
    assert_close([found[0] for found, _ in ranks], train_plainly(task))


@pytest.mark.slow
def test_without_the_compiled_library_bf16_is_close_to_the_library() -> None:
    task, more = Task(), {"bf16": {"enabled": True}}
    with_library = run_ranks(2, train_at, (0, 1, 2, 3), task, ordinary_loop, more)
    for (found, _), others in zip(run_ranks(2, without_library, task, more), with_library, strict=True):
        for stage in (1, 2, 3):
            assert_same_bits(found[0], found[stage], f"stage {stage}")
        assert found[0].losses == pytest.approx(others[0].losses, rel=1e-3)
