"""Checkpoints to and from plain torch Distributed Checkpoint, with no code of ours on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroengine
from tests.checkpoint.test_matrix import train, whole_state
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, adamw, make_engine, start
from tests.emulated import cpu_alone

KEYS = ("exp_avg", "exp_avg_sq", "step")


def untied() -> nn.Module:
    return TinyLM(tied=False)


def sharded(seed: int, factory: Any = untied) -> tuple[nn.Module, torch.optim.Optimizer]:
    start()
    model = build(factory, seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(*batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(root: Path, stage: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = make_engine(Task(factory=untied, clip=0.0), stage)
    train(engine, range(3))
    engine.save_checkpoint(root, "a")
    return whole_state(engine, KEYS), train(engine, range(3, 6))


def theirs_from_ours(root: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer = sharded(seed=3)
    plain_steps(model, optimizer, range(1))  # so that there is a state to load into
    state, optimizer_state = get_state_dict(model, optimizer)
    whole = {"model": state, "optimizer": optimizer_state}
    dcp.load(whole, checkpoint_id=root / "a")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    found = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found, plain_steps(model, optimizer, range(3, 6))


@cpu_alone("FSDP2 over Gloo")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ours_loads_into_fsdp2_with_plain_torch(stage: int, tmp_path: Path) -> None:
    expected, losses = run_ranks(2, ours, tmp_path, stage)[0]
    found, others = run_ranks(3, theirs_from_ours, tmp_path)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert others == pytest.approx(losses, rel=1e-5)


def theirs(root: Path, nested: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer = sharded(seed=0)
    plain_steps(model, optimizer, range(3))
    state, optimizer_state = get_state_dict(model, optimizer)
    whole: dict[str, Any] = {"model": state, "optim": optimizer_state}
    dcp.save({"app": whole} if nested else whole, checkpoint_id=root)
    found = {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}
    return found, plain_steps(model, optimizer, range(3, 6))


def ours_from_theirs(root: Path) -> list[tuple[dict[str, torch.Tensor], int, list[float]]]:
    results = []
    for stage in range(4):
        engine = make_engine(Task(factory=untied, clip=0.0), stage)
        engine.load_checkpoint(root)
        found = {name: zeroengine.full_master(param) for name, param in engine.module.named_parameters()}
        results.append((found, engine.global_steps, train(engine, range(3, 6))))
        engine.close()
    return results


@cpu_alone("FSDP2 over Gloo")
@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fsdp2_s_loads_here(nested: bool, tmp_path: Path) -> None:
    expected, losses = run_ranks(2, theirs, tmp_path, nested)[0]
    for found, steps, others in run_ranks(3, ours_from_theirs, tmp_path)[0]:
        assert steps == 3
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert others == pytest.approx(losses, rel=1e-5)
