"""torch's ``fake`` process group: one process is rank 0 of many, whose collectives move nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroengine.comm.transports import nccl


def init_fake_group(world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    probe = torch.ones(1)
    group = dist.group.WORLD
    assert group is not None
    nccl._reduce_scatter(probe, torch.zeros(world_size), group=group)
    if probe.item():
        # In torch 2.11 it leaves the output as it is, and memory that nobody has written may be no finite gradient.
        reduce_scatter = nccl._reduce_scatter

        def writing(output: torch.Tensor, full: torch.Tensor, **more: Any) -> Any:
            output.copy_(full[: len(output)])
            return reduce_scatter(output, full, **more)

        nccl._reduce_scatter = writing
