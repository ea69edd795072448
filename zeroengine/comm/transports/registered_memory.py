"""Device memory that NCCL has registered, so that it sends from it and receives into it without buffers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from zeroengine.utils.torch_internals import backend_of


class RegisteredMemory:
    """A pool of memory that is registered with NCCL's communicators.

    What is freed stays in the pool, for its next buffers. The communicators take part in a collective before this is
    made, because torch registers with those alone that are connected.

    Args:
        groups: The communicators, over NCCL.
        device: Their GPU.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._device, self._groups = device, list[dist.ProcessGroup]()
        self._pool = torch.cuda.MemPool(backend_of(groups[0], device).mem_allocator)
        for group in groups:
            self.add_group(group)

    @staticmethod
    def is_supported(group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether NCCL and the GPU of this rank have such memory."""
        return bool(backend_of(group, device).supports_tensor_alloc(device))

    def add_group(self, group: dist.ProcessGroup) -> None:
        """Register what the pool has, and will have, with one more communicator."""
        backend_of(group, self._device).register_mem_pool(self._pool)
        self._groups.append(group)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's memory of the GPU comes from the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def close(self) -> None:
        """End the registrations, before the communicators end."""
        for group in self._groups:
            backend_of(group, self._device).deregister_mem_pool(self._pool)
        self._groups.clear()
