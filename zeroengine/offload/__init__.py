"""Where a state lives when it is not in the device's memory: files on a disk, and the ways from and to them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aio import DiskQueue, Transfer, aligned_empty
    from .parking import Parking, held
    from .pipeline import Piece, Pipeline, Stream
    from .placement import Placement, open_disk, place
    from .probe import Settings, tune
    from .shards import DiskShards
    from .store import DiskStore, padded
    from .swap import SwapFile, SwapFolder, release_mapped

__all__ = [
    "DiskQueue",
    "DiskShards",
    "DiskStore",
    "Parking",
    "Piece",
    "Pipeline",
    "Placement",
    "Settings",
    "Stream",
    "SwapFile",
    "SwapFolder",
    "Transfer",
    "aligned_empty",
    "held",
    "open_disk",
    "padded",
    "place",
    "release_mapped",
    "tune",
]

# Imported when first used: zero-io answers wrong requests without torch.
_HOMES = {
    "DiskQueue": "aio",
    "DiskShards": "shards",
    "DiskStore": "store",
    "Parking": "parking",
    "Piece": "pipeline",
    "Pipeline": "pipeline",
    "Placement": "placement",
    "Settings": "probe",
    "Stream": "pipeline",
    "SwapFile": "swap",
    "SwapFolder": "swap",
    "Transfer": "aio",
    "aligned_empty": "aio",
    "held": "parking",
    "open_disk": "placement",
    "padded": "store",
    "place": "placement",
    "release_mapped": "swap",
    "tune": "probe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value
