"""``deepspeed.accelerator``: what scripts ask of ``get_accelerator()``, answered by torch for CPUs and CUDA."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch


def _no_effect(*args: object, **options: object) -> None:
    return None


# Names of torch.cuda, as they are on a CPU. Nothing counts the bytes of a CPU's tensors.
_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("device", "stream"), lambda device=None: contextlib.nullcontext()),
    **dict.fromkeys(("current_stream", "default_stream"), _no_effect),
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "set_device", "synchronize"), _no_effect),
    **dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
        lambda device_index=None: 0,
    ),
    **dict.fromkeys(("Event", "Stream")),
    **dict.fromkeys(("is_available", "is_bf16_supported"), lambda: True),
    "current_device": lambda: "cpu",
    "initial_seed": torch.initial_seed,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "memory_stats": lambda device_index=None: {},
}
# DeepSpeed's names of torch.cuda's functions, where they differ.
_NAMES_OF_TORCH = {
    "max_memory_cached": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class Accelerator:
    """The device that this process computes on: CUDA where there is any, otherwise the CPU.

    DeepSpeed's accelerator has a hundred methods. Many are torch.cuda's by name, and ``__getattr__`` finds these.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._is_cuda = self._name == "cuda"
        self._served = vars(torch.cuda) if self._is_cuda else _ON_CPU
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        served_name = _NAMES_OF_TORCH.get(name, name)
        if not name.startswith("_") and served_name in self._served:
            return self._served[served_name]
        raise AttributeError(
            f"get_accelerator().{name} is not served by zeroengine on {self._name}; "
            f"use torch.{self._name} or torch.accelerator"
        )

    # -- the device -------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda", or "cuda:0" for an index."""
        return self._name if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """Return the name that tensors take: "cpu" or "cuda:0"."""
        return f"cuda:{torch.cuda.current_device()}" if self._is_cuda else "cpu"

    def device_count(self) -> int:
        """Return the number of devices; on CPU the number of ranks that the launcher started here, or of cores."""
        if self._is_cuda:
            return torch.cuda.device_count()
        launched = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
        return int(launched) if launched else os.cpu_count() or 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on this kind of device."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Return whether operations have ended when they return."""
        return not self._is_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return "nccl" if self._is_cuda else "gloo"

    # -- random numbers ---------------------------------------------------------------------------

    def random(self) -> Any:
        """Return torch's module of generators."""
        return torch.random

    def default_generator(self, device_index: int = 0) -> Any:
        """Return the generator of a device."""
        return torch.cuda.default_generators[device_index] if self._is_cuda else torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the generator."""
        if self._is_cuda:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the generator."""
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    # -- streams and memory -----------------------------------------------------------------------

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory, or of the machine's."""
        if self._is_cuda:
            return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that are free."""
        if self._is_cuda:
            return int(torch.cuda.mem_get_info(device_index)[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pin_memory(self, tensor: torch.Tensor, **options: object) -> torch.Tensor:
        """Return the tensor in pinned memory; on CPU as it is."""
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return bool(tensor.is_pinned()) if self._is_cuda else False

    # -- dtypes -----------------------------------------------------------------------------------

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes that the device computes in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """Return whether Triton's kernels run: nothing here needs them."""
        return False

    def get_compile_backend(self) -> str:
        """Return torch.compile's backend."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose torch.compile's backend."""
        self._compile_backend = backend

    def range_push(self, msg: str, **options: object) -> None:
        """Begin a range of the profiler; nothing on CPU."""
        if self._is_cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, **options: object) -> None:
        """End a range of the profiler."""
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device that this process computes on, as DeepSpeed describes it."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """Return whether the device is one that training runs on."""
    return True
