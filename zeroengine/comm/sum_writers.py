"""The order of operations that write the same sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroengine.utils.work import Then, Work


class SumWriters:
    """The last operation that writes each sum of a channel.

    Works may be awaited in any order, but accumulations into one sum build on one another: each must finish after the
    operation that wrote this sum before it. Sums are told apart by their addresses.
    """

    def __init__(self) -> None:
        self._last: dict[int, Work] = {}

    def before(self, target: torch.Tensor, *, accumulate: bool) -> Work | None:
        """Return the work that must finish before the next operation writes ``target``; None if it overwrites it."""
        return self._last.get(target.data_ptr()) if accumulate else None

    def write(self, target: torch.Tensor, after: Work, write: Callable[[], object], *, accumulate: bool) -> Then:
        """Return, and record, a work: ``write`` changes ``target`` after ``after`` and what the sum builds on."""
        written = Then(after, write, after=self.before(target, accumulate=accumulate))
        self.record(target, written)
        return written

    def record(self, target: torch.Tensor, work: Work) -> None:
        """Record that ``work`` is the last operation so far that writes ``target``."""
        self._last[target.data_ptr()] = work
