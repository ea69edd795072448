"""Gradients on their way into buckets, some at a time: on a GPU one launch serves them all."""

from __future__ import annotations

import torch

from zeroengine import ops

TOGETHER = 64  # tensors: what a launch takes
BYTES_TOGETHER = 1 << 24  # that gradients wait with at most, in memory that is theirs beside the bucket


class CastCopies:
    """Copies and additions that wait for more of their kind. The values are those of copies done one by one."""

    def __init__(self) -> None:
        self._pairs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
        self._targets: set[int] = set()
        self._nbytes = 0

    @staticmethod
    def takes(source: torch.Tensor, target: torch.Tensor) -> bool:
        return source.dtype in ops.DTYPE_CODES and target.dtype in ops.DTYPE_CODES

    def add(self, source: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> None:
        """``target`` will be ``source``, or its sum with it; ``source`` must not change any more."""
        if target.data_ptr() in self._targets:
            self.flush()
        self._pairs[accumulate].append((source, target))
        self._targets.add(target.data_ptr())
        self._nbytes += source.nbytes
        if len(self._targets) >= TOGETHER or self._nbytes >= BYTES_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Does what waits."""
        for accumulate, pairs in self._pairs.items():
            for dtype in {target.dtype for _, target in pairs}:
                sources, targets = zip(*(pair for pair in pairs if pair[1].dtype is dtype), strict=True)
                ops.cast_copy(sources, targets, accumulate=accumulate)
        self.forget()

    def forget(self) -> None:
        """Does nothing of it."""
        for pairs in self._pairs.values():
            pairs.clear()
        self._targets.clear()
        self._nbytes = 0
