"""Where a state lives when it is not in the device's memory: files on a disk, and the ways from and to them."""

from .aio import DiskQueue, Transfer, aligned_empty
from .parking import Parking, held
from .pipeline import Piece, Pipeline, Stream
from .placement import Placement, open_disk, place
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
]
