"""The peak rate of a GPU by its name, for the MFU (model FLOPs utilization)."""

from __future__ import annotations

import torch

from zeroengine.config import Config
from zeroengine.plan.seconds.machine_presets import DATA_SHEETS, presets_of_gpu, words_of_gpu

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
    presets = presets_of_gpu(gpu)
    if not presets or words_of_gpu(gpu) & VARIANTS:
        return None
    # The size of the memory does not change the peak.
    return DATA_SHEETS[presets[0]].tflops[dtype] * 1e12
