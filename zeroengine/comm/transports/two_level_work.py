"""Operations between the ranks of several hosts that take several steps. See ``two_level``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zeroengine.comm.transports.gloo import GlooWork
from zeroengine.comm.transports.shared_memory_channel import SharedMemoryWork
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.work import Work


class TwoLevelWork:
    """An operation whose steps are works, each of which starts when the previous one is done.

    Args:
        wait: Takes all steps of a work and of those before it.
        progress: Takes the steps of the channel's works that are ready.
        what: The operation, for people.
        steps: Yields the works.
        within: The first step in shared memory. Peers have read what was sent when they have executed it.
        exchange: The exchange that sends from memory of the caller, if there is one.
    """

    def __init__(
        self,
        wait: Callable[[TwoLevelWork], None],
        progress: Callable[[], None],
        what: str,
        steps: Iterator[Work],
        within: SharedMemoryWork | None,
        exchange: GlooWork | None = None,
    ) -> None:
        self.what, self.within, self.exchange = what, within, exchange
        self._wait, self._progress = wait, progress
        self._steps = steps
        self.current: Work | None = next(steps)
        self._is_advancing = False
        self._error: Exception | None = None

    def advance(self) -> bool:
        """Take the steps that are ready. Return whether all were taken."""
        # A step may wait for room in shared memory, which takes steps of all operations, but not of this one.
        if self._is_advancing:
            return False
        if self._error is not None:
            raise self._error
        self._is_advancing = True
        try:
            while self.current is not None and self.current.done():
                # This raises the error of a work that failed.
                self.current.wait_host()
                self._take_step()
        finally:
            self._is_advancing = False
        return self.current is None

    def _take_step(self) -> None:
        try:
            self.current = next(self._steps, None)
        except BaseException as error:
            # The step is half done and cannot be repeated, so every later wait raises as well.
            interrupted = ZeroEngineError(f"{self.what} was interrupted")
            self._error = error if isinstance(error, Exception) else interrupted
            raise

    def wait_host(self) -> None:
        """Take all steps of this operation and of those before it."""
        self._wait(self)

    wait_stream = wait_host

    def done(self) -> bool:
        """Take the steps that are ready, and return whether all were taken."""
        if self.current is not None:
            self._progress()
        return self.current is None
