"""Tensors with a storage of their own over a part of another tensor's memory."""

from __future__ import annotations

import torch


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, whose storage is that memory alone.

    The memory stays for as long as either tensor lives. Writes to one are seen in the other, and count in the version
    of neither but the one that was written to.

    Args:
        tensor: Contiguous.
    """
    # DLPack does not support all dtypes, so bytes are passed. Other devices than these two may not support it.
    if tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return tensor
    return torch.from_dlpack(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)
