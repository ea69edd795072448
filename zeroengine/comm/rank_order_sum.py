"""Sums in rank order, or host by host, which give the same bits on every transport.

On several hosts the ranks of each host are added in rank order, and then the hosts in order. This is the order in which
``TwoLevelTransport`` adds, which sends each byte to another host once per host.
"""

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
    wide = wide_dtype(source)
    # A copy, because ``target`` may be the first piece. The others are added in rank order, which fixes the bits.
    total = pieces[0].to(wide, copy=True)
    for piece in pieces[1:]:
        total.add_(piece)
    # The kernel adds the old value last as well.
    if accumulate:
        total.add_(target)
    target.copy_(total)


def sum_by_host(
    target: torch.Tensor, pieces: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], accumulate: bool
) -> None:
    """Add the pieces of each host's ranks in rank order, then the sums in the order of hosts, rounding once.

    Args:
        target: 1-D. It may be one of the pieces.
        pieces: A tensor of each rank, as for ``sum_in_rank_order``.
        hosts: The ranks of each host.
        accumulate: Whether the sum is added to ``target``.
    """
    # With one host, or one rank on each, this is rank order.
    if len(hosts) < 2 or all(len(ranks) == 1 for ranks in hosts):
        sum_in_rank_order(target, pieces, accumulate)
        return
    sums = [torch.empty_like(pieces[0], dtype=wide_dtype(pieces[0].dtype)) for _ in hosts]
    for host_sum, ranks in zip(sums, hosts, strict=True):
        sum_in_rank_order(host_sum, [pieces[rank] for rank in ranks], accumulate=False)
    sum_in_rank_order(target, sums, accumulate)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are added."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
