"""An engine for evaluation has neither gradients nor masters, and leaves the model as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroengine
from zeroengine.config import load
from zeroengine.engine.engine import Engine
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.integrations.evaluation import KEYS_OF_TRAINED_MODEL, make_evaluation_engine


@pytest.fixture(params=["bf16", "fp32"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    config = load({"bf16": {"enabled": request.param == "bf16"}})
    engine = make_evaluation_engine(model, config, KEYS_OF_TRAINED_MODEL)
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


@pytest.mark.parametrize(
    "override", ["bf16.enabled=true", "optimizer.params.lr=0.001", "train_batch_size=8", "ema.decay=0.9"]
)
def test_overrides_of_the_launcher_are_not_applied_again(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROENGINE_OVERRIDES", json.dumps([override]))
    config = load({"optimizer": {"type": "AdamW"}}).with_manual_accumulation()
    engine = make_evaluation_engine(nn.Linear(2, 2), config, KEYS_OF_TRAINED_MODEL)
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    engine.release()


def test_a_model_of_another_class_is_not_tiled() -> None:
    config = load({"tiling": {"loss": True}, "units": ["0"]})
    model = nn.Sequential(nn.Linear(2, 2))
    make_evaluation_engine(model, config, ("units",)).release()
    with pytest.raises(ConfigError, match=r"tiling\.loss needs"):
        make_evaluation_engine(model, config, KEYS_OF_TRAINED_MODEL)


def test_weights_that_never_change_are_their_own_average(engine: Engine) -> None:
    before = engine(torch.ones(1, 4))
    with engine.average_weights():
        assert torch.equal(engine(torch.ones(1, 4)), before)
