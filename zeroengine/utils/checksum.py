"""Checksums of tensors, which reveal changes and differences between ranks without keeping or sending values."""

from __future__ import annotations

import torch

# The integer type through which elements of this many bytes are read. Others are read four bytes at a time.
_WORD_TYPES = {1: torch.int8, 2: torch.int16}


def checksum(values: torch.Tensor) -> tuple[int, int]:
    """Return two numbers that change if any element changes and, almost surely, if elements are reordered.

    The first is the sum of the elements, read as integers. The second weights each element by its position.

    Args:
        values: Contiguous, 1-D, of any dtype. On a GPU this waits for the device.
    """
    words = values.detach().view(_WORD_TYPES.get(values.element_size(), torch.int32))
    # The weights repeat every 4096 elements, so each row is weighted again by its number below.
    weights = torch.arange(1, 4097, dtype=torch.int64, device=values.device) * 0x9E3779B1 % 0x7FFFFFFF
    total = first = 0
    # The tensor is split, because the weighted copy in int64 takes two to eight times the memory.
    for chunk_index, chunk in enumerate(words.split(1 << 20)):
        wide = chunk.to(torch.int64)
        # Zeros at the end change neither sum.
        pad = -wide.numel() % weights.numel()
        wide = torch.nn.functional.pad(wide, (0, pad)).view(-1, weights.numel())
        rows = (wide * weights).sum(1)
        first += int(wide.sum())
        # A different odd factor for each chunk makes the sum depend on the order of chunks, too.
        total += int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()) * (2 * chunk_index + 1)
    return first, total
