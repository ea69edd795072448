"""torch's memory pools and NCCL's registration, pretended: where in which pool memory would lie is modelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nccl_over_gloo import use_nccl_transport
from zeroengine.comm.transports import nccl

SEGMENT = 1 << 12  # bytes that segments are a multiple of
Place = tuple[int, int]  # a segment, and a byte of it


class Pool:
    """Stands in for ``torch.cuda.MemPool``: the smallest free block that fits, else a new segment.

    Attributes:
        log: sizes taken, and given back with a minus, in order, each with its segment and its place there.
        segments: bytes of each.
    """

    current: ClassVar[Pool | None] = None
    all: ClassVar[list[Pool]] = []

    def __init__(self, allocator: str) -> None:
        self.allocator = allocator
        self.log: list[tuple[int, Place]] = []
        self.segments: list[int] = []
        self._free: dict[Place, int] = {}
        self._taken: dict[StorageWeakRef, tuple[Place, int]] = {}
        Pool.all.append(self)

    def take(self, storage: torch.UntypedStorage) -> None:
        self.sweep()
        size = -(-max(storage.size(), 1) // 512) * 512
        fitting = [(free, place) for place, free in self._free.items() if free >= size]
        if not fitting:
            self.segments.append(-(-size // SEGMENT) * SEGMENT)
            fitting = [(self.segments[-1], (len(self.segments) - 1, 0))]
            self._free[fitting[0][1]] = fitting[0][0]
        free, (segment, start) = min(fitting)
        del self._free[segment, start]
        if free > size:
            self._free[segment, start + size] = free - size
        self._taken[StorageWeakRef(storage)] = (segment, start), size
        self.log.append((size, (segment, start)))

    def give_back(self, ref: StorageWeakRef) -> None:
        if ref not in self._taken:
            return
        (segment, start), size = self._taken.pop(ref)
        self.log.append((-size, (segment, start)))
        self._free[segment, start] = size
        whole: dict[Place, int] = {}
        for (number, at), free in sorted(self._free.items()):
            last = next(reversed(whole), None)
            if last is not None and last[0] == number and last[1] + whole[last] == at:
                whole[last] += free
            else:
                whole[number, at] = free
        self._free = whole

    def sweep(self) -> None:
        for ref in [ref for ref in self._taken if ref.expired()]:
            self.give_back(ref)

    def place(self, tensor: torch.Tensor) -> Place | None:
        found = self._taken.get(StorageWeakRef(tensor.untyped_storage()))
        if found is None:
            return None
        (segment, start), _ = found
        return segment, start + tensor.storage_offset() * tensor.element_size()


class Backend:
    """Stands in for NCCL's part of one process group."""

    all: ClassVar[list[Backend]] = []

    def __init__(self, name: str) -> None:
        self.mem_allocator = name
        self.registered: list[str] = []  # whose pool
        self.deregistered: list[str] = []
        Backend.all.append(self)

    def register_mem_pool(self, pool: Pool) -> None:
        self.registered.append(pool.allocator)

    def deregister_mem_pool(self, pool: Pool) -> None:
        self.deregistered.append(pool.allocator)


class RefusingBackend(Backend):
    """Of an NCCL that cannot register memory."""

    def register_mem_pool(self, pool: Pool) -> None:
        raise RuntimeError("NCCL error: invalid usage\nmore of it")


@contextmanager
def use(pool: Pool, device: torch.device) -> Iterator[None]:
    before, Pool.current = Pool.current, pool
    try:
        yield
    finally:
        Pool.current = before


class Allocations(TorchDispatchMode):
    """New memory comes from the current pool."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if Pool.current is not None and func.overloadpacket.__name__ == "empty":
            Pool.current.take(result.untyped_storage())
        return result


class GatherOfItsOwn:
    """A gather over Gloo whose work holds no views of ``full``, as NCCL's holds none: these would share its memory."""

    def __init__(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        self._full: torch.Tensor | None = full
        self._arrived = torch.empty_like(full)
        work = dist.all_gather_into_tensor(self._arrived, shard, group=group, async_op=async_op)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        if self._full is not None:
            self._full.copy_(self._arrived)
            self._full = None

    def is_completed(self) -> bool:
        return self._work.is_completed()


@contextmanager
def pretended(backend: type[Backend] = Backend) -> Iterator[None]:
    """Every group's backend is NCCL as far as registration goes; Gloo moves the bytes."""
    backends: dict[str, Backend] = {}
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        for pool in Pool.all:
            pool.give_back(StorageWeakRef(storage))
        resize(storage, size)
        if Pool.current is not None:
            Pool.current.take(storage)
        return storage

    def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
        return backends.setdefault(group.group_name, backend(f"group {len(backends)}"))

    with pytest.MonkeyPatch.context() as patch:
        use_nccl_transport(patch)
        patch.setattr(nccl, "_all_gather", GatherOfItsOwn)
        patch.setattr(torch.cuda, "MemPool", Pool)
        patch.setattr(torch.cuda, "use_mem_pool", use)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(dist.ProcessGroup, "_get_backend", backend_of)
        with Allocations():
            yield
