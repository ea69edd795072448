"""Several optimizers in one run: what the caller still does with each of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zeroengine
from zeroengine import MixedOptimizer, Muon, ZeroEngineError

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def train(kind: str) -> tuple[list[float], list[float]]:
    """The losses of some steps and the last rates, under plain PyTorch or the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    muon = Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02, ns_dtype="fp32")
    adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)
    own = [LambdaLR(muon, lambda step: 1 / (1 + step)), LambdaLR(adam, lambda step: 0.5**step)]
    engine, forward, given = None, model, MixedOptimizer([muon, adam]) if kind == "joint" else [muon, adam]
    if kind != "plain":
        # The engine steps a schedule that it is given.
        schedule = own.pop(0) if kind == "given a schedule" else None
        engine = forward = zeroengine.initialize(model, given, CONFIG, lr_scheduler=schedule)
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for optimizer in (muon, adam):
            optimizer.zero_grad()
        loss = forward(x).square().mean()
        losses.append(loss.item())
        if engine is None:
            loss.backward()
            muon.step()
            adam.step()
        else:
            engine.backward(loss)
            with pytest.raises(ZeroEngineError, match=r"one optimizer of several: .* Write engine.step\(\)"):
                muon.step()
            given.step() if kind == "joint" else engine.step()  # type: ignore[attr-defined]
        for scheduler in own:
            scheduler.step()
    if engine is not None:
        engine.close()
        before = model[0].weight.clone()
        muon.zero_grad()
        model(x).sum().backward()
        muon.step()
        assert not torch.equal(model[0].weight, before), "after the engine it is an ordinary optimizer"
    return losses, [optimizer.param_groups[0]["lr"] for optimizer in (muon, adam)]


def test_members_leave_the_step_to_the_engine_and_their_schedules_drive_it() -> None:
    with warnings.catch_warnings():
        # torch warns of a schedule whose optimizer has not stepped.
        warnings.simplefilter("error")
        losses, rates = train("plain")
        for kind in ("list", "joint", "given a schedule"):
            found = train(kind)
            assert found[0] == pytest.approx(losses, rel=1e-6) and found[1] == rates, kind


def test_a_member_may_itself_have_members() -> None:
    weights: list[Any] = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    inner = MixedOptimizer([Muon(weights[:1])])
    outer = MixedOptimizer([inner, torch.optim.SGD(weights[1:], lr=0.1)])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    outer.step()
    assert not any(torch.equal(weight, torch.ones_like(weight)) for weight in weights)
    assert [group["algorithm"] for group in outer.param_groups] == ["Muon", "SGD"]
