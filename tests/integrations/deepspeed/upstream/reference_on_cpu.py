"""Let upstream's tests make their references, of torch's own classes, on CPU.

They pass ``device_ids`` and ``output_device`` to DistributedDataParallel, which torch takes only for a model on a GPU,
and torch asks to leave both out on the CPU. They call ``torch.amp.GradScaler()`` without a device, which is CUDA's and
does nothing on the CPU. That is all that changes here. The ranks' forkserver imports this before the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class DistributedDataParallelOnCpu(DistributedDataParallel):
    """``DistributedDataParallel`` whose arguments name no device."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any):
        super().__init__(module, **options)


class GradScalerOnCpu(torch.amp.GradScaler):
    """``GradScaler`` of the CPU."""

    def __init__(self, **options: Any):
        super().__init__("cpu", **options)


if not torch.cuda.is_available():
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallelOnCpu  # type: ignore[misc]
    torch.amp.GradScaler = GradScalerOnCpu  # type: ignore[misc]
