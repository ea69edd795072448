"""Memory that NCCL has registered, from which it sends and into which it receives without copies of its own.

See "User Buffer Registration" in NCCL's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ZeroEngineError


class RegisteredPool:
    """A pool of torch's allocator whose memory is registered with the communicators of ``groups``.

    What is allocated inside ``with pool.allocating():`` comes from it and returns to it, so that in the long run the
    same few slots serve every unit. Segments that it takes later are registered as they come.

    Raises:
        ZeroEngineError: this torch or its NCCL cannot.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._device = device
        try:
            self._backends: list[Any] = [group._get_backend(device) for group in groups]
            self._pool: Any = torch.cuda.MemPool(self._backends[0].mem_allocator)
            for backend in self._backends:
                backend.register_mem_pool(self._pool)
        except (AttributeError, RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ZeroEngineError(
                f"comm.register_buffers: torch {torch.__version__} and its NCCL cannot register memory ({reason}): "
                "write false"
            ) from error

    def allocating(self) -> AbstractContextManager[Any]:
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        backends, self._backends = self._backends, []
        for backend in backends:
            backend.deregister_mem_pool(self._pool)
