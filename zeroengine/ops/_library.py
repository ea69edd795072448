"""Load libraries built from csrc with ctypes, and declare the C interface of csrc/cpu.

torch is imported first, so that the library uses torch's OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError

# The version of the C interface that this file declares. Every change of a signature or a struct raises it.
ABI_VERSION = 7
PATH = Path(__file__).with_name("_cpu.so")
# The codes of csrc/zeroengine.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# ZE_MOMENT_BLOCK: the elements that share one scale in moments of 8 bits.
MOMENT_BLOCK = 256
ISAS = ("avx512", "avx2", "portable")


# For each function, the type of its result and the types of its arguments.
Signatures = Mapping[str, tuple[Any, list[Any]]]


_FACTORS = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale", "average_weight")


class UpdateArgs(ctypes.Structure):
    """The struct `ze_update_args` of csrc/zeroengine.h."""

    _fields_ = (
        *((name, c_double) for name in _FACTORS),
        ("step", c_int64),
        ("seed", c_uint64),
        ("offset", c_int64),
        *((name, c_int32) for name in ("rule", "maximize", "nesterov")),
    )


class ArrayPointers(ctypes.Structure):
    """The struct `ze_update_arrays`."""

    _fields_ = (
        *((name, c_void_p) for name in ("param", "grad")),
        *((name, c_void_p * 2) for name in ("moments", "scales")),
        *((name, c_void_p) for name in ("low_precision_param", "average")),
        *((f"{name}_dtype", c_int32) for name in ("param", "grad", "moments", "low_precision", "average")),
        ("reload_written", c_int32),
    )


class PartPointers(ctypes.Structure):
    """The struct `ze_update_part`."""

    _fields_ = (
        ("arrays", ArrayPointers),
        ("n", c_int64),
        ("step", c_int64),
        ("seed", c_uint64),
        ("offset", c_int64),
        ("group", c_int32),
    )


class Array(ctypes.Structure):
    """The struct `ze_array`."""

    _fields_ = (("data", c_void_p), ("numel", c_int64), ("dtype", c_int32))


# The arguments of the functions of packets, which the CUDA library has as well.
QUANTIZE: list[Any] = [c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_void_p, c_float]
DEQUANTIZE: list[Any] = [c_void_p, c_int, c_int, c_int64, c_int64, c_int64, c_int, c_void_p]
_SIGNATURES: Signatures = {
    "ze_abi_version": (c_int, []),
    "ze_cpu_isa": (c_char_p, []),
    "ze_cpu_set_isa": (c_int, [c_char_p]),
    "ze_update": (c_int, [POINTER(ArrayPointers), c_int64, POINTER(UpdateArgs), c_int]),
    "ze_update_parts": (c_int, [c_void_p, c_int64, POINTER(UpdateArgs), c_int64, c_int]),
    "ze_decode_moment": (None, [*[c_void_p] * 3, c_int64, c_int]),
    "ze_encode_moment": (None, [*[c_void_p] * 3, c_int64, c_int]),
    "ze_squared_norm": (c_int, [POINTER(Array), c_int64, POINTER(c_double), c_int]),
    "ze_digest": (c_int64, [c_void_p, c_int64, c_int64, c_int]),
    "ze_quantize": (c_int, [*QUANTIZE, c_int]),
    "ze_dequantize_sum": (c_int, [*DEQUANTIZE, c_int]),
    "ze_accumulate": (c_int, [c_void_p, c_void_p, c_int, c_int64, c_int]),
    "ze_cast": (c_int, [c_void_p, c_void_p, c_int, c_int64]),
    "ze_advise_huge": (c_int, [c_void_p, c_size_t]),
    "ze_post": (None, [c_void_p, c_uint32]),
    "ze_load": (c_uint32, [c_void_p]),
    "ze_wait": (c_int, [c_void_p, c_uint32, c_int]),
    "ze_pread": (c_int64, [c_int, c_void_p, c_int64, c_int64]),
    "ze_map": (c_int, [c_void_p, c_int64, c_int, c_int64, c_int]),
    "ze_unmap": (c_int, [c_void_p, c_int64]),
    "ze_sum": (c_int64, [c_void_p, c_int, c_int, c_int64, c_int, c_int, *[c_void_p] * 3]),
    "ze_stream": (None, [*[c_void_p] * 4, c_int, c_void_p, c_int64, c_int]),
}


def open_library(path: Path, signatures: Signatures, version_function: str, version: int) -> ctypes.CDLL:
    """Return the library in a file, with its functions declared.

    Args:
        path: The shared library.
        signatures: The functions to declare.
        version_function: The function that returns the version of the interface.
        version: The version that this zeroengine needs.

    Raises:
        OSError: The file is no library, or has another version.
        AttributeError: A function is missing.
    """
    handle = ctypes.CDLL(str(path))
    # The version is compared first, because another version may lack functions or take other arguments.
    if (loaded_version := getattr(handle, version_function)()) != version:
        raise OSError(f"it has interface version {loaded_version}, this zeroengine needs {version}")
    for name, (result, arguments) in signatures.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the CPU library, which is loaded once. Return None, with one warning, if it is missing.

    The environment variable ZEROENGINE_CPU_ISA chooses its instruction set: avx512, avx2 or portable.

    Raises:
        ZeroEngineError: The variable names an instruction set that this CPU lacks.
    """
    try:
        handle = open_library(PATH, _SIGNATURES, "ze_abi_version", ABI_VERSION)
    except (OSError, AttributeError) as error:
        reason = f"cannot be loaded ({error})" if PATH.exists() else "was not built"
        warnings.warn(
            f"zeroengine runs without its CPU kernels: {PATH} {reason}. torch's own, slower kernels serve instead. "
            "For zeroengine's, install a C++17 compiler (Debian: apt install g++) and install zeroengine again.",
            stacklevel=3,
        )
        return None
    # The library is loaded once, so the variable chooses for the whole process.
    if name := os.environ.get("ZEROENGINE_CPU_ISA"):
        _set_isa(handle, name, "ZEROENGINE_CPU_ISA=")
    return handle


