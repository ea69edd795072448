"""Hosts for tests: ranks of this machine that behave as if they were on several."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist


def imagine_hosts(*sizes: int) -> None:
    """Let this rank believe that hosts have these numbers of ranks, the last number again and again.

    It is called on each rank, before ``initialize``. The launcher's variable names the host, and ranks of different
    hosts do not try to share memory.
    """
    rank, host = dist.get_rank(), 0
    while rank >= (size := sizes[min(host, len(sizes) - 1)]):
        rank, host = rank - size, host + 1
    os.environ["ZEROENGINE_HOST"] = name = f"host-{host}"
    mock.patch("zeroengine.comm.transports.shared_memory_file.host_identity", lambda: name).start()
