"""Page-lock host memory, which a GPU then copies beside the computation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def page_lock(memory: torch.Tensor) -> tuple[int, Callable[[], None]]:
    """Page-lock memory of the CPU.

    Returns:
        CUDA's error, which is 0 where the memory is locked, and a function that unlocks it. Call it before the memory
        is unmapped.
    """
    cudart: Any = torch.cuda.cudart()
    address = memory.untyped_storage().data_ptr()

    def unlock() -> None:
        # The CUDA runtime may be gone when the interpreter exits.
        with contextlib.suppress(Exception):
            cudart.cudaHostUnregister(address)

    error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        # The runtime keeps the error, and torch would raise it at the next launch of a kernel, which is this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return error, unlock
