"""An engine for evaluation has neither gradients nor masters, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroengine
from zeroengine.config import load
from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.evaluation import make_evaluation_engine


@pytest.fixture(params=["bf16", "fp32"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    engine = make_evaluation_engine(model, load({"bf16": {"enabled": request.param == "bf16"}}))
    yield engine
    engine.release()


def test_a_model_that_is_evaluated_has_parameters_alone_and_they_stay_trainable(engine: Engine) -> None:
    memory = engine.memory()
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    assert all(param.requires_grad for param in engine.module.parameters())
    assert not any(unit.trainable or unit.has_master for unit in engine.units), memory
    assert torch.is_autocast_enabled("cpu") is False
    assert engine(torch.ones(1, 4)).shape == (1, 2)


def test_it_can_be_saved_and_read_and_cannot_be_trained(engine: Engine, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.save_checkpoint(tmp_path, "one")
    engine.load_checkpoint(tmp_path, "one")
    engine.save_weights(tmp_path / "weights")
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.backward(engine(torch.ones(1, 4)).sum())
    with pytest.raises(ZeroEngineError, match="all parameters are frozen"):
        engine.step()


def test_a_parameter_that_is_unfrozen_is_named_where_others_are_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    engine = zeroengine.initialize(model, torch.optim.SGD(model[1].parameters(), lr=0.1), {})
    engine.backward(engine(torch.ones(1, 4)).sum())
    model[0].bias.requires_grad_(True)
    for call in (engine.step, lambda: engine.save_checkpoint(tmp_path)):
        with pytest.raises(ZeroEngineError, match=r"parameter 0\.bias was frozen at initialize\(\) and requires"):
            call()
    model[0].requires_grad_(False)
    assert engine.step()
    engine.release()
