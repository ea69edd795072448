"""Copy a few numbers between host and device without making either wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class HostCopy:
    """The values of a small tensor at this point of the current stream, for the host to read later.

    On CUDA they are copied into pinned memory. On the CPU nothing is copied.

    Args:
        values: A tensor that must not be written afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            # A copy into ordinary memory would make the host wait for the stream, so the target is pinned.
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            # Reading waits for this event, and not for kernels that were issued after the copy.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[Any]:
        """Return the values in nested lists. Wait for the copy, and for nothing that was issued after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a 1-D tensor on ``device``, without waiting for the device.

    The source is pinned memory, which torch keeps until the copy is done.
    """
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
