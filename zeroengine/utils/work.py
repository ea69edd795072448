"""Define operations under way: collectives, copies, reads and writes.

Everything that starts such an operation returns a ``Work``, whether a network, a GPU or a disk carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch


class Work(Protocol):
    """An operation under way.

    Each method may be called any number of times, and the works of one channel, queue or store may be awaited in any
    order: an operation that builds on an earlier one waits for that one itself. The waiting methods belong to the
    thread that uses the result; ``done`` may be called from any thread. An operation that failed raises where it is
    awaited.
    """

    def wait_stream(self) -> None:
        """Order later kernels of the current CUDA stream behind the result, without blocking the host.

        Where no stream carries the operation, as on CPUs and disks, this is ``wait_host``.
        """

    def wait_host(self) -> None:
        """Return when the result is there for the host to use."""

    def done(self) -> bool:
        """Return whether ``wait_host`` would return, or raise, without waiting for anybody else."""


class Completed:
    """A ``Work`` that has nothing left to do."""

    def wait_stream(self) -> None:
        """Return at once."""

    def wait_host(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class Then:
    """A ``Work`` followed by what this rank has to do with its result.

    Args:
        work: The operation under way.
        finish: Called once, by the first wait, when later kernels are ordered behind ``work``. A wait for ``work``
            that fails leaves ``finish`` to the next one.
        after: A work that has to finish before ``finish`` runs, such as an earlier accumulation into the same memory.
        returns_work: Whether ``finish`` starts another operation and returns it. Each wait then waits for that one as
            well, until one wait succeeds.

    Attributes:
        work: The operation under way, also after ``finish`` has run.
    """

    def __init__(
        self, work: Work, finish: Callable[[], object], *, after: Work | None = None, returns_work: bool = False
    ) -> None:
        self.work, self._after, self._returns_work = work, after, returns_work
        self._finish: Callable[[], object] | None = finish
        self._second: Work | None = None

    @property
    def finished(self) -> bool:
        """Whether ``finish`` has run, and what it started has been waited for."""
        return self._finish is None and self._second is None

    def wait_stream(self) -> None:
        """Order the current stream behind ``work``, then run ``finish``."""
        if self._finish is not None:
            self.work.wait_stream()
            if self._after is not None:
                self._after.wait_stream()
                # A finished work would otherwise keep all those before it alive.
                self._after = None
            # The function is cleared before it runs, so that neither a wait within it nor one after an interrupted wait
            # runs it again: it may start a collective.
            finish, self._finish = self._finish, None
            result = finish()
            self._second = cast(Work, result) if self._returns_work else None
        if self._second is not None:
            self._second.wait_stream()
            self._second = None

    def wait_host(self) -> None:
        """Wait for ``work`` and for the kernels that ``finish`` launches."""
        self.wait_stream()
        synchronize_stream()

    def done(self) -> bool:
        """Return whether ``work`` is done. ``finish`` may still have to run, and may wait in turn."""
        return self.finished or self.work.done()


def synchronize_stream() -> None:
    """Block the host until the current CUDA stream has run everything so far. On CPUs nothing is outstanding."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
