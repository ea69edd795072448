"""Where a state lives when it is not in the device's memory: files on a disk, and transfers from and to them."""

from .aio import DiskQueue, Transfer, aligned_empty
from .swap import SwapFile, SwapFolder, release_mapped

__all__ = ["DiskQueue", "SwapFile", "SwapFolder", "Transfer", "aligned_empty", "release_mapped"]
