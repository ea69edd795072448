"""DeepSpeed's schedules: the tables are what deepspeed 0.19.8 gives, update by update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroengine
from zeroengine.config import load
from zeroengine.integrations.deepspeed.lr_schedules import SCHEDULES
from zeroengine.optim.lr_schedules import load_schedule_state, make_scheduler


def groups_over_steps(kind: str, steps: int, params: dict[str, Any], lr: float = 1e-2) -> list[dict[str, Any]]:
    """The hyperparameters of each update."""
    config = load({"scheduler": {"type": kind, "params": params}})
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make_scheduler(None, optimizer, config)
    found = []
    for _ in range(steps):
        found.append(dict(optimizer.param_groups[0]))
        optimizer.step()
        schedule.step()
    return found


WARMUP = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}
RANGE = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 4, "cycle_second_step_size": 3}
DECAY = {"decay_step_size": 2, "decay_lr_rate": 0.5}

TABLES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", WARMUP | {"warmup_type": "linear"}, [1e-4, 1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3, 1e-3]),
    ("WarmupLR", WARMUP | {"warmup_type": "linear", "warmup_num_steps": 1}, [1e-4, 1e-4, 5.5e-4, 1e-3, 1e-3]),
    ("WarmupLR", WARMUP, [1e-4, 1e-4, 5.5e-4, 8.13233125e-4, 1e-3, 1e-3]),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
        [0, 0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"warmup_min_ratio": 0.1, "warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0.01}
        | {"warmup_type": "linear"},
        [0, 1e-3, 5.5e-3, 8.550178567e-3, 5.05e-3, 1.549821433e-3, 1e-4, 1e-4],
    ),
    ("LRRangeTest", RANGE, [1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3]),
    ("LRRangeTest", RANGE | {"lr_range_test_staircase": True}, [1e-3, 1e-3, 2e-3, 2e-3, 3e-3]),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 0}, [1e-3, 2e-3, 3e-3, 4e-3, 1e-3, 1e-3]),
    ("OneCycle", CYCLE, [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 3.666666667e-3, 2.333333333e-3, 1e-3, 1e-3]),
    (
        "OneCycle",
        CYCLE | DECAY,
        [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 3.666666667e-3, 2.333333333e-3, 1e-3, 8e-4, 6.66666667e-4],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 4}
        | {"cycle_first_stair_count": 2, "cycle_second_stair_count": 2},
        [1e-3, 1e-3, 3e-3, 3e-3, 5e-3, 3e-3, 3e-3, 1e-3, 1e-3],
    ),
]


@pytest.mark.parametrize(("kind", "params", "rates"), TABLES)
def test_rates_are_deepspeeds(kind: str, params: dict[str, Any], rates: list[float]) -> None:
    groups = groups_over_steps(kind, len(rates), params)
    assert [group["lr"] for group in groups] == pytest.approx(rates, rel=1e-6)
    # DeepSpeed's class of this name, which a script makes and steps itself.
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    schedule = SCHEDULES[kind](optimizer, **params)
    for group in groups:
        found = optimizer.param_groups[0]
        assert found["lr"] == pytest.approx(group["lr"], rel=1e-12) and found["betas"] == group["betas"]
        schedule.step()


def test_one_cycle_moves_the_momentum_against_the_rate() -> None:
    groups = groups_over_steps("OneCycle", 8, CYCLE | {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9})
    assert [group["betas"][0] for group in groups] == pytest.approx(
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.833333333, 0.866666667, 0.9]
    )
    assert {group["betas"][1] for group in groups} == {0.999}


def rates_of_two_groups(kind: str, steps: int, params: dict[str, Any]) -> list[list[float]]:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-2, 1e-3)]
    optimizer = torch.optim.AdamW(groups)
    schedule = make_scheduler(None, optimizer, load({"scheduler": {"type": kind, "params": params}}))
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


WARMUPS = {"warmup_min_lr": [1e-4, 0.0], "warmup_max_lr": [1e-3, 2e-3], "warmup_type": "linear"}
CYCLES = {"cycle_min_lr": [1e-3, 2e-3], "cycle_max_lr": [5e-3, 6e-3], "cycle_first_step_size": 2}


@pytest.mark.parametrize(
    ("kind", "params", "first", "second"),
    [
        (
            "WarmupLR",
            WARMUPS | {"warmup_num_steps": 4},
            [1e-4, 1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3],
            [0, 0, 5e-4, 1e-3, 1.5e-3, 2e-3],
        ),
        (
            "WarmupLR",
            {"warmup_min_lr": 1e-4, "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 4},
            [1e-4, 1e-4, 5.5e-4, 8.132331253e-4, 1e-3],
            [1e-4, 1e-4, 1.05e-3, 1.605714376e-3, 2e-3],
        ),
        (
            "WarmupDecayLR",
            WARMUPS | {"warmup_num_steps": 2, "total_num_steps": 6},
            [1e-4, 1e-4, 5.5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4],
            [0, 0, 1e-3, 2e-3, 1.5e-3, 1e-3, 5e-4],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": [1e-3, 1e-2], "lr_range_test_step_size": 2},
            [1e-3, 1.5e-3, 2e-3, 2.5e-3],
            [1e-2, 1.5e-2, 2e-2, 2.5e-2],
        ),
        ("OneCycle", CYCLES, [1e-3, 3e-3, 5e-3, 3e-3, 1e-3], [2e-3, 4e-3, 6e-3, 4e-3, 2e-3]),
    ],
)
def test_lists_give_each_param_group_deepspeeds_rates(
    kind: str, params: dict[str, Any], first: list[float], second: list[float]
) -> None:
    rates = rates_of_two_groups(kind, len(first), params)
    assert [list(group) for group in zip(*rates, strict=True)] == [pytest.approx(first), pytest.approx(second)]


def test_one_cycle_moves_the_momentum_of_each_group_by_its_own_list() -> None:
    params = CYCLES | {"cycle_min_mom": [0.8, 0.5], "cycle_max_mom": [0.9, 0.7]}
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups)
    schedule = make_scheduler(None, optimizer, load({"scheduler": {"type": "OneCycle", "params": params}}))
    momenta = []
    for _ in range(3):
        momenta.append([group["betas"][0] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert momenta == [pytest.approx(pair) for pair in ([0.8, 0.5], [0.85, 0.6], [0.8, 0.5])]


def test_a_list_of_another_length_than_the_param_groups_is_refused() -> None:
    message = "scheduler.params.warmup_max_lr: found 3 values, and the optimizer has 2 param groups; write a list of 2"
    with pytest.raises(zeroengine.ConfigError, match=message):
        rates_of_two_groups("WarmupLR", 1, {"warmup_max_lr": [0.1, 0.2, 0.3]})


@pytest.mark.parametrize("lr", [0.0, 1e-5, 3.0])
def test_a_schedule_that_names_rates_does_not_depend_on_the_optimizers_own(lr: float) -> None:
    groups = groups_over_steps("WarmupLR", 6, WARMUP | {"warmup_type": "linear"}, lr=lr)
    assert [group["lr"] for group in groups] == pytest.approx([1e-4, 1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3])


def test_a_warm_up_with_an_auto_peak_ends_at_each_groups_own_rate() -> None:
    given = {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": "auto"}
    config = load({"scheduler": {"type": "WarmupLR", "params": given}})
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-2, 1e-3)]
    optimizer = torch.optim.AdamW(params)
    schedule = make_scheduler(None, optimizer, config)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 1e-3])


def test_an_object_is_kept_and_a_callable_or_class_is_called_with_the_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = load({})
    step_lr, constant_lr = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ConstantLR
    schedule = step_lr(optimizer, 1)
    assert make_scheduler(schedule, optimizer, config) is schedule
    assert isinstance(make_scheduler(lambda given: step_lr(given, 3), optimizer, config), step_lr)
    assert isinstance(make_scheduler(constant_lr, optimizer, config), constant_lr)
    assert make_scheduler(None, optimizer, config) is None


def test_an_object_that_is_no_scheduler_of_this_optimizer_is_refused() -> None:
    optimizer, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    wrong: dict[str, Any] = {
        "found 0.1": 0.1,
        "found None": lambda given: None,
        "drives another optimizer": torch.optim.lr_scheduler.StepLR(other, 1),
        "ReduceLROnPlateau needs a metric": torch.optim.lr_scheduler.ReduceLROnPlateau,
    }
    for message, scheduler in wrong.items():
        with pytest.raises(zeroengine.ZeroEngineError, match=message):
            make_scheduler(scheduler, optimizer, load({}))


@pytest.mark.parametrize(
    ("kind", "params"),
    [("WarmupLR", {"warmup_num_steps": 10}), ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2})],
)
@pytest.mark.parametrize("saved_by_deepspeeds_class", [True, False])
def test_a_state_loads_into_deepspeeds_class_and_into_the_configurations_schedule(
    kind: str, params: dict[str, Any], saved_by_deepspeeds_class: bool
) -> None:
    def make(is_deepspeeds: bool) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        config = load({"scheduler": {"type": kind, "params": params}})
        return optimizer, SCHEDULES[kind](optimizer, **params) if is_deepspeeds else make_scheduler(
            None, optimizer, config
        )

    (optimizer, schedule), (other, loaded) = make(saved_by_deepspeeds_class), make(not saved_by_deepspeeds_class)
    for number in range(7):
        if number == 3:
            load_schedule_state(loaded, schedule.state_dict())
        for taking_steps in (optimizer, other)[: 1 if number < 3 else 2]:
            taking_steps.step()
        schedule.step()
        if number >= 3:
            loaded.step()
            assert other.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
