"""Parameters that are frozen and unfrozen between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Trained,
    adamw,
    assert_close,
    assert_same_bits,
    make_engine,
    settings,
    start,
)
from zeroengine import ZeroEngineError

STAGES = (0, 1, 2, 3)
# In which steps what is frozen: a unit, parts of others, the first and the last parameter.
FROZEN = [(), ("blocks.1.", "norm.weight"), ("tok.", "blocks.0.up.", "blocks.1."), ("head.", "blocks.2.down.bias"), ()]
WATCHED = ("tok.weight", "blocks.0.up.bias", "blocks.1.down.weight", "norm.weight", "blocks.2.down.bias", "head.weight")


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4, momentum=0.9, weight_decay=0.1)


TASKS = [
    Task(factory=lambda: TinyLM(tied=False), optimizer=optimizer, steps=len(FROZEN), micro_steps=micro_steps)
    for optimizer, micro_steps in ((adamw, 2), (rmsprop, 1))
]


def freeze(model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN[step]))


def toggled(task: Task, stage: int, more: dict[str, Any]) -> tuple[Trained, list[str]]:
    """The training, and what moved while it was frozen."""
    engine = make_engine(task, stage, **more)
    losses, norms, moved = [], [], []
    params = dict(engine.module.named_parameters())
    for step in range(task.steps):
        freeze(engine.module, step)
        frozen = {name: param for name, param in params.items() if not param.requires_grad and name in WATCHED}
        before = {name: everything(param) for name, param in frozen.items()}
        for micro_step in range(step * task.micro_steps, (step + 1) * task.micro_steps):
            loss = engine(*task.data(micro_step, engine.rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.grad_norm)
        after = {name: everything(param) for name, param in frozen.items()}
        moved += [f"step {step}: {n}" for n in frozen if any(map(differ, before[n], after[n]))]
    return Trained(losses, norms, engine.full_state_dict()), moved


def everything(param: nn.Parameter) -> list[torch.Tensor]:
    found = [zeroengine.full_master(param)]
    for key in ("exp_avg", "exp_avg_sq", "square_avg", "momentum_buffer", "step"):
        try:
            found.append(zeroengine.full_optimizer_state(param, key))
        except ZeroEngineError as error:
            assert "keeps no state" in str(error)
    assert len(found) >= 3
    return found


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)


def toggled_at_every_stage(precision: dict[str, Any]) -> list[list[tuple[Trained, list[str]]]]:
    start()
    return [[toggled(task, stage, precision) for stage in STAGES] for task in TASKS]


def toggled_plainly(task: Task) -> Trained:
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for step in range(task.steps):
        freeze(model, step)
        optimizer.zero_grad()
        for micro_step in range(step * task.micro_steps, (step + 1) * task.micro_steps):
            mean = torch.stack([model(*task.data(micro_step, rank)) for rank in range(2)]).mean()
            (mean / task.micro_steps).backward()
            losses.append(mean.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def test_a_parameter_frozen_for_a_while_keeps_value_moments_and_step_count() -> None:
    ranks = run_ranks(2, toggled_at_every_stage, {})
    for i, task in enumerate(TASKS):
        plain = toggled_plainly(task)
        for stage in STAGES:
            assert_close([found[i][stage][0] for found in ranks], plain)
            for found in ranks:
                trained, moved = found[i][stage]
                assert moved == []
                assert_same_bits(found[i][0 if task.micro_steps == 1 else stage // 2 * 2][0], trained, (i, stage))


@pytest.mark.slow  # the test above in fp32
def test_a_parameter_frozen_for_a_while_keeps_its_state_in_bf16() -> None:
    for found in run_ranks(2, toggled_at_every_stage, {"bf16": {"enabled": True}}):
        for by_stage in found:
            for stage, (trained, moved) in enumerate(by_stage):
                assert moved == []
                assert_same_bits(by_stage[stage // 2 * 2][0], trained, stage)


def partly_frozen() -> nn.Module:
    model = TinyLM()
    model.blocks[1].requires_grad_(False)
    return model


def unfrozen_too_late() -> list[tuple[str, bool, Trained, Trained]]:
    start()
    found = []
    for stage in STAGES:
        trained = []
        for late in (False, True):
            task = Task(factory=partly_frozen, optimizer=trainable_only, steps=2)
            model = build(task.factory)
            engine = zeroengine.initialize(model, task.optimizer(model), settings(task, stage))
            losses, message, counted = [], "", True
            for step in range(task.steps):
                model.blocks[1].up.requires_grad_(late and step == 0)
                loss = engine(*task.data(step, engine.rank))
                engine.backward(loss)
                if late and step == 0:
                    with pytest.raises(ZeroEngineError) as error:
                        engine.step()
                    message, counted = str(error.value), (engine.micro_steps, engine.global_steps) == (0, 0)
                    model.blocks[1].up.requires_grad_(False)
                assert engine.step()
                losses.append(loss.item())
            trained.append(Trained(losses, [], engine.full_state_dict()))
        found.append((message, counted, *trained))
    return found


def trainable_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def test_a_parameter_frozen_at_initialize_cannot_be_trained_later() -> None:
    for ranks in run_ranks(2, unfrozen_too_late):
        for message, counted, plain, late in ranks:
            assert message == (
                "parameter blocks.1.up.weight was frozen at initialize() and requires a gradient now: it would not be "
                "trained, because it has no master and no moments. Make it trainable before initialize(); after that "
                "requires_grad may be switched off and on between steps."
            )
            assert counted
            assert_same_bits(late, plain)
