"""Let upstream's tests make their reference, torch's DistributedDataParallel, on CPU.

They pass ``device_ids`` and ``output_device``, which torch takes only for a model on a GPU. For a model on the CPU
torch asks to leave both out, and that is all that changes here. The ranks' forkserver imports this before the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class DistributedDataParallelOnCpu(DistributedDataParallel):
    """``DistributedDataParallel`` whose arguments name no device."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any):
        super().__init__(module, **options)


if not torch.cuda.is_available():
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallelOnCpu  # type: ignore[misc]
