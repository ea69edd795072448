"""What joins the model or the optimizer after initialize() is named, and never silently left out of training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import zeroengine
from tests.distributed.models import WIDTH, TinyLM, batch, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, adamw, make_engine, settings, start, take_steps
from zeroengine import ZeroEngineError


def untied() -> nn.Module:
    return TinyLM(tied=False)


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.down(x).mean()


def load_with_assign(model: Any) -> None:
    values = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict(values, assign=True)


def replace_head(model: Any) -> None:
    model.head = nn.Linear(WIDTH, 61, bias=False)


def add_adapter(model: Any) -> None:
    model.blocks[1].up = Adapter(model.blocks[1].up)


def attach_teacher(model: Any) -> None:
    model.teacher = nn.Linear(2, 2).requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "load_state_dict(assign=True)": (load_with_assign, "tok.weight (replaced), blocks.0.norm.weight (replaced)"),
    "a new head": (replace_head, "head.weight (replaced)."),
    "an adapter": (add_adapter, "blocks.1.up.down.weight (added)."),
    "a frozen module": (attach_teacher, "teacher.weight (added), teacher.bias (added)."),
}


def use_after_change(stage: int, folder: str) -> dict[str, dict[str, str]]:
    """The messages of what refuses a changed model."""
    start()
    found: dict[str, dict[str, str]] = {}
    for name, (change, _) in CHANGES.items():
        engine = make_engine(Task(factory=untied), stage)
        take_steps(engine, range(1))
        change(engine.module)
        uses: dict[str, Callable[[], object]] = {
            "step": lambda engine=engine: take_steps(engine, range(1, 2)),
            "save_checkpoint": lambda engine=engine: engine.save_checkpoint(folder),
            "save_weights": lambda engine=engine: engine.save_weights(folder),
            "load_weights": lambda engine=engine: engine.load_weights({}, strict=False),
            "full_state_dict": lambda engine=engine: engine.full_state_dict(),
        }
        found[name] = {}
        for use, run in uses.items():
            with pytest.raises(ZeroEngineError) as caught:
                run()
            found[name][use] = str(caught.value)
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_parameters_that_are_not_the_engine_s_are_named_wherever_they_would_be_left_out(
    stage: int, tmp_path: Path
) -> None:
    for found in run_ranks(2, use_after_change, stage, str(tmp_path)):
        for name, (_, parameters) in CHANGES.items():
            for use, message in found[name].items():
                assert parameters in message, (name, use)
                assert "before initialize()" in message and "zeroengine.gathered" in message
    assert not list(tmp_path.iterdir())


def train_an_adapter_of_a_frozen_model(stages: tuple[int, ...]) -> list[str]:
    """The messages of backwards that reach an added adapter alone."""
    start()
    messages = []
    for stage in stages:
        for by_engine in (True, False):
            engine = make_engine(Task(factory=untied), stage)
            take_steps(engine, range(1))
            engine.module.requires_grad_(False)
            attach_teacher(engine.module)
            loss = engine(*batch(1, engine.rank))
            assert not loss.requires_grad
            add_adapter(engine.module)
            loss = engine(*batch(1, engine.rank))
            with pytest.raises(ZeroEngineError) as caught:
                engine.backward(loss) if by_engine else loss.backward()
            messages.append(str(caught.value))
            # Without the adapter a backward that passes through the frozen model is no mistake.
            engine.module.blocks[1].up = engine.module.blocks[1].up.base
            inputs = torch.zeros(1, WIDTH, requires_grad=True)
            engine.module.norm(inputs).sum().backward()
            engine.close()
    return messages


def test_an_adapter_that_is_added_to_a_frozen_model_is_named_at_the_backward() -> None:
    for messages in run_ranks(2, train_an_adapter_of_a_frozen_model, STAGES):
        assert len(messages) == 2 * len(STAGES)
        for message in messages:
            assert "initialize(): blocks.1.up.down.weight (added)." in message
            assert "call engine.close(), and initialize() again" in message


def change_on_one_rank(folder: str) -> str:
    rank = start()
    engine = make_engine(Task(factory=untied), 2)
    take_steps(engine, range(1))
    head = engine.module.head
    if rank == 1:
        engine.module.head = nn.Linear(WIDTH, 61, bias=False)
    with pytest.raises(ZeroEngineError) as caught:
        engine.save_checkpoint(folder)
    engine.module.head = head
    take_steps(engine, range(1, 3))
    engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_change_on_one_rank_stops_a_save_on_all_and_can_be_undone(tmp_path: Path) -> None:
    for found in run_ranks(2, change_on_one_rank, str(tmp_path)):
        assert "head.weight (replaced)" in found
    assert (tmp_path / "step-3").exists()


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def reorganise(model: Any) -> None:
    """Other modules around the same parameters."""
    parametrize.register_parametrization(model.blocks[0].up, "weight", Same(), unsafe=True)
    model.blocks[1].down = Wrapper(model.blocks[1].down)
    model.blocks[2].up = torch.compile(model.blocks[2].up, backend="eager")
    model.also_the_norm = model.norm.weight


def train_around_changes(stage: int) -> tuple[list[float], list[float]]:
    start()
    losses = []
    for change in (None, reorganise):
        engine = make_engine(Task(factory=untied), stage)
        losses.append(take_steps(engine, range(1)))
        if change is not None:
            change(engine.module)
        losses[-1] += take_steps(engine, range(1, 4))
        engine.full_state_dict()
    del engine.module.norm.bias  # pruned
    engine.module.norm.bias = None
    take_steps(engine, range(4, 5))
    return losses[0], losses[1]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_same_parameters_in_other_modules_train_on(stage: int) -> None:
    for plain, changed in run_ranks(2, train_around_changes, stage):
        assert plain == changed


def change_groups() -> list[str]:
    start()
    messages = []

    def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.extra = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [model.extra]})
        del model.extra  # the model's own check is another

    def move(model: Any, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]["params"]
        group[0], group[1] = group[1], group[0]
        group.pop()

    def replace(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]

    for change in (add_group, move, replace):
        model = untied()
        optimizer = adamw(model)
        engine = zeroengine.initialize(model, optimizer, settings(Task(), 2))
        take_steps(engine, range(1))
        change(model, optimizer)
        with pytest.raises(ZeroEngineError) as caught:
            take_steps(engine, range(1, 2))
        messages.append(str(caught.value))
        engine.close()
    return messages


def test_groups_that_change_after_initialize_are_named() -> None:
    for added, moved, replaced in run_ranks(2, change_groups):
        assert re.search(r"AdamW changed after initialize\(\): .* \(a parameter of shape \(3,\)\)", added)
        assert "other parameters (head.weight)" in moved
        assert "another list of param_groups" in replaced and "engine.load_checkpoint()" in replaced


def test_groups_of_the_engine_s_own_optimizer_are_compared_too() -> None:
    model = untied()
    engine = zeroengine.initialize(model, config=config(0))
    engine.optimizer.param_groups[0]["lr"] = 1e-4  # may change
    engine.backward(engine(*batch(0, 0)))
    assert engine.step()
    engine.optimizer.param_groups = [{**group, "lr": 0.0} for group in engine.optimizer.param_groups]
    before = model.head.weight.detach().clone()
    engine.backward(engine(*batch(0, 0)))
    assert engine.step() and torch.equal(model.head.weight, before), "a list that is assigned is the one that counts"
    engine.optimizer.param_groups[0]["params"].pop()
    engine.backward(engine(*batch(0, 0)))
    with pytest.raises(ZeroEngineError, match=r"other parameters \(head.weight\)"):
        engine.step()
    engine.close()
