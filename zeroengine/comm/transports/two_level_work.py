"""Operations between the ranks of several hosts that take several steps, and their memory. See ``two_level``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zeroengine.comm.transports.gloo import GlooWork
from zeroengine.comm.transports.shared_memory_channel import SharedMemoryChannel, SharedMemoryWork
from zeroengine.comm.transports.shared_memory_file import SharedMemory
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


class StagingPool:
    """Memory of this rank's file for what came from other hosts, which the ranks of its host read.

    Args:
        memory: The memory files.
        channel: The channel that the memory is shared on.
    """

    def __init__(self, memory: SharedMemory, channel: SharedMemoryChannel) -> None:
        self._memory, self._channel = memory, channel
        self._idle: list[tuple[torch.Tensor, Work]] = []
        self.nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory, 1-D, that no rank reads any more."""
        size = numel * dtype.itemsize
        # A much larger buffer is left to the operation that needs it.
        fitting = [item for item in self._idle if size <= item[0].numel() <= 2 * size]
        for item in sorted(fitting, key=lambda item: item[0].numel()):
            if self._channel.reusable(item[1], 0.0):
                self._idle = [other for other in self._idle if other is not item]
                return item[0][:size].view(dtype)
        self.nbytes += size
        return self._memory.empty(size, torch.uint8).view(dtype)

    def give_back(self, tensor: torch.Tensor, work: Work) -> None:
        """Take memory back that ``work`` has shared."""
        whole = tensor.untyped_storage()
        self._idle.append((torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole), work))
