"""torch.cuda over the emulated device. Import it in a process that has loaded the device before torch."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
ops = torch.ops.emulated_cuda
local = threading.local()


class Stream:
    """Everything is done at once: order needs no keeping."""

    def __init__(self, device: Any = None, number: int | None = None, **_: Any) -> None:
        self.device, self.device_index, self.device_type = DEVICE, 0, 1
        self.cuda_stream = self.stream_id = id(self) if number is None else number

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None:
        assert event.recorded

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        ops.wait()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.recorded = False
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        # The device is done with everything so far, so the host's clock is its clock.
        self.recorded, self.time = True, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        assert self.recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


FIRST = Stream(number=0)


def current_stream(device: Any = None) -> Stream:
    return getattr(local, "stream", FIRST)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before = current_stream()
    local.stream = chosen or before
    try:
        yield
    finally:
        local.stream = before


class Cudart:
    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        ops.pin(address, size)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        ops.pin(address, 0)
        return 0


class Recorder(TorchDispatchMode):
    """Operations, to be done again with the same memory. See ``CUDAGraph``."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_place = func._schema.is_mutable  # what is captured is not done yet
        out = args[0] if in_place else func(*args, **kwargs)
        self._calls.append((func, args, kwargs, out))
        return out


class CUDAGraph:
    """What was issued inside ``graph``, to be issued again: with the same tensors, and nothing of the host's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr() and old.numel():
                        old.copy_(new)


def _tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(of) if isinstance(leaf, torch.Tensor)]


@contextmanager
def graph(cuda_graph: CUDAGraph, **_: Any) -> Iterator[None]:
    local.capturing = cuda_graph
    ops.forbid_waiting(True)
    try:
        with Recorder(cuda_graph.calls):
            yield
    finally:
        ops.forbid_waiting(False)
        local.capturing = None


def captured(run: Any) -> bool:
    """Whether a graph under way has taken a kernel of zeroengine's own in."""
    graph = getattr(local, "capturing", None)
    if graph is not None:
        graph.calls.append((run, (), {}, None))
    return graph is not None


def set_sync_debug_mode(mode: int | str) -> None:
    ops.forbid_waiting(mode in ("error", 2))


PROPERTIES = SimpleNamespace(
    name="emulated GPU",
    total_memory=1 << 33,
    major=9,
    minor=0,
    multi_processor_count=4,
    uuid="emulated",
    L2_cache_size=1 << 20,
)


def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_storage(storage, size)
    ops.resize_storage(torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage), size)
    return storage


_resize_storage = torch.UntypedStorage.resize_


def clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone_storage(storage)
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).clone().untyped_storage()


def move_storage(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    if torch.device(device).type != "cuda" or storage.device.type == "cuda":
        return _move_storage(storage, device=device, non_blocking=non_blocking)
    values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return values.to(DEVICE).untyped_storage()


_move_storage = torch.UntypedStorage.to
_clone_storage = torch.UntypedStorage.clone


def returning(value: Any) -> Any:
    """A function of its own."""
    return lambda *_, **__: value


def install() -> None:
    """From now on torch has a GPU."""
    changed: dict[str, Any] = {
        "_lazy_init": returning(None),
        "init": returning(None),
        "is_initialized": returning(True),
        "is_available": returning(True),
        "device_count": returning(1),
        "current_device": returning(0),
        "set_device": returning(None),
        "_exchange_device": returning(0),
        "_maybe_exchange_device": returning(0),
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: FIRST,
        "stream": stream,
        "synchronize": lambda device=None: ops.wait(),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "memory_allocated": lambda device=None: ops.memory(False, False),
        "max_memory_allocated": lambda device=None: ops.memory(True, False),
        "reset_peak_memory_stats": lambda device=None: ops.memory(True, True),
        "empty_cache": returning(None),
        "_sleep": returning(None),
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed": returning(None),
        "manual_seed_all": returning(None),
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "cudart": returning(Cudart),
        "set_sync_debug_mode": set_sync_debug_mode,
        "is_current_stream_capturing": lambda: getattr(local, "capturing", None) is not None,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
    for name, value in changed.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_clearCublasWorkspaces = returning(None)  # type: ignore[attr-defined]
    _serve_with_emulated_kernels()
    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, _through_the_host(getattr(dist, name)))
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone_storage  # type: ignore[method-assign]
    torch.UntypedStorage.to = move_storage  # type: ignore[method-assign]


def _through_the_host(collective: Any) -> Any:
    """Gloo moves a GPU's tensors where torch was built for GPUs."""

    @functools.wraps(collective)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu":
            return collective(tensor, *args, **kwargs)
        values = tensor.cpu()
        result = collective(values, *args, **kwargs)
        tensor.copy_(values)
        return result

    return run


def _serve_with_emulated_kernels() -> None:
    """zeroengine's own kernels serve the device, each thread of a block as a fiber of the CPU's."""
    from tests.emulated import build_kernels
    from zeroengine import ops as operators
    from zeroengine.ops import _cuda_library

    handle = _cuda_library.load(build_kernels())

    issue = _cuda_library.call

    def call(library: Any, name: str, device: torch.device, *arguments: Any) -> None:
        if name == "ze_cuda_write":  # an argument that the host reads
            assert not ops.is_device(arguments[1].value if hasattr(arguments[1], "value") else arguments[1])
        run = functools.partial(issue, library, name, device, *arguments)
        if not captured(run):
            run()

    def serving(device: torch.device) -> Any:
        return handle if device.type == "cuda" else None

    _cuda_library.cuda_library = operators.cuda_library = serving
    _cuda_library.call = call
