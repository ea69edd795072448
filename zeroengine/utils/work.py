"""The handle of an operation under way: a collective, a copy, a read or a write.

Everything that starts such an operation returns a ``Work``, whether a network, a GPU or a disk carries it out. There
are two ways to wait for one: ``wait_stream`` makes only the current CUDA stream wait, and ``wait_host`` blocks the
host. On CPUs both block the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, cast

import torch


class Work(Protocol):
    """An operation under way.

    Each method may be called any number of times, and the works of one channel, queue or store may be awaited in any
    order: an operation that builds on an earlier one waits for that one itself. Only the thread that uses the result
    may wait; any thread may call ``done``. A failed operation raises its error in the methods that wait.
    """

    def wait_stream(self) -> None:
        """Order later kernels of the current CUDA stream behind the result, without blocking the host.

        Blocks the host, as ``wait_host`` does, if no stream carries the operation: on CPUs and disks.
        """

    def wait_host(self) -> None:
        """Block until the host can use the result."""

    def done(self) -> bool:
        """Return whether ``wait_host`` would return, or raise, without waiting."""


class Completed:
    """A ``Work`` that has nothing left to do."""

    def wait_stream(self) -> None:
        """Return at once."""

    def wait_host(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class Together:
    """Several works as one, which is over when all of them are, even if one fails.

    Args:
        works: The works.
        check: Called at the end of each wait. It may raise.
    """

    def __init__(self, works: Sequence[Work], check: Callable[[], None]) -> None:
        self._works, self._check = works, check

    def wait_stream(self) -> None:
        """Order the current stream behind all of them."""
        self._wait([work.wait_stream for work in self._works])

    def wait_host(self) -> None:
        """Wait for all of them."""
        self._wait([work.wait_host for work in self._works])

    def _wait(self, waits: Sequence[Callable[[], None]]) -> None:
        # All are called, the last one first, even if one raises.
        with ExitStack() as stack:
            for wait in (self._check, *waits):
                stack.callback(wait)

    def done(self) -> bool:
        """Return whether all of them are done."""
        return all(work.done() for work in self._works)


class Then:
    """A ``Work`` followed by a function of this rank that uses its result.

    Args:
        work: The operation under way.
        finish: Called once, by the first wait, after ``work.wait_stream()``. If that raises, the next wait calls it.
        after: A work that must finish before ``finish`` runs, such as an earlier accumulation into the same memory.
        returns_work: Whether ``finish`` starts another operation and returns it. Each wait then waits for that one as
            well, until one wait succeeds.

    Attributes:
        work: The first operation, even after ``finish`` has run.
    """

    def __init__(
        self, work: Work, finish: Callable[[], object], *, after: Work | None = None, returns_work: bool = False
    ) -> None:
        self.work, self._after, self._returns_work = work, after, returns_work
        self._finish: Callable[[], object] | None = finish
        self._second: Work | None = None

    @property
    def finished(self) -> bool:
        """Whether ``finish`` has run, and the operation that it started has been awaited."""
        return self._finish is None and self._second is None

    def wait_stream(self) -> None:
        """Order the current stream behind ``work``, then run ``finish``."""
        if self._finish is not None:
            self.work.wait_stream()
            if self._after is not None:
                self._after.wait_stream()
                # Otherwise each finished work would keep the previous one alive.
                self._after = None
            # The function is cleared before it runs, because it may start a collective: neither a wait inside it nor a
            # wait after an interrupted one may run it again.
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
        """Return whether ``work`` is done. ``finish`` may still have to run, and may itself wait."""
        return self.finished or self.work.done()


def current_stream() -> torch.cuda.Stream | None:
    """Return the current CUDA stream; None where the process has used no GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def order_behind_current(stream: torch.cuda.Stream | None) -> None:
    """Let `stream` wait for everything so far on the current stream; where they are one there is nothing to do."""
    if stream is not None and stream != (current := torch.cuda.current_stream()):
        stream.wait_stream(current)


def synchronize_stream() -> None:
    """Block the host until the current CUDA stream has run everything so far. On CPUs return at once."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
