"""A limit of the memory of a process on a CPU, where no allocator has one: `"memory_limit"`."""

from __future__ import annotations

import mmap
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.utils.formats import format_byte_size

STATISTICS = Path("/proc/self/statm")


def limit_memory(model: nn.Module, limit: int, undo: ExitStack) -> None:
    """Let each forward of a module raise ``torch.OutOfMemoryError`` where the process is above a limit.

    Args:
        model: The model.
        limit: Bytes of resident memory.
        undo: Removes the hooks.
    """
    for module in model.modules():
        undo.callback(module.register_forward_hook(UncopiedHook(partial(_check, limit))).remove)


def _check(limit: int, *_: Any) -> None:
    resident = int(STATISTICS.read_text().split()[1]) * mmap.PAGESIZE
    if resident > limit:
        raise torch.OutOfMemoryError(
            f"the process holds {format_byte_size(resident)} of memory, above memory_limit ({format_byte_size(limit)})"
        )
