"""Loads the libraries built from csrc with ctypes, each by a table of its functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# For each function, the type of its result and the types of its arguments.
Signatures = Mapping[str, tuple[Any, list[Any]]]


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
    # The version is compared before any function is declared: another version may lack functions or take other
    # arguments.
    if (found := getattr(handle, version_function)()) != version:
        raise OSError(f"it has interface version {found}, this zeroengine needs {version}")
    for name, (result, arguments) in signatures.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle
