"""`scheduler`: names, defaults and ranges of DeepSpeed's five schedules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from zeroengine.config import load
from zeroengine.errors import ConfigError
from zeroengine.integrations.deepspeed.lr_schedules import SCHEDULES

REQUIRED = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 10},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "LRRangeTest": {},
}


def params(kind: str, **given: Any) -> dict[str, Any]:
    config = load({"scheduler": {"type": kind, "params": {**REQUIRED[kind], **given}}})
    assert config.scheduler is not None and config.scheduler.type == kind
    return config.scheduler.params


@pytest.mark.parametrize("kind", REQUIRED)
def test_defaults_are_those_of_deepspeeds_classes(kind: str) -> None:
    signature = inspect.signature(SCHEDULES[kind].__init__).parameters
    theirs = {name: item.default for name, item in signature.items() if name not in ("self", "optimizer")}
    theirs.pop("last_batch_iteration")
    assert params(kind) == {name: REQUIRED[kind].get(name, default) for name, default in theirs.items()}


def test_auto_takes_the_rate_of_the_optimizer() -> None:
    assert params("WarmupLR", warmup_max_lr="auto", warmup_num_steps="auto")["warmup_max_lr"] is None
    assert params("WarmupDecayLR", warmup_max_lr="auto")["warmup_max_lr"] is None


def test_auto_without_a_default_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r'found "auto", which has no default here; write the number of steps'):
        load({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}).resolve(world_size=1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Cosine"}, "write one of WarmupLR, WarmupDecayLR, .* or pass your own to initialize"),
        ({"type": "OneCycle"}, "scheduler.params: missing"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 1}}, "cycle_max_lr: missing; write the highest learning rate"),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
            'found "cosine" .* should be "log" or "linear"',
        ),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 3}},
            "total_num_steps: WarmupLR does not take it; WarmupDecayLR and WarmupCosineLR do",
        ),
        (
            {"type": "WarmupLR", "params": {"total_num_step": 3}},
            "total_num_step: unknown key. If total_num_steps is meant: WarmupLR does not take it; WarmupDecayLR and",
        ),
        ({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}, "greater than or equal to 1"),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": []}},
            r"found \[\] \(a list\); it should have at least 1",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, -1]}},
            r"warmup_max_lr.1: found -1 .*; it should be greater than or equal to 0",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": "fast"}},
            r'warmup_max_lr: found "fast" .*; it should be a valid',
        ),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": [1]}}, "less than 1"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 5}}, "refused; a schedule starts at 0"),
    ],
)
def test_a_wrong_scheduler(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"scheduler": section})


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 10, "warmup_max_lr": 0.1}),
        ("WarmupCosineLR", {"total_num_steps": 10}),
        ("WarmupLR", {}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    ],
)
def test_a_rate_that_rises_until_the_run_ends_gets_a_notice(kind: str, params: dict[str, Any]) -> None:
    config = {"gradient_clipping": 1.0, "monitor": {"total_steps": 10}}
    (notice,) = load(config | {"scheduler": {"type": kind, "params": params}}).notices
    assert "and the run has 10 steps: the learning rate rises until the end" in notice
    short = params | {"cycle_first_step_size" if kind == "OneCycle" else "warmup_num_steps": 9}
    assert load(config | {"scheduler": {"type": kind, "params": short}}).notices == ()


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "LRRangeTest"])
def test_a_rate_of_deepspeeds_that_replaces_those_of_the_groups_gets_a_notice(kind: str) -> None:
    name = {"WarmupDecayLR": "warmup_max_lr", "LRRangeTest": "lr_range_test_min_lr"}[kind]

    def notices(lr: float, **given: Any) -> list[str]:
        section = {"type": kind, "params": {**REQUIRED[kind], **given}}
        optimizer = {"type": "AdamW", "params": {"lr": lr}}
        return [n for n in load({"scheduler": section, "optimizer": optimizer}).notices if "not given: 0.001" in n]

    (notice,) = notices(0.1)
    assert f"scheduler.params.{name} is not given: 0.001 for every param group, as in DeepSpeed" in notice
    assert notices(0.001) == notices(0.1, **{name: 0.2}) == notices(0.1, **{name: [0.2, 0.3]}) == []
