"""Describe a run: what ``run.json`` and the loggers say of it."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.engine.peak_rates import peak_flops_of
from zeroengine.partition.cut import UnitPlan


def trainable_share(plans: Sequence[UnitPlan]) -> float:
    """Return the share of the parameters that is trained."""
    return sum(plan.numel for plan in plans if plan.trainable) / max(sum(plan.numel for plan in plans), 1)


def planned_steps(config: Config) -> int | None:
    """Return the number of updates of the whole run, if the configuration says so."""
    schedule = {} if config.scheduler is None else dict(config.scheduler.params)
    return config.monitor.total_steps or schedule.get("total_num_steps")


def describe_run(
    model: nn.Module, config: Config, group: Group, plans: Sequence[UnitPlan], hosts: Sequence[str]
) -> dict[str, Any]:
    """Return what ``run.json`` says, except for its format."""
    on_gpu = group.device.type == "cuda"
    # The package imports this file, so this file does not import the package.
    version = sys.modules["zeroengine"].__version__
    return {
        "zeroengine": version,
        "started": time.time(),
        "world_size": group.world_size,
        "hosts": list(hosts),
        "device": torch.cuda.get_device_properties(group.device).name if on_gpu else "cpu",
        "units": [plan.name for plan in plans],
        "model": {
            "class": type(model).__name__,
            "parameters": sum(plan.numel for plan in plans),
            "trainable": sum(plan.numel for plan in plans if plan.trainable),
        },
        "config": config.to_dict(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "zeroengine": version,
        },
        "peak_flops": peak_flops_of(config, group.device),
        "steps_planned": planned_steps(config),
    }
