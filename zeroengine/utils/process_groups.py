"""Collectives of a process group whose tensors no thread keeps, and the end of groups that an engine made for itself.

[Note: Tensors in Gloo's threads]
A thread of Gloo drops the tensors of a collective a moment after the collective is over. It takes the interpreter's
lock (GIL) for that, because Python has seen the tensors. Before Python 3.14, a thread that asks for the lock while the
interpreter shuts down is ended, and in the midst of C++ this aborts the process: "terminate called without an active
exception", after a run that has trained well. So ``PendingCollective.wait`` returns when no thread has the tensors any
more. Where torch communicates by itself, as its checkpoints do, the engine has a group of its own, and destroys it
before the interpreter shuts down: that joins the threads (``destroy_group``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroengine.utils.process_finalizer import keep_until_process_ends
from zeroengine.utils.torch_internals import AllgatherOptions, tensor_use_count

# A thread of Gloo drops its tensors within microseconds, once it runs.
DROP_POLL_S = 1e-5


class PendingCollective:
    """A collective under way. No thread refers to its tensors after `wait`, even after an error.

    Args:
        issue: Starts the collective of its arguments (``async_op=True``), which share the memory of ``tensors``.
        tensors: The inputs and outputs.
    """

    def __init__(self, issue: Callable[..., dist.Work | None], *tensors: torch.Tensor) -> None:
        # Nothing else refers to these objects, so their counts say whether a thread still does.
        self._aliases = [tensor.detach() for tensor in tensors]
        self._work = issue(*self._aliases)

    def test(self) -> bool:
        """Return whether the collective is over. If it is, do what `wait` does."""
        if is_completed := self._work is None or self._work.is_completed():
            self.wait()
        return is_completed

    def wait(self) -> None:
        """Wait for the collective.

        Raises:
            RuntimeError: It failed.
        """
        try:
            if self._work is not None:
                self._work.wait()
        finally:
            # The work refers to the tensors as well.
            self._work = None
            while any(alias.device.type == "cpu" and tensor_use_count(alias) > 1 for alias in self._aliases):
                time.sleep(DROP_POLL_S)
            self._aliases = []


def run_collective(issue: Callable[..., dist.Work | None], *tensors: torch.Tensor) -> None:
    """Run a collective and wait for it. See ``PendingCollective``.

    Raises:
        RuntimeError: The collective failed.
    """
    PendingCollective(issue, *tensors).wait()


def start_all_gather_bytes(
    group: dist.ProcessGroup, content: bytes, numel: int, timeout: timedelta | None = None
) -> tuple[PendingCollective, torch.Tensor]:
    """Start to gather every rank's bytes, and return the collective and the rows that receive them, in rank order.

    torch's ``all_gather_object`` would leave tensors with Gloo's threads. See the note above.

    Args:
        group: The ranks, of Gloo's backend.
        content: That of this rank.
        numel: The length of a row: that of the longest content.
        timeout: How long it may take. None: as long as the group's collectives.
    """

    def gather(row: torch.Tensor, *rows: torch.Tensor) -> dist.Work | None:
        options = AllgatherOptions()
        if timeout is not None:
            options.timeout = timeout
        work: dist.Work | None = group.allgather([list(rows)], [row], options)
        return work

    row = torch.zeros(numel, dtype=torch.uint8, device="cpu")
    row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = torch.empty(group.size(), numel, dtype=torch.uint8, device="cpu")
    return PendingCollective(gather, row, *rows), rows


def all_gather_bytes(
    group: dist.ProcessGroup, content: bytes, numels: Sequence[int], timeout: timedelta | None = None
) -> list[bytes]:
    """Return every rank's bytes, in rank order. See ``start_all_gather_bytes``.

    Args:
        group, content, timeout: As there.
        numels: The number of bytes of each rank's.

    Raises:
        RuntimeError: Another rank has ended or cannot be reached.
    """
    pending, rows = start_all_gather_bytes(group, content, max(numels), timeout)
    pending.wait()
    return [own[:numel].numpy().tobytes() for own, numel in zip(rows, numels, strict=True)]


def leave_to_threads(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Let a collective that other ranks may never finish go on until this process ends, and beyond the interpreter.

    Args:
        group: The group, whose end would wait for the collective.
        tensor: What the collective was given.
    """
    # The view refers to the tensor in C++, so that no thread's reference is the last one. Nothing ever drops the view.
    keep_until_process_ends((group, tensor.view_as(tensor)))


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group``, unless torch.distributed was shut down before, which destroys all groups.

    The last reference to it joins its threads, which waits for its collectives.
    """
    # torch raises these for a group that it no longer knows.
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)
