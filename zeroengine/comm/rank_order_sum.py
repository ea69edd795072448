"""Sums in rank order, which give the same bits on every transport."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from zeroengine import ops


def sum_in_rank_order(target: torch.Tensor, pieces: Sequence[torch.Tensor], accumulate: bool) -> None:
    """Write ``pieces[0] + pieces[1] + ...`` to ``target``, or add it to ``target``.

    Low-precision values are added in fp32, and the sum is rounded once.

    Args:
        target: 1-D. It may be one of the pieces.
        pieces: Tensors of ``target``'s length and of one dtype, which may be another than ``target``'s.
        accumulate: Whether the sum is added to ``target``.
    """
    lib = ops.library()
    source = pieces[0].dtype
    # The kernel reads each piece once and rounds once. It takes addresses, so it works only on the CPU.
    if lib is not None and target.device.type == "cpu" and {target.dtype, source} <= ops.DTYPE_CODES.keys():
        # The kernel can also read pieces from files of other ranks. Here all pieces are in memory.
        local = (ctypes.c_void_p * len(pieces))(*(p.data_ptr() for p in pieces))
        none = ctypes.c_void_p()
        lib.ze_sum(
            *(target.data_ptr(), ops.DTYPE_CODES[target.dtype], accumulate, target.numel()),
            *(ops.DTYPE_CODES[source], len(pieces), local, none, none),
        )
        return
    wide = torch.float32 if source in (torch.bfloat16, torch.float16) else source
    # A copy, because ``target`` may be the first piece. The others are added in rank order, which fixes the bits.
    total = pieces[0].to(wide, copy=True)
    for piece in pieces[1:]:
        total.add_(piece)
    # The kernel adds the old value last as well.
    if accumulate:
        total.add_(target)
    target.copy_(total)
