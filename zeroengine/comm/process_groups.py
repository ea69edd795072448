"""Destroy process groups that an engine made for itself."""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group``, unless torch.distributed was shut down before, which destroys all groups."""
    # torch raises these for a group that it no longer knows.
    with contextlib.suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)
