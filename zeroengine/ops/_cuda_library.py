"""Load the CUDA library built from csrc/cuda, and declare its C interface.

A machine may have the library without a GPU, or a GPU without the library: see `cuda_library`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.ops._library import (
    DEQUANTIZE,
    QUANTIZE,
    Array,
    ArrayPointers,
    Signatures,
    UpdateArgs,
    cpu_isa,
    open_library,
)

ABI_VERSION = 5
PATH = Path(__file__).with_name("_cuda.so")
# ZE_CUDA_RUN_BYTES of csrc/zeroengine_cuda.h.
RUN_BYTES = 88
# The fields of ze_cuda_group and of ze_cuda_factor, all doubles.
GROUP_FIELDS = ("lr", "beta1", "beta2", "eps", "weight_decay", "average_weight", "rule", "maximize", "nesterov")
FACTOR_FIELDS = ("factor", "grad_norm", "overflow")


class CudaSegment(ctypes.Structure):
    """The struct `ze_cuda_segment` of csrc/zeroengine_cuda.h."""

    _fields_ = (
        *((name, c_int64) for name in ("begin", "end", "first_tile")),
        ("seed", c_uint64),
        ("offset", c_int64),
        ("group", c_int32),
        ("slot", c_int32),
    )


class CudaBuffer(ctypes.Structure):
    """The struct `ze_cuda_buffer`."""

    _fields_ = (("arrays", ArrayPointers), ("runs", c_void_p), ("num_runs", c_int64), ("num_tiles", c_int64))


class CudaCopy(ctypes.Structure):
    """The struct `ze_cuda_copy`."""

    _fields_ = (("src", c_void_p), ("dst", c_void_p), ("numel", c_int64), ("src_dtype", c_int32))


# Every function that launches something begins with the device and the stream.
_ON_STREAM: list[Any] = [c_int, c_void_p]
_SIGNATURES: Signatures = {
    "ze_cuda_abi_version": (c_int, []),
    "ze_cuda_architectures": (c_char_p, []),
    "ze_cuda_message": (c_char_p, [c_int]),
    "ze_cuda_probe": (c_int, [c_int]),
    "ze_cuda_update": (c_int, [*_ON_STREAM, POINTER(ArrayPointers), c_int64, POINTER(UpdateArgs)]),
    "ze_cuda_tiles": (c_int64, [c_int64, c_int64]),
    "ze_cuda_update_prepare": (c_int, [*_ON_STREAM, c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2]),
    "ze_cuda_update_buffers": (c_int, [*_ON_STREAM, c_void_p, c_int64]),
    "ze_cuda_squared_norm_workspace": (c_int64, [POINTER(Array), c_int64]),
    "ze_cuda_squared_norm": (c_int, [*_ON_STREAM, POINTER(Array), c_int64, *[c_void_p] * 2]),
    "ze_cuda_gradient_factor": (c_int, [*_ON_STREAM, *[c_void_p] * 2, *[c_double] * 2, c_int, c_void_p]),
    "ze_cuda_cast": (c_int, [*_ON_STREAM, POINTER(CudaCopy), c_int64, c_int, c_float, c_int]),
    "ze_cuda_digest": (c_int, [*_ON_STREAM, c_void_p, c_int64, c_int64, c_void_p]),
    "ze_cuda_quantize": (c_int, [*_ON_STREAM, *QUANTIZE]),
    "ze_cuda_dequantize_sum": (c_int, [*_ON_STREAM, *DEQUANTIZE]),
    "ze_cuda_write": (c_int, [*_ON_STREAM, c_void_p, c_void_p, c_int64]),
}


def load(path: Path) -> ctypes.CDLL:
    """Return the CUDA library in a file. Raises what `open_library` raises."""
    return open_library(path, _SIGNATURES, "ze_cuda_abi_version", ABI_VERSION)


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    try:
        return load(PATH)
    except (OSError, AttributeError) as error:
        if PATH.exists():
            return f"{PATH} cannot be loaded ({error}). Install zeroengine again"
        return f"{PATH} was not built. For it, install the CUDA toolkit (its nvcc) and install zeroengine again"


@functools.cache
def _usable(device: int) -> ctypes.CDLL | None:
    # A library that loads may still lack code for this GPU, or a driver. The probe tries the device itself.
    reason = loaded = _loaded()
    if isinstance(loaded, ctypes.CDLL):
        if not (result := loaded.ze_cuda_probe(device)):
            return loaded
        reason = loaded.ze_cuda_message(result).decode()
    # This function is cached, so each device gives one warning.
    warnings.warn(
        f"zeroengine runs without its CUDA kernels on cuda:{device}: {reason}. torch's own, slower kernels "
        "serve instead, and some of them wait for the GPU.",
        stacklevel=4,
    )
    return None


def cuda_library(device: torch.device) -> ctypes.CDLL | None:
    """Return the CUDA library for tensors on `device`; None on the CPU or, with one warning, if it cannot run there."""
    if device.type != "cuda":
        return None
    return _usable(torch.cuda.current_device() if device.index is None else device.index)


def kernels_in_use(device: torch.device) -> str:
    """Say whose kernels update on a device: `C++ (avx512)`, `CUDA`, or `torch's own, which are slower`."""
    if device.type == "cpu" and (isa := cpu_isa()) != "torch":
        return f"C++ ({isa})"
    return "torch's own, which are slower" if cuda_library(device) is None else "CUDA"


def cuda_architectures() -> tuple[str, ...]:
    """Return the architectures that the built CUDA library has code for, such as ("80", "100+PTX"); () without it."""
    library = _loaded()
    return tuple(library.ze_cuda_architectures().decode().split()) if isinstance(library, ctypes.CDLL) else ()


def call(handle: ctypes.CDLL, name: str, device: torch.device, *arguments: Any) -> None:
    """Launch one of the library's functions on the device's current stream.

    Raises:
        ZeroEngineError: CUDA reports an error, perhaps of earlier work on the device.
    """
    # The library launches on the CUDA runtime's current device, which must be the tensors' device.
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        result = getattr(handle, name)(device.index, stream, *arguments)
    if result:
        raise ZeroEngineError(f"{name} on {device}: {handle.ze_cuda_message(result).decode()}")
