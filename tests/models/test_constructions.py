"""The table of models that break others: the same bits at every stage, the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine

from ..distributed.models import build
from ..distributed.ranks import run_ranks
from ..distributed.training import Task, Trained, assert_close, assert_same_bits, make_engine, start
from .constructions import TABLE, Construction, loss_of

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, Any] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
HELD_OUT = 99


def train(engine: zeroengine.Engine, construction: Construction, steps: int) -> Trained:
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(engine(*construction.data(step, engine.rank)))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    if construction.evaluates:
        engine.eval()
        with torch.no_grad():
            losses.append(loss_of(engine(*construction.data(HELD_OUT, engine.rank))).item())
    engine.gatherer.settle()
    assert engine.memory().gathered == 0
    return Trained(losses, norms, engine.full_state_dict())


def train_all(names: Sequence[str], steps: int, more: dict[str, Any]) -> dict[str, list[Trained] | str]:
    """On one rank: each construction at every stage, or what went wrong."""
    start()
    found: dict[str, list[Trained] | str] = {}
    for name in names:
        construction = TABLE[name]
        low = "bf16" in more and construction.lowers_buffers
        given = more | ({"data_types": {"buffer_dtype": "bf16"}} if low else {})
        task = Task(construction.factory, construction.data, construction.optimizer)
        try:
            found[name] = []
            for stage in STAGES:
                engine = make_engine(task, stage, **copy.deepcopy(given))
                found[name].append(train(engine, construction, steps))  # type: ignore[union-attr]
                engine.close()
        except Exception:
            found[name] = f"stage {stage}: {traceback.format_exc()}"
    return found


def train_plainly(name: str, world_size: int, steps: int, low: torch.dtype | None = None) -> list[Trained]:
    """What each rank sees in plain data parallelism. ``low``: models compute in it, and an fp32 master is updated."""
    construction = TABLE[name]
    master = build(construction.factory)
    optimizer = construction.optimizer(master)
    models = [copy.deepcopy(master) for _ in range(world_size)]
    if low is not None:
        for model in models:
            lower(model, low, buffers=construction.lowers_buffers)
    wide = list(master.parameters())
    for param in wide:  # as where autocast is done by hand
        if param.dtype is torch.bfloat16 or (low is not None and param.is_floating_point()):
            param.data = param.data.float()

    def loss_at(step: int, rank: int) -> torch.Tensor:
        return loss_of(models[rank](*(lowered(x, low) for x in construction.data(step, rank))))

    losses: list[list[float]] = [[] for _ in models]
    norms = []
    for step in range(steps):
        for rank, model in enumerate(models):
            loss = loss_at(step, rank)
            loss.backward()
            losses[rank].append(loss.item())
            for own, param in zip(model.parameters(), wide, strict=True):
                if own.grad is not None:
                    grad = own.grad.to(param.dtype) / world_size
                    param.grad = grad if param.grad is None else param.grad + grad
                    own.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(wide, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for model in models:
                for own, param in zip(model.parameters(), wide, strict=True):
                    own.copy_(param)
    if construction.evaluates:
        for rank, model in enumerate(models):
            model.eval()
            with torch.no_grad():
                losses[rank].append(loss_at(HELD_OUT, rank).item())
    return [Trained(own, norms, model.state_dict()) for own, model in zip(losses, models, strict=True)]


def lower(model: nn.Module, low: torch.dtype, *, buffers: bool) -> None:
    """Parameters to ``low``, and buffers. Batch norm stays in fp32, as its running statistics do."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
            module.register_forward_hook(lambda module, args, output: output.to(low))
            continue
        for param in module.parameters(recurse=False):
            param.data = lowered(param.data, low)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = lowered(buffer, low if buffers else None)


def lowered(value: Any, low: torch.dtype | None) -> Any:
    floating = low is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(low) if floating else value


@functools.cache
def trained(world_size: int, steps: int, precision: str, transport: str) -> list[dict[str, list[Trained] | str]]:
    names = [name for name, c in TABLE.items() if c.in_fp32 or precision == "bf16" or world_size > 2]
    more = {"comm": {"transport": transport}} | PRECISIONS[precision]
    return run_ranks(world_size, train_all, names, steps, more, timeout=300)


def trained_on(ranks: list[dict[str, list[Trained] | str]], name: str) -> list[list[Trained]]:
    """Of each rank what it saw at each stage, which is the same bits."""
    for found in ranks:
        assert not isinstance(found[name], str), found[name]
        for stage, other in zip(STAGES, found[name], strict=True):
            assert_same_bits(found[name][0], other, f"stage {stage}")  # type: ignore[arg-type]
    return [found[name] for found in ranks]  # type: ignore[misc]


def check_close(ranks: list[list[Trained]], plain: list[Trained], name: str) -> None:
    for found, expected in zip(ranks, plain, strict=True):
        assert_close([found[0]], expected, TABLE[name].tolerance)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("name", [name for name, c in TABLE.items() if c.in_fp32])
def test_in_fp32(name: str, transport: str) -> None:
    check_close(trained_on(trained(2, 4, "fp32", transport), name), train_plainly(name, 2, 4), name)


@pytest.mark.parametrize("name", TABLE)
def test_on_4_ranks(name: str) -> None:
    check_close(trained_on(trained(4, 2, "fp32", "gloo"), name), train_plainly(name, 4, 2), name)


@pytest.mark.parametrize("name", TABLE)
def test_in_bf16(name: str) -> None:
    """The same bits at every stage; and a path that leaves that of plain PyTorch by less than 5 % of its length."""
    before = build(TABLE[name].factory).state_dict()
    for found, plain in zip(
        trained_on(trained(2, 4, "bf16", "gloo"), name), train_plainly(name, 2, 4, torch.bfloat16), strict=True
    ):
        assert found[0].losses == pytest.approx(plain.losses, rel=2e-2)
        off = moved = 0.0
        for key, value in plain.state.items():
            assert found[0].state[key].dtype is value.dtype, key
            if value.is_floating_point() or value.is_complex():
                off += (found[0].state[key] - value).abs().square().sum().item()
                moved += (before[key] - value).abs().square().sum().item()
            else:
                assert torch.equal(found[0].state[key], value), key
        assert off < 0.05**2 * moved
