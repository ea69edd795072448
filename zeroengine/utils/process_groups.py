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
import pickle
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroengine.utils.process_finalizer import keep_until_process_ends

T = TypeVar("T")
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
            while any(alias.device.type == "cpu" and alias._use_count() > 1 for alias in self._aliases):  # type: ignore[attr-defined]
                time.sleep(DROP_POLL_S)
            self._aliases = []


def run_collective(issue: Callable[..., dist.Work | None], *tensors: torch.Tensor) -> None:
    """Run a collective and wait for it. See ``PendingCollective``.

    Raises:
        RuntimeError: The collective failed.
    """
    PendingCollective(issue, *tensors).wait()


def all_gather_objects(group: dist.ProcessGroup, value: T, device: torch.device) -> list[T]:
    """Return every rank's ``value``, in rank order.

    torch's ``all_gather_object`` would leave tensors with Gloo's threads. See the note above.

    Args:
        group: The ranks.
        value: Anything that pickles.
        device: The device whose tensors the group can send.

    Raises:
        RuntimeError: Another rank has ended or cannot be reached.
    """

    def gather(row: torch.Tensor, *rows: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_gather(list(rows), row, group=group, async_op=True)
        return work

    content = pickle.dumps(value)
    sizes = torch.empty(group.size(), 1, dtype=torch.int64, device=device)
    run_collective(gather, torch.tensor([len(content)], device=device), *sizes)
    numels = sizes.flatten().tolist()
    # Every rank sends as many bytes as the longest of the values has.
    row = torch.zeros(max(numels), dtype=torch.uint8, device=device)
    row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = torch.empty(group.size(), row.numel(), dtype=torch.uint8, device=device)
    run_collective(gather, row, *rows)
    return [pickle.loads(own[:numel].numpy().tobytes()) for own, numel in zip(rows.cpu(), numels, strict=True)]


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
