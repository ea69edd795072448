"""Checkpoints of FSDP2 load into engines, and those of engines into FSDP2, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import zeroengine
from tests.distributed.models import batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.emulated import cpu_alone
from tests.integrations.fsdp.scripts import BF16, sharded, untied
from zeroengine.integrations.fsdp import config_of_policies

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
Values = dict[str, torch.Tensor]


def step_of_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(*batch(step, torch.distributed.get_rank()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step_of_engine(engine: zeroengine.Engine, step: int) -> float:
    loss = engine(*batch(step, engine.rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


def values_of_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    values = {}
    for name, param in model.named_parameters():
        values[name] = param.full_tensor().detach().clone()
        for key in MOMENTS:
            value = optimizer.state[param][key]
            values[f"{name} {key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return values


def values_of_engine(engine: zeroengine.Engine) -> Values:
    values = {}
    for name, param in engine.module.named_parameters():
        values[name] = zeroengine.full_master(param)
        for key in MOMENTS:
            value = zeroengine.full_optimizer_state(param, key)
            # The engine keeps one step count per parameter, which plain PyTorch has as a tensor.
            values[f"{name} {key}"] = torch.as_tensor(value).to(torch.float32).reshape(()) if key == "step" else value
    return values


def engine_at(stage: int, low: bool, seed: int = 7) -> zeroengine.Engine:
    start()
    model = build(untied, seed)
    config = config_of_policies(mp_policy=BF16 if low else None)
    config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 0}
    return zeroengine.initialize(model, adamw(model), config)


def compare(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def from_fsdp2(folder: Path, low: bool) -> list[tuple[int, list[float], list[float]]]:
    """Save by FSDP2, load at each stage, and return the next losses of both."""
    start()
    model = sharded({"mp_policy": BF16} if low else {})
    optimizer = adamw(model)
    for step in range(3):
        step_of_fsdp2(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = values_of_fsdp2(model, optimizer)
    losses = [step_of_fsdp2(model, optimizer, step) for step in range(3, 6)]
    results = []
    for stage in range(4):
        engine = engine_at(stage, low)
        engine.load_checkpoint(folder)
        compare(values_of_engine(engine), expected)
        results.append((engine.global_steps, losses, [step_of_engine(engine, step) for step in range(3, 6)]))
        engine.close()
    return results


def to_fsdp2(folder: Path, low: bool) -> list[tuple[int, list[float], list[float]]]:
    """Save at each stage, load by FSDP2, and return the next losses of both."""
    start()
    results = []
    for stage in range(4):
        engine = engine_at(stage, low, seed=0)
        for step in range(3):
            step_of_engine(engine, step)
        engine.save_checkpoint(folder, tag=f"stage{stage}")
        expected = values_of_engine(engine)
        losses = [step_of_engine(engine, step) for step in range(3, 6)]
        engine.close()
        model = sharded({"mp_policy": BF16} if low else {}, seed=7)
        optimizer = adamw(model)
        # This makes the optimizer's state, too, so that there is something to load into.
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / f"stage{stage}")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        compare(values_of_fsdp2(model, optimizer), expected)
        results.append((3, losses, [step_of_fsdp2(model, optimizer, step) for step in range(3, 6)]))
    return results


@cpu_alone("FSDP2 over Gloo")
@pytest.mark.slow  # test_interop goes both ways between FSDP2 and stages 0 and 3
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("direction", [from_fsdp2, to_fsdp2])
def test_checkpoints_go_both_ways_at_every_stage(direction: Any, low: bool, tmp_path: Path) -> None:
    for results in run_ranks(2, direction, tmp_path, low):
        assert len(results) == 4
        for steps, losses, others in results:
            assert steps == 3
            assert others == pytest.approx(losses, abs=5e-3 if low else 1e-6)


def functions_of_torch(stage: int) -> dict[str, str]:
    """On two ranks: use torch's functions for state dicts on the engine's model, as a script that moved may do."""
    engine = engine_at(stage, low=False)
    step_of_engine(engine, 0)
    expected = engine.full_state_dict()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with zeroengine.gathered(engine.module):
        state = get_model_state_dict(engine.module, options=full)
        # Rank 0 alone gets this state dict.
        assert len(state) == (len(expected) if engine.rank == 0 else 0)
        assert all(torch.equal(state[name], expected[name]) for name in state)
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: get_model_state_dict(engine.module, options=full),
        "get optimizer": lambda: get_optimizer_state_dict(engine.module, engine.optimizer),
        "set": lambda: set_model_state_dict(engine.module, expected, options=full),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            call()
            outcomes[name] = ""
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    engine.close()
    return outcomes


@pytest.mark.slow  # test_interop goes both ways; distributed/test_state_dict has the models' own
@cpu_alone("FSDP2 over Gloo")
def test_state_dicts_of_torch_are_right_or_errors() -> None:
    whole, partitioned = (run_ranks(2, functions_of_torch, stage)[0] for stage in (2, 3))
    assert whole["get"] == whole["set"] == ""
    # torch makes the state of an optimizer that has none by a step with gradients of its own.
    assert whole["get optimizer"].startswith("ZeroEngineError")
    for outcome in partitioned.values():
        assert "zeroengine.gathered(" in outcome
