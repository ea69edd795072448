"""NCCL's transport with Gloo's collectives, so that tests run its code on machines without GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transports import nccl
from zeroengine.comm.transports.choose import open_nccl


class ReduceScatter:
    """A reduce-scatter that writes its sum once, as NCCL's does, and adds in rank order.

    Gloo's own writes the sum at each wait, over what was added to it since, and never says that it is completed.
    """

    def __init__(self, target: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._target: torch.Tensor | None = target
        # NCCL reads the memory during the operation as well, so it may not be written until then.
        self._arrived = torch.empty_like(full)
        work = dist.all_to_all_single(self._arrived, full, group=group, async_op=True)
        assert work is not None
        self._work, self._size, self.is_completed = work, group.size(), work.is_completed

    def wait(self) -> None:
        self._work.wait()
        target, self._target = self._target, None
        if target is not None:
            sum_in_rank_order(target, self._arrived.chunk(self._size), accumulate=False)


def replace_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    """Let NCCL's transport use ``ReduceScatter`` until ``patch`` is undone."""
    patch.setattr(nccl, "_reduce_scatter", ReduceScatter)


def use_nccl_transport(patch: pytest.MonkeyPatch) -> None:
    """Let ``initialize`` open NCCL's transport until ``patch`` is undone, whatever the configuration says."""

    def open_transport(group: Any, _: str, *arguments: Any) -> nccl.NCCLTransport:
        return open_nccl(group, *arguments)

    patch.setattr("zeroengine.engine.initialize.open_transport", open_transport)
    replace_reduce_scatter(patch)
