"""Memory that NCCL has registered, from which it sends and into which it receives without copies of its own.

See "User Buffer Registration" in NCCL's documentation. A collective needs what it sends and what it receives into
registered with its communicator, on all ranks or on none. So each channel has a pool of its own, which no other
communicator knows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.errors import ZeroEngineError


class RegisteredPool:
    """A pool of torch's allocator whose memory is registered with the communicator of ``group``.

    Memory that was freed returns to the pool, so that in the long run the same segments serve every unit. torch
    registers the segments that the pool takes later when it takes them.

    Raises:
        ZeroEngineError: This torch or its NCCL cannot register memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        try:
            backend: Any = group._get_backend(device)
            self._pool: Any = torch.cuda.MemPool(backend.mem_allocator)
            backend.register_mem_pool(self._pool)
        # These are what a torch or an NCCL without registration raises. Too little memory is another matter and keeps
        # its error.
        except (AttributeError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ZeroEngineError(
                f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register memory ({reason}): "
                "write false"
            ) from error
        self._backend: Any = backend
        self._registered = True

    def allocations(self) -> AbstractContextManager[None]:
        """Return a context in which torch's allocations on the device are memory of the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def close(self) -> None:
        """Wait for the device, and take the memory back from NCCL."""
        if self._registered:
            self._registered = False
            # Collectives may still use the memory.
            torch.cuda.synchronize(self._device)
            self._backend.deregister_mem_pool(self._pool)
