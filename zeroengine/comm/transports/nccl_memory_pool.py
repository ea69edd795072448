"""Memory that NCCL has registered, from which it sends and into which it receives without copies of its own.

See "User Buffer Registration" and "Window Registration" in NCCL's documentation. A collective wants what it sends and
what it receives into registered with its communicator, on all ranks or on none: so each channel has a pool of its own,
which no other communicator knows.

[Note: Symmetric memory]
NCCL finds a peer's memory by where its own lies: in which segment, and where in it. So every rank must make the same
allocations in the same order. To register a segment is a collective operation, which hangs where a rank lacks.
- All that training is expected to need is one segment of each pool, taken and registered before anything else
  (``runtime/reserve.py``). torch's allocator divides it alike on all ranks, by size and by place; between several
  segments torch before 2.13 chooses by address, which is each rank's own.
- A megabyte and less comes from small segments of their own: so nothing here asks for as little.
- The allocator follows the host: what was let go is free at once, for nothing here calls ``record_stream``. The host
  does the same on all ranks, for units are gathered and reduced in one order, and where it would go by how far the
  device is it does not ask (``NativeChannel.reusable``).
It fails where ranks take or let go in another order, by other modules, unused parameters, exceptions or streams, and
may where more is needed than was reserved. So places are compared along with the order of operations: ranks that
differ end with a ``DivergenceError``, a step late, but before a checkpoint is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.errors import ZeroEngineError

log = logging.getLogger("zeroengine")
NCCL_WITH_WINDOWS = (2, 27)
LEAST_SYMMETRIC = (1 << 20) + 512  # bytes: the least that torch takes from a large segment


class RegisteredPool:
    """A pool of torch's allocator whose memory is registered with the communicator of ``group``.

    Memory that was freed returns to the pool, so that in the long run the same segments serve every unit. Segments
    that it takes later are registered as they come.

    Args:
        symmetric: registered as a window, see the note above. Before use: ``reserve`` and ``register``, on all ranks.

    Raises:
        ZeroEngineError: this torch or its NCCL cannot.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, symmetric: bool = False) -> None:
        self.symmetric = symmetric
        self._device = device
        self._segments: list[tuple[int, int]] = []  # first address and bytes, in the order in which they were taken
        self._registered = False
        with self._explaining():
            if symmetric and torch.cuda.nccl.version() < NCCL_WITH_WINDOWS:
                raise RuntimeError(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} has no windows")
            self._backend: Any = group._get_backend(device)
            self._pool: Any = torch.cuda.MemPool(self._backend.mem_allocator)
        if not symmetric:
            self.register()

    def reserve(self, nbytes: int) -> None:
        """Takes a segment for ``nbytes``."""
        with self._explaining(), self._allocating():
            self._know(torch.empty(max(nbytes, LEAST_SYMMETRIC), dtype=torch.uint8, device=self._device))

    def register(self) -> None:
        """Registers what the pool has, and will have."""
        with self._explaining():
            self._backend.register_mem_pool(self._pool, **({"symm": True} if self.symmetric else {}))
        self._registered = True

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            how, instead = ("symmetric memory", "true or false") if self.symmetric else ("memory", "false")
            raise ZeroEngineError(
                f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register {how} ({reason}): "
                f"write {instead}"
            ) from error

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, 1-D."""
        with self._allocating():
            memory = torch.empty(
                self._asked(numel * dtype.itemsize) // dtype.itemsize, dtype=dtype, device=self._device
            )
        self._know(memory)
        return memory[:numel]

    def refill(self, tensor: torch.Tensor) -> None:
        """Gives memory to a tensor whose storage was emptied."""
        with self._allocating():
            tensor.untyped_storage().resize_(self._asked(tensor.nbytes))
        self._know(tensor)

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Which segment of the pool ``tensor`` begins in, and at which byte of it."""
        address = tensor.data_ptr()
        for number, (start, nbytes) in enumerate(self._segments):
            if start <= address < start + nbytes:
                return number, address - start
        return None

    def _allocating(self) -> AbstractContextManager[Any]:
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def _asked(self, nbytes: int) -> int:
        return max(nbytes, LEAST_SYMMETRIC) if self.symmetric else nbytes

    def _know(self, new: torch.Tensor) -> None:
        """The segment that ``new`` was taken from counts from now on."""
        if self.symmetric and self.place(new) is None:
            address = new.data_ptr()
            found = ((segment["address"], segment["total_size"]) for segment in self._pool.snapshot())
            self._segments.append(next(s for s in found if s[0] <= address < s[0] + s[1]))
            if len(self._segments) == 2:
                log.warning(
                    "comm.register_buffers: more symmetric memory is needed than was reserved; see docs/cuda.md"
                )

    def close(self) -> None:
        if self._registered:
            self._registered = False
            torch.cuda.synchronize(self._device)
            self._backend.deregister_mem_pool(self._pool)
