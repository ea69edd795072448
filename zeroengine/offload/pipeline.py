"""States that live elsewhere, brought through a few buffers so that reads, computation and writes overlap.

buffer 0   read a . . compute a . . write a . . . . . read d
buffer 1   . . read b . . . . compute b . . write b
buffer 2   . . . . read c . . . . . . . compute c . . write c
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch

from zeroengine.disk.aligned_memory import ALIGNMENT, aligned_zeros
from zeroengine.offload.interfaces import Copies, StateStore, padded_nbytes, poison_on_error
from zeroengine.utils.work import Work


@dataclass(frozen=True)
class Operand:
    """One state's part in a task, and which ways it is moved.

    Attributes:
        tensor: 1-D. One that lives in a store of the pipeline is moved; any other is used where it is.
        reads: Whether the task needs its values.
        writes: Whether the task changes them.
    """

    tensor: torch.Tensor
    reads: bool = True
    writes: bool = False


@dataclass(frozen=True)
class PipelineTask:
    """Equal parts of several states, and what is to be done with them.

    Attributes:
        operands: The parts.
        compute: Called with a tensor for each operand when all values are there.
    """

    operands: Sequence[Operand]
    compute: Callable[..., None]


@dataclass
class _Buffer:
    """Memory for the moved operands of one task, and that task.

    Attributes:
        memory: The memory.
        compute: The task's function.
        tensors: Its arguments.
        reads: The reads under way, which must arrive before it.
        results: The writes that follow: for each one its store, its source and the state that it replaces.
        writes: The writes under way.
    """

    memory: torch.Tensor
    compute: Callable[..., None] = field(init=False)
    tensors: list[torch.Tensor] = field(default_factory=list)
    reads: list[Work] = field(default_factory=list)
    results: list[tuple[StateStore, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    writes: list[Work] = field(default_factory=list)


class Pipeline:
    """Runs tasks over states, some of which live in stores. Its buffers are kept.

    Args:
        stores: The stores whose states are moved.
        num_buffers: At least three: one is computed in, one written, the others are read ahead.
        chunk_numel: The most elements of an operand. A multiple of 4096, so that every chunk of a state begins at a
            block of its file, whatever the dtype.
        element_bytes: The most bytes of one element of all moved operands together.
        copies: Between host and device, where states are on a GPU.

    Attributes:
        chunk_numel: As given.
    """

    def __init__(
        self,
        stores: Sequence[StateStore],
        num_buffers: int,
        chunk_numel: int,
        element_bytes: int,
        copies: Copies | None = None,
    ) -> None:
        assert num_buffers >= 3 and not chunk_numel % ALIGNMENT
        self._stores, self._copies, self.chunk_numel = stores, copies, chunk_numel
        empty = aligned_zeros if copies is None else copies.host_memory
        self._buffers = [_Buffer(empty(chunk_numel * element_bytes, torch.uint8)) for _ in range(num_buffers)]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def wait_stream(self) -> None:
        """Order later kernels of the device's current stream behind what was moved so far."""
        if self._copies is not None:
            self._copies.wait_stream()

    def run(self, tasks: Iterable[PipelineTask]) -> None:
        """Run the tasks in order, and return when all results are in their stores.

        Raises:
            OffloadError: A read or write failed. Some tasks are done and some are not; the stores are poisoned.
        """
        with poison_on_error(*self._stores):
            # Copies from states that are now to be written must have read them before.
            if self._copies is not None:
                self._copies.synchronize()
            self._run(tasks)

    def _run(self, tasks: Iterable[PipelineTask]) -> None:
        started: deque[_Buffer] = deque()
        remaining, buffers = iter(tasks), cycle(self._buffers)
        try:
            while True:
                # Two buffers are left to the task that computes and to the one that is being written.
                for task in islice(remaining, len(self._buffers) - 2 - len(started)):
                    started.append(next(buffers))
                    self._start(task, started[-1])
                if not started:
                    break
                self._finish(started.popleft())
        finally:
            # After a failure transfers still use the buffers: the next run must not find them at work.
            for buffer in self._buffers:
                _finish_transfers(buffer.reads)
            errors = [error for buffer in self._buffers if (error := _finish_transfers(buffer.writes)) is not None]
        if errors:
            raise errors[0]

    def _start(self, task: PipelineTask, buffer: _Buffer) -> None:
        """Lay the moved operands out in ``buffer``, each from a block on, and start their reads."""
        # The buffer's last task may still be on its way to its store.
        while buffer.writes:
            buffer.writes.pop().wait_host()
        buffer.compute, buffer.tensors, buffer.results = task.compute, [], []
        end = 0
        for operand in task.operands:
            state = operand.tensor
            # An operand that lives in none of the stores is memory that the kernel can use where it is.
            store = next((store for store in self._stores if store.holds(state)), None)
            if store is None:
                buffer.tensors.append(state)
                continue
            start, end = end, end + padded_nbytes(state.nbytes)
            # The store may move whole blocks, so operands share none.
            part = buffer.memory[start : start + state.nbytes].view(state.dtype)
            buffer.tensors.append(part)
            if operand.reads:
                buffer.reads.append(store.read(state, part))
            if operand.writes:
                buffer.results.append((store, part, state))

    def _finish(self, buffer: _Buffer) -> None:
        """Compute a task once its reads have arrived, and start its writes."""
        while buffer.reads:
            # Reads are awaited by the host, since the kernel runs on the CPU.
            buffer.reads.pop(0).wait_host()
        buffer.compute(*buffer.tensors)
        # Nobody waits for the writes here: the next task in this buffer does, or the end of ``run``.
        buffer.writes += [store.write(part, state) for store, part, state in buffer.results]


def _finish_transfers(transfers: list[Work]) -> Exception | None:
    """Wait for all transfers and empty the list; return the first error that one of them raised."""
    first_error = None
    while transfers:
        try:
            transfers.pop().wait_host()
        except Exception as error:
            first_error = first_error or error
    return first_error
