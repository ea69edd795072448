"""Where a state lives when it is not in the device's memory: files on a disk, and transfers from and to them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aio import DiskQueue, Transfer, aligned_empty
    from .probe import Settings, tune
    from .swap import SwapFile, SwapFolder, release_mapped

__all__ = ["DiskQueue", "Settings", "SwapFile", "SwapFolder", "Transfer", "aligned_empty", "release_mapped", "tune"]

# Imported when first used: zero-io answers wrong requests without torch.
_HOMES = {
    "DiskQueue": "aio",
    "Settings": "probe",
    "SwapFile": "swap",
    "SwapFolder": "swap",
    "Transfer": "aio",
    "aligned_empty": "aio",
    "release_mapped": "swap",
    "tune": "probe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value
