"""Optimizers and learning-rate schedules of every kind, on shards."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Trained,
    assert_close,
    assert_same_bits,
    check_every_stage,
    make_engine,
    ordinary_loop,
    settings,
    start,
    train_plainly,
)
from zeroengine.optim.lion import Lion as ConfiguredLion

Make = Callable[[nn.Module], torch.optim.Optimizer]


def by_type(name: str, **hyperparameters: Any) -> Make:
    return functools.partial(_by_type, name, hyperparameters)


def _by_type(name: str, hyperparameters: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), **hyperparameters)


class Lion(torch.optim.Optimizer):
    """Somebody's own (arXiv 2302.06675), with a state that starts in the middle of a step."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    # sign() would turn a rounding difference into a whole step.
                    param.sub_(torch.tanh(1e3 * torch.lerp(param.grad, average, 0.9)), alpha=group["lr"])
                    average.lerp_(param.grad, 0.01)


class HalfStep(torch.optim.AdamW):
    """An Adam with a rule of its own, which the fused kernel does not know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [[param.clone() for param in group["params"]] for group in self.param_groups]
        super().step()
        for group, values in zip(self.param_groups, before, strict=True):
            for param, value in zip(group["params"], values, strict=True):
                param.lerp_(value, 0.5)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=1e-3)


def half_step(model: nn.Module) -> torch.optim.Optimizer:
    return HalfStep(model.parameters(), lr=3e-3, eps=1e-5)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": by_type("AdamW", lr=3e-3, eps=1e-5, betas=(0.8, 0.95), weight_decay=0.2),
    "Adam with L2": by_type("Adam", lr=3e-3, eps=1e-5, weight_decay=0.2),
    "Adam with decoupled decay": by_type("Adam", lr=3e-3, eps=1e-5, weight_decay=0.2, decoupled_weight_decay=True),
    "Adam that maximizes": by_type("AdamW", lr=1e-3, eps=1e-5, maximize=True),
    "AMSGrad": by_type("AdamW", lr=3e-3, eps=1e-5, amsgrad=True),
    "SGD with momentum": by_type("SGD", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD": by_type("SGD", lr=1e-2),
    "Adagrad": by_type("Adagrad", lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": by_type("RMSprop", lr=1e-3, eps=1e-4, momentum=0.5, centered=True),
    "NAdam": by_type("NAdam", lr=3e-3, eps=1e-5),
    "a class of one's own": lion,
    "a subclass of AdamW": half_step,
}


# What differs from these in options, or in arithmetic alone.
SLOW_OPTIMIZERS = (
    "Adam with L2",
    "Adam with decoupled decay",
    "Adam that maximizes",
    "SGD",
    "Adagrad",
    "RMSprop",
    "NAdam",
    "a class of one's own",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_OPTIMIZERS else ()) for name in OPTIMIZERS]
)
def test_any_element_wise_optimizer_runs_on_shards_as_in_torch(name: str) -> None:
    check_every_stage(Task(optimizer=OPTIMIZERS[name], steps=5))


def whole_parameter(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def test_at_stage_0_an_optimizer_may_look_at_whole_parameters() -> None:
    check_every_stage(Task(optimizer=whole_parameter), stages=(0,))


# -- who makes the optimizer --------------------------------------------------------------------------

ADAMW = {"lr": 3e-3, "eps": 1e-5, "betas": (0.8, 0.95), "weight_decay": 0.2}


def makers(stage: int) -> list[tuple[list[float], str]]:
    """The same optimizer as an instance, a callable, and a section of the configuration."""
    start()
    task = Task()
    given: list[Any] = [
        lambda model: torch.optim.AdamW(model.parameters(), **ADAMW),
        lambda model: lambda params: torch.optim.AdamW(params, **ADAMW),
        lambda model: functools.partial(torch.optim.AdamW, **ADAMW),
        lambda model: torch.optim.AdamW(model.named_parameters(), **ADAMW),
        lambda model: None,
    ]
    found = []
    for make in given:
        model = build(task.factory)
        named = {"optimizer": {"type": "AdamW", "params": ADAMW}}
        optimizer = make(model)
        engine = zeroengine.initialize(model, optimizer, settings(task, stage, **({} if optimizer else named)))
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        losses, _ = ordinary_loop(task, engine)
        found.append((losses, engine.optimizer.param_groups[0]["weight_decay"]))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_instance_callable_and_configuration_make_the_same_optimizer(stage: int) -> None:
    first, *others = run_ranks(2, makers, stage)[0]
    assert others == [first] * 4


class Untied(TinyLM):
    """Each parameter has one gradient of each rank, and two add to the same bits in either order: Lion takes signs."""

    def __init__(self) -> None:
        super().__init__(tied=False)


def named(kind: str, cls: Any, params: dict[str, Any], task: Task) -> tuple[dict[str, Any], Task]:
    """The configuration's section, and the task with what it stands for."""
    return {"type": kind, "params": params}, replace(task, optimizer=lambda model: cls(model.parameters(), **params))


