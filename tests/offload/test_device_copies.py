"""Copies between a GPU and the host: what waits for what, as a recorded CUDA tells; and the memory they are from."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from zeroengine.disk import aligned_memory
from zeroengine.errors import OffloadError
from zeroengine.offload.device_copies import GPUCopies

GPU = torch.device("cuda", 0)


class Recorded:
    """Stands in for ``torch.cuda``: notes who waits for whom, on which stream copies run, and locked memory."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.main = self.Stream("main", self)
        self.at, self.made = self.main, 0
        self.registered: dict[int, int] = {}
        self.refuses = 0
        self.pending_error = 0

    class Stream:
        def __init__(self, name: Any, cuda: Recorded | None = None) -> None:
            if cuda is None:
                cuda = RECORDED[0]
                name = ("in", "out")[cuda.made % 2]
                cuda.made += 1
            self.name, self._cuda = name, cuda

        def wait_stream(self, other: Recorded.Stream) -> None:
            self._cuda.events.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Recorded.Event) -> None:
            self._cuda.events.append(f"{self.name} waits for {event.name}")

        def synchronize(self) -> None:
            self._cuda.events.append(f"host waits for {self.name}")

    class Event:
        name = "nothing"

        def __init__(self, blocking: bool) -> None:
            assert blocking, "a host that waits sleeps"

        def record(self, stream: Recorded.Stream) -> None:
            self.name = f"event on {stream.name}"
            RECORDED[0].events.append(self.name)

        def synchronize(self) -> None:
            RECORDED[0].events.append(f"host waits for {self.name}")

    def current_stream(self, device: Any) -> Recorded.Stream:
        return self.at

    @contextmanager
    def stream(self, stream: Recorded.Stream) -> Iterator[None]:
        before, self.at = self.at, stream
        yield
        self.at = before

    def cudart(self) -> Recorded:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        self.pending_error = self.refuses
        return self.refuses

    def zeros(self, *size: int, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") != "cuda":
            return torch.empty(*size, **kwargs).zero_()
        error, self.pending_error = self.pending_error, 0
        raise RuntimeError(f"CUDA error {error}")

    def cudaHostUnregister(self, address: int) -> None:
        with open("/proc/self/maps") as maps:
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        assert any(start <= address < stop for start, stop in spans), "unlocked before it goes"
        del self.registered[address]


RECORDED: list[Recorded] = []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    RECORDED[:] = [Recorded()]
    for name in ("Stream", "Event", "current_stream", "stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(RECORDED[0], name))
    monkeypatch.setattr(torch, "zeros", RECORDED[0].zeros)
    return RECORDED[0]


@dataclass
class Memory:
    """A tensor as far as a copy looks at it."""

    is_cuda: bool

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking and self.is_cuda != source.is_cuda
        RECORDED[0].events.append(f"copy on {RECORDED[0].at.name}")


HOST, DEVICE = Memory(False), Memory(True)


def copy(ways: GPUCopies, target: Memory, source: Memory, after: Any = None) -> Any:
    return ways.copy(target, source, after)  # type: ignore[arg-type]


def test_each_direction_has_a_stream_ordered_behind_the_current_one(cuda: Recorded) -> None:
    ways = GPUCopies(GPU)
    copy(ways, HOST, DEVICE)
    assert cuda.events == ["out waits for main", "copy on out", "event on out"]
    cuda.events.clear()
    copy(ways, DEVICE, HOST)
    assert cuda.events == ["in waits for main", "copy on in", "event on in"]


def test_wait_stream_waits_on_the_gpu_and_wait_host_on_the_host(cuda: Recorded) -> None:
    ways = GPUCopies(GPU)
    transfer = copy(ways, HOST, DEVICE)
    cuda.events.clear()
    transfer.wait_stream()
    transfer.wait_host()
    ways.wait_stream()
    ways.synchronize()
    assert cuda.events == [
        "main waits for event on out",
        "host waits for event on out",
        "main waits for in",
        "main waits for out",
        "host waits for in",
        "host waits for out",
    ]


def test_copies_of_both_directions_are_in_order_on_a_copy_stream(cuda: Recorded) -> None:
    """Else what a sum is added to would make every later shard wait for the sum."""
    ways = GPUCopies(GPU)
    with ways.on_copy_stream("out"):
        copy(ways, DEVICE, HOST).wait_stream()
        copy(ways, HOST, DEVICE)
    assert cuda.events == [
        "out waits for main",
        "copy on out",
        "event on out",
        "out waits for event on out",
        "copy on out",
        "event on out",
    ]
    assert cuda.at is cuda.main


def test_a_copy_is_ordered_behind_a_recorded_event(cuda: Recorded) -> None:
    ways = GPUCopies(GPU)
    mark = ways.record_event()
    copy(ways, DEVICE, HOST, mark)
    assert cuda.events == ["event on main", "in waits for event on main", "copy on in", "event on in"]


# -- memory ---------------------------------------------------------------------------------------


def test_exactly_the_host_memory_is_page_locked_while_it_lives(cuda: Recorded) -> None:
    numel = 3 * mmap.PAGESIZE + 1
    memory = GPUCopies(GPU).host_memory(numel, torch.float32)
    assert cuda.registered == {memory.data_ptr(): 4 * numel} and not memory.any()
    part = memory[5:]
    del memory
    gc.collect()
    assert cuda.registered, "a view keeps it"
    del part
    gc.collect()
    assert not cuda.registered


def test_a_forked_child_has_no_page_locked_memory(cuda: Recorded) -> None:
    """The system would copy all of it at once; and what the child lets go of is the parent's."""
    memory = GPUCopies(GPU).host_memory(1 << 20, torch.uint8)
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    start = next(line for line in text.splitlines() if _holds(line, memory.data_ptr()))
    flags = text[text.index(start) :].partition("VmFlags:")[2].partition("\n")[0]
    assert " dc" in flags, "not copied on fork"
    child = os.fork()
    if not child:
        del memory
        gc.collect()
        os._exit(0 if cuda.registered and aligned_memory._pages_of_parent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _holds(line: str, address: int) -> bool:
    first = line.split()[0]
    if "-" not in first:
        return False
    try:
        start, stop = (int(end, 16) for end in first.split("-"))
    except ValueError:
        return False
    return start <= address < stop


def test_memory_that_cannot_be_page_locked_raises_an_error_with_a_remedy(cuda: Recorded) -> None:
    cuda.refuses = 2
    with pytest.raises(OffloadError, match=r"cannot be page-locked \(CUDA error 2\).*\"pin_memory\": false"):
        GPUCopies(GPU).host_memory(10, torch.float32)
    assert not cuda.pending_error, "the user's next kernel would raise it"
    cuda.registered.clear()
    assert not GPUCopies(GPU, pin=False).host_memory(10, torch.float32).any() and not cuda.registered
