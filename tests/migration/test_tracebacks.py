"""The traceback of an error about the user's code ends in the user's code."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import build, config


def files_of(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.engine: list[zeroengine.Engine] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.engine:
            self.engine[0].set_gradient_accumulation_boundary(True)
        return self.linear(x).sum()


def diverge() -> None:
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        raise zeroengine.DivergenceError("rank 0 lost its peers (Connection closed by peer)") from error


class Diverging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda *call: diverge())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def test_where_ranks_diverge_the_traceback_has_the_callers_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROENGINE_FULL_TRACEBACK")
    engine = zeroengine.initialize(build(Diverging), config=config(0))
    with pytest.raises(zeroengine.DivergenceError) as diverged:
        engine(torch.zeros(2, 4))
    assert diverged.value.__cause__ is None and "contextlib.py" not in files_of(diverged.value)
    assert files_of(diverged.value)[-1] == "test_tracebacks.py"
    engine.close()


def test_a_traceback_ends_in_the_caller_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROENGINE_FULL_TRACEBACK")
    with pytest.raises(zeroengine.ConfigError) as wrong_key:
        zeroengine.initialize(build(Careless), config=config(0, gradient_cliping=1.0))
    assert files_of(wrong_key.value) == ["test_tracebacks.py", "messages.py"]
    model = build(Careless)
    engine = zeroengine.initialize(model, config=config(0))
    with pytest.raises(zeroengine.ZeroEngineError) as no_backward:
        engine.step()
    assert "accumulation.py" not in files_of(no_backward.value)
    monkeypatch.setenv("ZEROENGINE_FULL_TRACEBACK", "1")
    with pytest.raises(zeroengine.ZeroEngineError) as no_backward:
        engine.step()
    assert files_of(no_backward.value)[-1] == "accumulation.py"
    engine.close()
