"""Move offloaded states through a few buffers, so that reads, computation and writes overlap.

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
from zeroengine.monitor.timer import Timer
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.interfaces import StateStore, padded_nbytes, poison_on_error
from zeroengine.utils.work import Work


@dataclass(frozen=True)
class Operand:
    """One state's part in a task, and the directions in which it is moved.

    Attributes:
        tensor: 1-D. A state in a store of the pipeline is moved. Any other tensor is used in place.
        reads: Whether the task needs its values.
        writes: Whether the task changes them.
    """

    tensor: torch.Tensor
    reads: bool = True
    writes: bool = False


@dataclass(frozen=True)
class PipelineTask:
    """Equal parts of several states, and a function of them.

    Attributes:
        operands: The parts.
        compute: Called with a tensor for each operand when all reads are done.
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
        reads: The reads under way, which ``compute`` waits for.
        results: The writes that follow ``compute``: for each its store, its source and the state that it replaces.
        writes: The writes under way.
    """

    memory: torch.Tensor
    compute: Callable[..., None] = field(init=False)
    tensors: list[torch.Tensor] = field(default_factory=list)
    reads: list[Work] = field(default_factory=list)
    results: list[tuple[StateStore, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    writes: list[Work] = field(default_factory=list)


class Pipeline:
    """Runs tasks over states, some of which live in stores. It keeps its buffers.

    Args:
        stores: The stores whose states are moved.
        num_buffers: At least three: one is computed in, one written, the others are read ahead.
        chunk_numel: The largest number of elements of an operand. A multiple of 4096, so that every chunk of a state
            begins at a block of its file, whatever the dtype.
        element_bytes: The largest sum of the bytes of one element over all moved operands.
        timer: Times the waits for transfers.
        copies: Copies between host and device, if states are on a GPU.

    Attributes:
        chunk_numel: As given.
    """

    def __init__(
        self,
        stores: Sequence[StateStore],
        num_buffers: int,
        chunk_numel: int,
        element_bytes: int,
        timer: Timer,
        copies: GPUCopies | None = None,
    ) -> None:
        assert num_buffers >= 3 and not chunk_numel % ALIGNMENT
        self._stores, self._copies, self.chunk_numel, self._timer = stores, copies, chunk_numel, timer
        empty = aligned_zeros if copies is None else copies.host_memory
        self._buffers = [_Buffer(empty(chunk_numel * element_bytes, torch.uint8)) for _ in range(num_buffers)]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def wait_stream(self) -> None:
        """Order later kernels of the device's current stream behind all copies so far."""
        if self._copies is not None:
            self._copies.wait_stream()

    def run(self, tasks: Iterable[PipelineTask]) -> None:
        """Run the tasks in order, and return when all results are in their stores.

        Raises:
            OffloadError: A read or write failed. Some tasks are done and some are not; the stores are poisoned.
        """
        with poison_on_error(*self._stores):
            # Earlier copies may still read states that the tasks write.
            # Everything here is offload, except for the computation of a task.
            with self._timer.span("offload"):
                if self._copies is not None:
                    self._copies.synchronize()
                self._run(tasks)

    def _run(self, tasks: Iterable[PipelineTask]) -> None:
        started: deque[_Buffer] = deque()
        remaining, buffers = iter(tasks), cycle(self._buffers)
        try:
            while True:
                # Two buffers are reserved: for the task that computes and for the task that is being written.
                for task in islice(remaining, len(self._buffers) - 2 - len(started)):
                    started.append(next(buffers))
                    self._start(task, started[-1])
                if not started:
                    break
                self._finish(started.popleft())
        finally:
            # After a failure transfers may still use the buffers, which the next run needs.
            for buffer in self._buffers:
                _finish_transfers(buffer.reads)
            errors = [error for buffer in self._buffers if (error := _finish_transfers(buffer.writes)) is not None]
        if errors:
            raise errors[0]

    def _start(self, task: PipelineTask, buffer: _Buffer) -> None:
        """Place the moved operands in ``buffer``, each at a block, and start their reads."""
        # The results of the buffer's last task may still be under way.
        while buffer.writes:
            buffer.writes.pop().wait_host()
        buffer.compute, buffer.tensors, buffer.results = task.compute, [], []
        end = 0
        for operand in task.operands:
            state = operand.tensor
            # The kernel uses an operand that no store holds in place.
            store = next((store for store in self._stores if store.holds(state)), None)
            if store is None:
                buffer.tensors.append(state)
                continue
            start, end = end, end + padded_nbytes(state.nbytes)
            # The store may move whole blocks, so operands share no block.
            part = buffer.memory[start : start + state.nbytes].view(state.dtype)
            buffer.tensors.append(part)
            if operand.reads:
                buffer.reads.append(store.read(state, part))
            if operand.writes:
                buffer.results.append((store, part, state))

    def _finish(self, buffer: _Buffer) -> None:
        """Compute a task once its reads have arrived, and start its writes."""
        while buffer.reads:
            # The host waits, because the kernel runs on the CPU.
            buffer.reads.pop(0).wait_host()
        with self._timer.span("update"):
            buffer.compute(*buffer.tensors)
        # The next task in this buffer waits for the writes, or the end of ``run`` does.
        buffer.writes += [store.write(part, state) for store, part, state in buffer.results]


def _finish_transfers(transfers: list[Work]) -> Exception | None:
    """Wait for all transfers and empty the list; return the first error."""
    first_error = None
    while transfers:
        try:
            transfers.pop().wait_host()
        except Exception as error:
            first_error = first_error or error
    return first_error