UNCLIPPED = Task(factory=Untied, steps=5, clip=0.0)
NAMED = [
    named(
        "Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.1}, Task(steps=5)
    ),
    named("Lion", ConfiguredLion, {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}, UNCLIPPED),
    named("SGD", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, Task(steps=5)),
    named("torch.optim.RAdam", torch.optim.RAdam, {"lr": 3e-3, "eps": 1e-5, "betas": (0.8, 0.9)}, Task(steps=8)),
    named("torch.optim.AdamW", torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-5, "amsgrad": True}, Task(steps=5)),
    named("torch.optim.ASGD", torch.optim.ASGD, {"lr": 1e-2, "t0": 2}, Task(steps=5)),
    named("tests.distributed.test_optimizers.HalfStep", HalfStep, {"lr": 3e-3, "eps": 1e-5}, Task(steps=5)),
]


def by_name(numbers: Sequence[int]) -> list[list[Trained]]:
    """Each optimizer at two of the stages, in turn."""
    start()
    found: list[list[Trained]] = []
    for number in numbers:
        section, task = NAMED[number]
        found.append([])
        for stage in ((0, 3), (1, 2))[number % 2]:
            engine = zeroengine.initialize(build(task.factory), None, settings(task, stage, optimizer=section))
            losses, norms = ordinary_loop(task, engine)
            found[-1].append(Trained(losses, norms, engine.full_state_dict()))
            engine.close()
    return found