def cpu_isa() -> str:
    """Return the instruction set of the CPU kernels: "avx512", "avx2" or "portable"; "torch" without the library."""
    handle = library()
    return handle.ze_cpu_isa().decode() if handle else "torch"


def set_cpu_isa(name: str) -> None:
    """Use another instruction set of this CPU, for tests and measurements. Each one gives the same bits.

    Args:
        name: "avx512", "avx2", "portable", or "" for the best one.

    Raises:
        ZeroEngineError: This CPU lacks it, or the library is missing.
    """
    handle = library()
    if handle is None:
        raise ZeroEngineError("set_cpu_isa: zeroengine's CPU library is missing, so there is nothing to choose from")
    _set_isa(handle, name, "set_cpu_isa: ")


def _set_isa(handle: ctypes.CDLL, name: str, where: str) -> None:
    if handle.ze_cpu_set_isa(name.encode()) == 0:
        return
    # Trying a name is the only way to learn whether the library accepts it, so the current one is restored.
    current = handle.ze_cpu_isa()
    offered = [isa for isa in ISAS if handle.ze_cpu_set_isa(isa.encode()) == 0]
    handle.ze_cpu_set_isa(current)
    raise ZeroEngineError(f"{where}{name!r}: this CPU offers {', '.join(offered)}; write one of these, or nothing")


def advise_huge_pages(x: torch.Tensor) -> None:
    """Ask the system for huge pages under a CPU tensor's storage, on which the update runs faster.

    It is a hint, without effect on other devices. Call it before the memory is first written.
    """
    if x.device.type == "cpu" and (handle := library()) is not None:
        # The advice covers the whole storage, because a huge page may span several views.
        storage = x.untyped_storage()
        handle.ze_advise_huge(storage.data_ptr(), storage.nbytes())
