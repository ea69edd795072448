"""DeepSpeed's schedules: the tables are what deepspeed 0.19.8 gives, update by update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroengine
from zeroengine.config import load
from zeroengine.optim.lr_schedules import make_scheduler


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
        [1e-3, 1e-3, 5.5e-3, 8.550178567e-3, 5.05e-3, 1.549821433e-3, 1e-4, 1e-4],
    ),
    ("LRRangeTest", RANGE, [1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3]),
    ("LRRangeTest", RANGE | {"lr_range_test_staircase": True}, [1e-3, 1e-3, 2e-3, 2e-3, 3e-3]),
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
    found = [group["lr"] for group in groups_over_steps(kind, len(rates), params)]
    assert found == pytest.approx(rates, rel=1e-6)


def test_one_cycle_moves_the_momentum_against_the_rate() -> None:
    groups = groups_over_steps("OneCycle", 8, CYCLE | {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9})
    assert [group["betas"][0] for group in groups] == pytest.approx(
        [0.9, 0.875, 0.85, 0.825, 0.8, 0.833333333, 0.866666667, 0.9]
    )
    assert {group["betas"][1] for group in groups} == {0.999}


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
