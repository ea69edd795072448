"""Where a state lives when it is not in the device's memory: files on a disk, and the ways from and to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from .aio import DiskQueue, aligned_empty
    from .copies import Copies, Transfer
    from .parking import Parking, held
    from .pipeline import Piece, Pipeline, Stream
    from .placement import Placement, can_leave, open_disk, place
    from .probe import Settings, tune
    from .shards import StoredShards
    from .store import DiskStore, Medium, Store, marking, padded
    from .swap import SwapFile, SwapFolder, populate, populate_pages, release_mapped
else:  # imported when first used: zero-io answers wrong requests without torch
    __getattr__, __dir__ = exports(
        __name__,
        aio=["DiskQueue", "aligned_empty"],
        copies=["Copies", "Transfer"],
        parking=["Parking", "held"],
        pipeline=["Piece", "Pipeline", "Stream"],
        placement=["Placement", "can_leave", "open_disk", "place"],
        probe=["Settings", "tune"],
        shards=["StoredShards"],
        store=["DiskStore", "Medium", "Store", "marking", "padded"],
        swap=["SwapFile", "SwapFolder", "populate", "populate_pages", "release_mapped"],
    )

__all__ = [
    "Copies",
    "DiskQueue",
    "DiskStore",
    "Medium",
    "Parking",
    "Piece",
    "Pipeline",
    "Placement",
    "Settings",
    "Store",
    "StoredShards",
    "Stream",
    "SwapFile",
    "SwapFolder",
    "Transfer",
    "aligned_empty",
    "can_leave",
    "held",
    "marking",
    "open_disk",
    "padded",
    "place",
    "populate",
    "populate_pages",
    "release_mapped",
    "tune",
]
