"""Where a state lives when it is not in the device's memory: files on a disk, and the ways from and to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from .aio import DiskQueue, Transfer, aligned_empty
    from .parking import Parking, held
    from .pipeline import Piece, Pipeline, Stream
    from .placement import Placement, open_disk, place
    from .probe import Settings, tune
    from .shards import DiskShards
    from .store import DiskStore, padded
    from .swap import SwapFile, SwapFolder, release_mapped
else:  # imported when first used: zero-io answers wrong requests without torch
    __getattr__, __dir__ = exports(
        __name__,
        aio=["DiskQueue", "Transfer", "aligned_empty"],
        parking=["Parking", "held"],
        pipeline=["Piece", "Pipeline", "Stream"],
        placement=["Placement", "open_disk", "place"],
        probe=["Settings", "tune"],
        shards=["DiskShards"],
        store=["DiskStore", "padded"],
        swap=["SwapFile", "SwapFolder", "release_mapped"],
    )

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
