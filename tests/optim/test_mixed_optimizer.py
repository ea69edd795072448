"""Several optimizers in one run: what the caller still does with each of them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
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


def test_it_is_saved_and_copied_with_the_states_of_its_members() -> None:
    def make() -> MixedOptimizer:
        weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
        return MixedOptimizer(
            [Muon(weights[:1], weight_decay=0.0, ns_dtype="fp32"), torch.optim.Adagrad(weights[1:], lr=0.1)]
        )

    def step(optimizer: MixedOptimizer) -> list[torch.Tensor]:
        weights = [param for group in optimizer.param_groups for param in group["params"]]
        for number, weight in enumerate(weights):
            weight.grad = torch.arange(weight.numel()).view_as(weight) + number - 1.0
        optimizer.step()
        return [weight.detach().clone() for weight in weights]

    first, second = make(), make()
    step(first)
    step(second)
    loaded, copied = make(), copy.deepcopy(first)
    loaded.load_state_dict(second.state_dict())
    moved = [after - 1 for after in step(loaded)]
    expected = step(first)
    assert all(map(torch.equal, step(copied), expected))
    for move, after, before in zip(moved, expected, step(make()), strict=True):
        torch.testing.assert_close(move, after - before)
    with pytest.raises(ZeroEngineError, match="add groups to one of the optimizers"):
        first.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_hooks_of_a_member_that_the_engine_would_not_call_are_refused() -> None:
    model = nn.Linear(4, 4)
    members = [Muon([model.weight]), torch.optim.SGD([model.bias])]
    members[0].register_step_post_hook(lambda *args: None)
    with pytest.raises(ZeroEngineError, match="the Muon among several optimizers has step hooks"):
        zeroengine.initialize(model, members, CONFIG)


def test_what_a_group_is_does_not_come_from_a_checkpoint(tmp_path: Path) -> None:
    for other, options in ((torch.optim.AdamW, {}), (torch.optim.Adam, {"ns_dtype": "fp32", "num_matrices": 2})):
        model = nn.Linear(4, 4)
        optimizers = [Muon([model.weight], **options), other([model.bias])]
        engine = zeroengine.initialize(model, optimizers, CONFIG)
        if options:
            engine.load_checkpoint(tmp_path)
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
        groups = [dict(group) for group in engine.optimizer.param_groups]
        assert groups[1]["algorithm"] == other.__name__ and groups[0].items() >= options.items()
        engine.save_checkpoint(tmp_path)
        engine.close()