@pytest.mark.parametrize(
    "numbers",
    [range(0, len(NAMED), 3), pytest.param(range(len(NAMED)), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_optimizers_named_in_the_configuration_are_those_of_torch(numbers: Sequence[int]) -> None:
    ranks = run_ranks(2, by_name, numbers)
    for i, number in enumerate(numbers):
        section, task = NAMED[number]
        for first, second in (found[i] for found in ranks):
            assert_same_bits(first, second, section)
        assert_close([found[i][0] for found in ranks], train_plainly(task))


# -- groups -------------------------------------------------------------------------------------------


def grouped(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, and embeddings have a rate of their own: groups mix within each unit."""
    params = dict(model.named_parameters())
    tok = [params.pop("tok.weight")]
    matrices = [param for param in params.values() if param.dim() > 1]
    vectors = [param for param in params.values() if param.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.7, 0.9)},
        {"params": tok, "lr": 1e-3},
    ]
    return make(groups, lr=3e-3, eps=1e-5, weight_decay=0.1)


def change_groups(optimizer: torch.optim.Optimizer, step: int) -> None:
    matrices, vectors, tok = optimizer.param_groups
    matrices["weight_decay"] = 0.3 / (1 + step)
    vectors["betas"] = (0.7, 0.9 + 0.01 * step)
    tok["lr"] = 1e-3 * (step % 3)


GROUPED = [Task(optimizer=functools.partial(grouped, cls), steps=5) for cls in (torch.optim.AdamW, torch.optim.RAdam)]


def changing_groups(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        change_groups(engine.optimizer, step)
        loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


@pytest.mark.parametrize("task", GROUPED, ids=["AdamW", "RAdam"])
def test_groups_have_hyperparameters_of_their_own_that_may_change_between_steps(task: Task) -> None:
    steps = iter(range(task.steps))

    def changing(model: nn.Module) -> torch.optim.Optimizer:
        made = task.optimizer(model)
        made.register_step_pre_hook(lambda optimizer, *_: change_groups(optimizer, next(steps)))
        return made

    check_every_stage(task, loop=changing_groups, plain=train_plainly(replace(task, optimizer=changing)))


# -- schedules ----------------------------------------------------------------------------------------


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": rest}], lr=3e-3, eps=1e-5)


def plain_with_schedule(make: Callable[[torch.optim.Optimizer], Any]) -> Trained:
    """Plain PyTorch; the schedule steps after each update."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = two_rates(model)
        schedule = make(made)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    return train_plainly(Task(optimizer=optimizer, steps=6))


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return StepLR(optimizer, step_size=2, gamma=0.3)


def made_before(task: Task, stage: int) -> zeroengine.Engine:
    """The scheduler is over the optimizer that is passed in."""
    model = build(task.factory)
    optimizer = two_rates(model)
    return zeroengine.initialize(model, optimizer, settings(task, stage), lr_scheduler=step_lr(optimizer))


def made_by_callable(task: Task, stage: int) -> zeroengine.Engine:
    model = build(task.factory)
    return zeroengine.initialize(model, two_rates(model), settings(task, stage), lr_scheduler=step_lr)


def stepped_by_hand(task: Task, stage: int) -> zeroengine.Engine:
    """By the caller, as in any torch loop, over ``engine.optimizer``."""
    engine = make_engine(task, stage)
    schedule = step_lr(engine.optimizer)
    step = engine.step

    def both() -> bool:
        updated = step()
        schedule.step()
        return updated

    engine.step = both  # type: ignore[method-assign]
    return engine


def changed_by_hand(task: Task, stage: int) -> zeroengine.Engine:
    """No scheduler at all: rates are written into ``param_groups`` between steps."""
    engine = make_engine(task, stage)
    step = engine.step

    def change() -> bool:
        updated = step()
        for group, rate in zip(engine.optimizer.param_groups, (1e-3, 3e-3), strict=True):
            group["lr"] = rate * 0.3 ** (engine.global_steps // 2)
        return updated

    engine.step = change  # type: ignore[method-assign]
    return engine


MAKERS = [made_before, made_by_callable, stepped_by_hand, changed_by_hand]


def scheduled(stages: list[int]) -> list[tuple[list[float], list[float]]]:
    start()
    warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")  # before `optimizer.step`
    task = Task(optimizer=two_rates, steps=6)
    found = []
    for make in MAKERS:
        for stage in stages:
            engine = make(task, stage)
            losses, _ = ordinary_loop(task, engine)
            found.append((losses, [group["lr"] for group in engine.optimizer.param_groups]))
    return found


def test_schedules_drive_the_engine_whoever_makes_and_steps_them() -> None:
    ranks = run_ranks(2, scheduled, [0, 3])
    plain = plain_with_schedule(step_lr)
    for found in zip(*ranks, strict=True):
        means = [sum(losses) / 2 for losses in zip(*(losses for losses, _ in found), strict=True)]
        assert means == pytest.approx(plain.losses, rel=1e-5)
        assert found[0][1] == pytest.approx([1e-3 * 0.3**3, 3e-3 * 0.3**3])


def configured(scheduler: dict[str, Any], micro_steps: int) -> list[list[float]]:
    start()
    sections = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}, "scheduler": scheduler}
    engine = zeroengine.initialize(
        build(Task().factory), config=config(2, gradient_accumulation_steps=micro_steps, **sections)
    )
    assert engine.lr_scheduler is not None
    rates = [[group["lr"] for group in engine.optimizer.param_groups]]
    for step in range(4 * micro_steps):
        engine.backward(engine(*batch(step, engine.rank)))
        if engine.step():
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
    return rates


def test_the_schedule_of_the_configuration_steps_with_each_update() -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}
    for rates in run_ranks(2, configured, {"type": "WarmupLR", "params": params}, 2):
        assert [rate for (rate,) in rates] == pytest.approx([0, 0, 2.5e-4, 5e-4, 7.5e-4])


def skipped_schedule() -> list[float]:
    start()
    engine = make_engine(Task(), 2)
    engine.lr_scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    rates = []
    for step in range(4):
        loss = engine(*batch(step, engine.rank))
        engine.backward(loss * (float("inf") if step in (1, 2) else 1.0))
        bool(engine.step())  # on a GPU the schedule is taken back when somebody asks
        rates.append(engine.optimizer.param_groups[0]["lr"])
    return rates


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    assert run_ranks(2, skipped_schedule)[0] == pytest.approx([1.5e-3, 1.5e-3, 1.5e-3, 1e-3])
