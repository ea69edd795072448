"""Describe a run: what ``run.json`` and the loggers say of it, and the peak rate of a GPU by its name, for the MFU."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.config.loading import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from zeroengine.partition.cut import UnitPlan
from zeroengine.utils.gpu_data_sheets import DATA_SHEETS, data_sheets_of_gpu, words_of_gpu

# Variants with these words in their names have other peaks than the GPU of the data sheet.
VARIANTS = {"pcie", "nvl", "laptop", "max"}


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
        "command": _command(),
        "units": [plan.name for plan in plans],
        "model": {
            "class": type(model).__name__,
            "parameters": sum(plan.numel for plan in plans),
            "trainable": sum(plan.numel for plan in plans if plan.trainable),
        },
        "config": config.to_dict(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "zeroengine": version},
        "peak_flops": peak_flops_of(config, group.device),
        "steps_planned": planned_steps(config),
    }


def _command() -> dict[str, Any]:
    """Return how this process was started, for zero-replay: the script and its arguments, and where."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    target = sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return {
        "words": [*target, *sys.argv[1:]],
        "folder": os.getcwd(),
        "config": os.environ.get(CONFIG_VARIABLE),
        "overrides": json.loads(os.environ.get(OVERRIDES_VARIABLE, "[]")),
    }


def peak_flops_of(config: Config, device: torch.device) -> float | None:
    """Return the peak rate of one rank in FLOP/s in the dtype that it computes in; None if it is not known."""
    if config.monitor.peak_flops is not None or device.type != "cuda":
        return config.monitor.peak_flops
    # TF32 has a peak of its own, and which products use it depends on the model.
    if config.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        return None
    return peak_flops_by_name(torch.cuda.get_device_properties(device).name, config.precision)


def peak_flops_by_name(gpu: str, dtype: str) -> float | None:
    """Return the peak of the data sheet of a GPU in FLOP/s.

    Args:
        gpu: The name that CUDA reports, such as "NVIDIA H100 80GB HBM3".
        dtype: "fp32", "bf16" or "fp16".
    """
    names = data_sheets_of_gpu(gpu)
    if not names or words_of_gpu(gpu) & VARIANTS:
        return None
    # The size of the memory does not change the peak.
    return DATA_SHEETS[names[0]].tflops[dtype] * 1e12
