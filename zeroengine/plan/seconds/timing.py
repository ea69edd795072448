"""Time a function on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 7


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median seconds of ``run``, after one run that warms up."""
    seconds = []
    for index in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        if index:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
