"""The peak rate of a GPU by its name, for the MFU (model FLOPs utilization)."""

from __future__ import annotations

import re

import torch

from zeroengine.config import Config
from zeroengine.plan.machine_presets import DATA_SHEETS

# Variants with these words in their names have other peaks than the GPU of the data sheet.
VARIANTS = {"pcie", "nvl", "laptop", "max"}


def peak_flops_of(config: Config, device: torch.device) -> float | None:
    """Return the peak rate of one rank in FLOP/s in the dtype that it computes in; None if it is not known."""
    if config.monitor.peak_flops is not None or device.type != "cuda":
        return config.monitor.peak_flops
    low = config.low_precision or config.autocast_dtype
    # TF32 has a peak of its own, and which products use it depends on the model.
    if low is None and torch.backends.cuda.matmul.allow_tf32:
        return None
    names = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return peak_flops_by_name(torch.cuda.get_device_properties(device).name, names[low])


def peak_flops_by_name(gpu: str, dtype: str) -> float | None:
    """Return the peak of the data sheet of a GPU in FLOP/s.

    Args:
        gpu: The name that CUDA reports, such as "NVIDIA H100 80GB HBM3".
        dtype: "fp32", "bf16" or "fp16".
    """
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    if words & VARIANTS:
        return None
    # The memory size of a preset's name, such as that of "a100-80gb", does not change the peak.
    for name, sheet in DATA_SHEETS.items():
        if {word for word in name.split("-") if not word.endswith("gb")} <= words:
            return sheet.tflops[dtype] * 1e12
    return None
