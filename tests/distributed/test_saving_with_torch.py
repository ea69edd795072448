"""Saving a model that has an engine with torch.save, pickle and safetensors, as programs without one do."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine import ReleasedParameterError

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "autocast": {"torch_autocast": {"enabled": True}}}


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def save_whole(stage: int, precision: str, folder: str) -> None:
    rank = start()
    engine = zeroengine.initialize(build(lambda: TinyLM(tied=False)), None, config(stage, **PRECISIONS[precision]))
    take_steps(engine, range(2))
    model = engine.module
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def assert_same(state: Any) -> None:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())

    loaded = torch.load(io.BytesIO(saved(model)), weights_only=False)
    assert_same(loaded.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(*batch(0, 0)), model(*batch(0, 0)))
        assert torch.equal(copy.deepcopy(model)(*batch(0, 0)), model(*batch(0, 0)))
    loaded(*batch(0, 0)).backward()
    # A parameter in a file is torch's own: a program without zeroengine reads it.
    for keep_vars in (False, True):
        assert_same(torch.load(io.BytesIO(saved(model.state_dict(keep_vars=keep_vars))), weights_only=True))
    weight = model.blocks[0].up.weight
    assert torch.equal(pickle.loads(pickle.dumps(weight)), weight)
    assert not vars(torch.load(io.BytesIO(saved(weight))))
    assert len(saved(weight)) < weight.nbytes + 4096
    # Tensors that share memory are left out or refused by safetensors.
    path = Path(folder) / f"{rank}.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    assert_same(safetensors.torch.load_file(path))
    assert take_steps(engine, range(2, 3))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(0, "fp32", marks=pytest.mark.slow),
        (1, "bf16"),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        (2, "autocast"),
    ],
    ids=lambda value: str(value),
)
def test_whole_parameters_can_be_saved_by_any_means(stage: int, precision: str, tmp_path: Path) -> None:
    run_ranks(2, save_whole, stage, precision, str(tmp_path))


def save_partitioned() -> list[str]:
    start()
    engine = zeroengine.initialize(build(TinyLM), None, config(3))
    take_steps(engine, range(1))
    model = engine.module
    messages = []
    for attempt in (
        lambda: saved(model),
        lambda: saved(model.state_dict()),
        lambda: saved(model.state_dict(keep_vars=True)),
        lambda: pickle.dumps(model.head.weight),
        lambda: copy.deepcopy(model),
        lambda: safetensors.torch.save_file(dict(model.named_parameters()), "never"),
    ):
        with pytest.raises(ReleasedParameterError) as error:
            attempt()
        messages.append(str(error.value))
    with zeroengine.gathered(model):
        assert torch.load(io.BytesIO(saved(model)), weights_only=False)(*batch(0, 0)).isfinite()
    assert take_steps(engine, range(1, 2))
    return messages


def test_partitioned_parameters_are_never_saved_as_nan() -> None:
    for messages in run_ranks(2, save_partitioned):
        for message in messages:
            assert "zeroengine.gathered(module_or_params)" in message and "engine.full_state_dict()" in message
