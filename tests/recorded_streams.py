"""CUDA streams that compute nothing apart, and record which of them is behind which.

Tensors stay on the CPU. Each operation is noted with the stream that was the current one; collectives have a stream of
their own, as NCCL's do. What a GPU would be free to do in another order, and what may be written over because the
memory was given back too early, is found whatever the timing:

    with recorded_streams() as device:
        ...                       # code that uses torch.cuda's streams
    assert device.faults == []
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """A stream: what it has done, and up to where it is behind each other stream."""

    def __init__(self, device: Any = None, name: str = "side", **_: Any) -> None:
        self.name, self.device, self.count = name, torch.device("cuda", 0), 0
        self.behind: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.known = {**self.behind, self: self.count}
        return event

    def wait_event(self, event: Event) -> None:
        for stream, count in event.known.items():
            self.behind[stream] = max(self.behind.get(stream, 0), count)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None:
        self.known: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return True


class Memory:
    """The storage of tensors: the stream that it was allocated on, and every use of it with its stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.uses: list[tuple[Stream, int, str, bool]] = []  # stream, its count, the operation, whether it writes
        self.is_recorded = False


class Device(TorchDispatchMode):
    """Notes every operation on the current stream.

    Attributes:
        faults: What had no order, and what was given back before it was used up.
        live_bytes: The bytes allocated here and not freed yet.
        is_ahead: Whether each collective is through when the host next asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = Stream(name="main")
        # By communicator: the stream of its collectives.
        self.communication: dict[object, Stream] = {}
        self.memory: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.live_bytes = 0
        self.is_ahead = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        writes = func._schema.is_mutable
        for tensor in [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]:
            self._of(tensor)
        is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        if not is_view:
            for position, tensor in enumerate(inputs):
                self.use(tensor, str(func), writes and position == 0)
            if isinstance((kwargs or {}).get("out"), torch.Tensor):
                self.use(kwargs["out"], str(func), True)
        return out

    def _of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(self.current)
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self.free, key, storage.nbytes())
        return self.memory[key]

    def use(self, tensor: torch.Tensor, what: str, writes: bool, stream: Stream | None = None) -> None:
        """Note that ``stream``, or the current one, reads or writes a tensor."""
        stream, memory = stream or self.current, self._of(tensor)
        for other, count, earlier, wrote in memory.uses:
            if (writes or wrote) and other is not stream and stream.behind.get(other, 0) < count:
                self.faults.append(f"{what} on {stream.name} has no order to {earlier} on {other.name}")
        stream.count += 1
        memory.uses.append((stream, stream.count, what, writes))

    def record_stream(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``Tensor.record_stream`` is for: the memory is reused when all streams are through with it."""
        self._of(tensor).is_recorded = True
        return tensor

    def free(self, key: int, nbytes: int) -> None:
        """Give memory back to the stream that it was allocated on."""
        memory = self.memory.pop(key, None)
        if memory is None:
            return
        self.live_bytes -= nbytes
        for stream, count, what, _ in () if memory.is_recorded else memory.uses:
            if stream is not memory.stream and memory.stream.behind.get(stream, 0) < count:
                self.faults.append(f"freed before {what} on {stream.name} was through")

    def collective(
        self, what: str, output: torch.Tensor, given: torch.Tensor, run: Callable[[], object], group: object = None
    ) -> Work:
        """Run a collective on the stream of its communicator, which is behind the current stream as NCCL's is."""
        stream = self.communication.setdefault(group, Stream(name=f"communicator {len(self.communication)}"))
        stream.wait_stream(self.current)
        with torch._C._DisableTorchDispatch():
            run()
        self.use(given, what, False, stream)
        self.use(output, what, True, stream)
        return Work(self, [output, given], stream)


class Work:
    """A collective. It holds its tensors until a stream waits for it, as torch's works do."""

    def __init__(self, device: Device, tensors: list[torch.Tensor], stream: Stream) -> None:
        self._device, self._tensors = device, tensors
        self._event = stream.record_event()

    def wait(self) -> None:
        self._device.current.wait_event(self._event)
        self._tensors = []

    def is_completed(self) -> bool:
        return self._device.is_ahead


@contextmanager
def recorded_streams() -> Iterator[Device]:
    """Let torch.cuda have streams that record their order."""
    device = Device()
    resize = torch.UntypedStorage.resize_

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if size == 0:
            device.free(storage._cdata, storage.nbytes())
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device_=None: device.current)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.UntypedStorage, "resize_", resize_)
        with device:
            yield device
