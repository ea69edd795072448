"""A device apart from the host, pretended in CPU memory: copies between the two are as late as they may be."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.offload.device_copies import Direction

EMPTY = torch.empty(0)
LOCK = threading.RLock()  # a disk's thread waits for copies, too


class Apart(AssertionError):
    """Memory of the host and of the device met in one operation."""


@dataclass(eq=False)
class Lane:
    """Copies that go one way, in order; none is done before it must be."""

    waiting: deque[Late] = field(default_factory=deque)

    def flush(self, until: Late | None = None) -> None:
        with LOCK:
            while self.waiting and (until is None or until in self.waiting):
                self.waiting[0].run()
                self.waiting.popleft()


@dataclass(eq=False)
class Late:
    """See ``Work``."""

    target: torch.Tensor
    source: torch.Tensor
    lane: Lane
    behind: Mark

    def run(self) -> None:
        self.behind.wait_host()
        assert self.target.untyped_storage().nbytes(), "its memory was freed"
        self.target.copy_(self.source)

    def wait_host(self) -> None:
        self.lane.flush(self)
        self.target = self.source = EMPTY

    def wait_stream(self) -> None:
        self.lane.flush(self)

    def done(self) -> bool:
        return self not in self.lane.waiting


@dataclass(eq=False)
class Mark:
    """What a lane was at, or the stream that computes, where everything is done at once. See ``Work``."""

    lane: Lane | None
    last: Late | None

    def wait_host(self) -> None:
        if self.lane is not None and self.last is not None:
            self.lane.flush(self.last)

    wait_stream = wait_host

    def done(self) -> bool:
        return self.last is None or self.last.done()


class LateCopies:
    """See ``GPUCopies``. Until a copy is done its target holds garbage, and what is written to its source spoils it.

    Args:
        late: False: every copy is done at once.
    """

    def __init__(self, late: bool = True) -> None:
        self._late = late
        self._lanes: dict[Direction, Lane] = {"in": Lane(), "out": Lane()}
        self._local = threading.local()  # each thread has a current stream of its own
        self._host: list[tuple[int, int]] = []  # addresses
        self.copied = {"in": 0, "out": 0}  # bytes

    @property
    def _current(self) -> Lane | None:
        return getattr(self._local, "lane", None)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Late:
        assert target.shape == source.shape and target.dtype is source.dtype
        to_host = self.is_host(target)
        assert to_host != self.is_host(source), "from one to the other"
        way: Direction = "out" if to_host else "in"
        with LOCK:
            lane = self._lanes[way] if after is not None or self._current is None else self._current
            late = Late(target, source, lane, self.record_event() if after is None else after)
            if late.behind.lane is lane:
                late.behind = Mark(None, None)  # in line
            self.copied[way] += source.nbytes
            if self._late:
                target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, in every floating dtype
                lane.waiting.append(late)
            else:
                lane.flush()
                late.run()
        return late

    def record_event(self) -> Mark:
        lane = self._current
        return Mark(lane, lane.waiting[-1] if lane is not None and lane.waiting else None)

    @contextmanager
    def on_copy_stream(self, direction: Direction) -> Iterator[None]:
        before, self._local.lane = self._current, self._lanes[direction]
        self._lanes[direction].flush()  # what is computed inside comes after
        try:
            yield
        finally:
            self._local.lane = before

    def wait_stream(self) -> None:
        for lane in self._lanes.values():
            lane.flush()

    synchronize = wait_stream

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = aligned_zeros(numel, dtype)
        if numel:
            self._host.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            self._host.sort()
        return memory

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def is_host(self, tensor: torch.Tensor) -> bool:
        at = bisect_right(self._host, (tensor.data_ptr(), 1 << 62))
        return at > 0 and tensor.data_ptr() < self._host[at - 1][1]


class ApartMode(TorchDispatchMode):
    """Operations on memory of both sides are an error, but for copies."""

    COPIES = ("copy_", "_to_copy")

    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self._copies = copies
        self._made: dict[StorageWeakRef, None] = {}  # of the host, by operations

    def _of_host(self, tensor: torch.Tensor) -> bool:
        return self._copies.is_host(tensor) or StorageWeakRef(tensor.untyped_storage()) in self._made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.numel()]
        sides = {self._of_host(tensor) for tensor in tensors if tensor.dim()}
        name = func.overloadpacket.__name__
        if len(sides) > 1 and name not in self.COPIES:
            raise Apart(f"{func} takes memory of the host and of the device")
        result = func(*args, **(kwargs or {}))
        if sides == {True} and name != "copy_" and (kwargs or {}).get("device") is None:
            for made in torch.utils._pytree.tree_leaves(result):
                if isinstance(made, torch.Tensor) and made.numel() and not self._copies.is_host(made):
                    self._made[StorageWeakRef(made.untyped_storage())] = None
        self._made = {ref: None for ref in self._made if not ref.expired()}
        return result
