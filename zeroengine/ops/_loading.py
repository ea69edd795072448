"""Loads with ctypes the libraries built from csrc, each by its table of functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Signatures = Mapping[str, tuple[Any, list[Any]]]  # of each function: its result's type and its arguments'


def open_library(path: Path, signatures: Signatures, version_function: str, version: int) -> ctypes.CDLL:
    """The library in a file, its functions declared.

    Raises:
        OSError, AttributeError: it is no such library, or another version's.
    """
    handle = ctypes.CDLL(str(path))
    if (found := getattr(handle, version_function)()) != version:
        raise OSError(f"it has interface version {found}, this zeroengine needs {version}")
    for name, (result, arguments) in signatures.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle
