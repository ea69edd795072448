"""End process groups that an engine has made for itself."""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group``, unless torch.distributed was shut down before, which destroys all groups."""
    # torch raises ValueError for a group that it does not know any more.
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)
