"""Finds the disk library built from csrc/aio, loads it with ctypes and declares its C interface."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from zeroengine.errors import OffloadError
from zeroengine.ops._loading import Signatures, open_library

ABI_VERSION = 1
PATH = Path(__file__).with_name("_aio.so")
ALIGNMENT = 4096
BACKENDS = {"auto": 0, "io_uring": 1, "libaio": 2, "threads": 3}
NO_PROGRESS = -1
FAULTS = {"none": 0, "short": -1, "empty": -2}


class Result(ctypes.Structure):
    """`ze_aio_result` of csrc/zeroengine_aio.h."""

    _fields_ = (("error", c_int32), ("refused", c_int32), ("error_offset", c_int64))


_SIGNATURES: Signatures = {
    "ze_aio_abi_version": (c_int, []),
    "ze_aio_probe": (c_int, [c_int]),
    "ze_aio_open": (c_int, [c_int, c_int, c_int64, POINTER(c_void_p)]),
    "ze_aio_backend": (c_int, [c_void_p]),
    "ze_aio_close": (None, [c_void_p]),
    "ze_aio_submit": (c_void_p, [c_void_p, c_int, c_int, c_int, c_void_p, c_int64, c_int64]),
    "ze_aio_wait": (c_int, [c_void_p, c_int, POINTER(Result)]),
    "ze_aio_release": (None, [c_void_p]),
    "ze_aio_set_fault": (None, [c_int, c_int64, c_int64]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The disk library of csrc/zeroengine_aio.h, loaded once.

    Raises:
        OffloadError: it is missing, or another version's.
    """
    try:
        return open_library(PATH, _SIGNATURES, "ze_aio_abi_version", ABI_VERSION)
    except (OSError, AttributeError) as error:
        reason = f"cannot be loaded ({error})" if PATH.exists() else "was not built"
        raise OffloadError(
            f"offload to NVMe needs zeroengine's disk library, but {PATH} {reason}. Install a C++17 compiler (Debian: "
            'apt install g++) and install zeroengine again, or offload to memory: write "device": "cpu"'
        ) from None


@functools.cache
def available() -> tuple[str, ...]:
    """The backends that work on this machine, best first.

    Raises:
        OffloadError: the library is missing.
    """
    return tuple(name for name, code in BACKENDS.items() if name != "auto" and library().ze_aio_probe(code) == 0)


def unavailable(backend: str) -> str:
    """Why a backend does not work here, as the system puts it; "" where it does."""
    status = library().ze_aio_probe(BACKENDS[backend])
    return os.strerror(-status) if status else ""


def set_fault(what: str | int, first: int = 1, count: int = 1) -> None:
    """For tests: blocks number `first` to `first + count - 1` of this process from now on, counted from 1, go wrong.

    Args:
        what: "short" (half of the block is moved), "empty" (nothing is), an errno, or "none" for an end of it.
    """
    library().ze_aio_set_fault(FAULTS[what] if isinstance(what, str) else what, first, count)
