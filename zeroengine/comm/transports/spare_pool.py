"""Memory that operations receive into, which is kept for the next ones."""

from __future__ import annotations

import torch


class SparePool:
    """Private memory that is used again, by length and dtype.

    Attributes:
        nbytes: Bytes of all memory that was made. It is never freed.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory, 1-D."""
        idle = self._idle.setdefault((numel, dtype), [])
        if idle:
            return idle.pop()
        self.nbytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device="cpu")

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back what ``take`` has returned."""
        self._idle[tensor.numel(), tensor.dtype].append(tensor)
