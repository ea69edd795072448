"""Load the disk library built from csrc/aio, and declare its C interface."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from zeroengine.errors import OffloadError
from zeroengine.ops._library import Signatures, open_library

# The version of the C interface that this file declares. Every change of a signature or a struct raises it.
ABI_VERSION = 1
PATH = Path(__file__).with_name("_aio.so")
# O_DIRECT needs file offsets, addresses and sizes that are multiples of this many bytes. It suits every usual disk.
ALIGNMENT = 4096
# The codes of csrc/zeroengine_aio.h: after "auto", the best backend first.
BACKENDS = {"auto": 0, "io_uring": 1, "threads": 3}
# The error of a transfer that the kernel accepts without moving a byte. An errno is positive.
NO_PROGRESS = -1


class Result(ctypes.Structure):
    """The struct ``ze_aio_result`` of csrc/zeroengine_aio.h."""

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
    """Return the disk library, which is loaded once.

    Raises:
        OffloadError: It is missing, or belongs to another version.
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
    """Return the names of the backends that work on this machine, best first.

    Raises:
        OffloadError: The library is missing.
    """
    # A kernel or a container may refuse io_uring, so each backend is tried.
    return tuple(name for name, code in BACKENDS.items() if name != "auto" and library().ze_aio_probe(code) == 0)
