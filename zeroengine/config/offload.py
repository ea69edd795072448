"""The keys that say where states live: on the device, in CPU memory, or on NVMe."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from zeroengine.config.fields import AUTO, NULL, WHOLE, Folder, Fraction, Section

BLOCK = 4096  # bytes; what aio.block_size is a multiple of
MAX_BUFFERS = 1024


class _Offload(Section):
    device: Annotated[Literal["none", "cpu", "nvme"], NULL] = "none"
    """none: on the device. cpu: in CPU memory, which on a machine without GPU is the same. nvme: in files."""
    nvme_path: Annotated[Folder | None, AUTO] = None
    """A folder on the disk that the states live on, for device "nvme". Each run has files of its own in it."""
    pin_memory: Annotated[bool, AUTO] = True
    """Page-locked CPU memory, which a GPU copies to and from while it computes."""

    @model_validator(mode="after")
    def _has_a_path(self) -> _Offload:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError('device "nvme" needs a folder on a disk; write "nvme_path": "/local_nvme"')
        return self

    @property
    def disk(self) -> str | None:
        """The folder, where the states are on NVMe."""
        return self.nvme_path if self.device == "nvme" else None


class OffloadOptimizer(_Offload):
    """Where the optimizer's states live: masters, moments, and on NVMe the gradients on their way to them."""

    ratio: Annotated[Fraction, AUTO] = 1.0
    """How much of the optimizer is offloaded; the rest of it stays on the device. Cut at whole units."""
    buffer_count: Annotated[int, Ge(3), Le(MAX_BUFFERS), WHOLE, AUTO] = 4
    """Buffers between disk and update: one is computed in, one written, the others read ahead."""
    buffer_size: Annotated[int, Ge(1), Le(1 << 32), WHOLE, AUTO] = 1 << 21
    """Elements of the optimizer's shard in one buffer."""


class OffloadParam(_Offload):
    """Where the parameter shards live, at stage 3."""

    buffer_count: Annotated[int, Ge(2), Le(MAX_BUFFERS), WHOLE, AUTO] = 5
    """Shards on their way from disk to other ranks, at most."""


class Aio(Section):
    """How files on NVMe are read and written. What is "auto" is tried out on the disk, in less than a second."""

    backend: Annotated[Literal["io_uring", "libaio", "threads"] | None, AUTO] = None
    """"auto": the first of these that works here."""
    block_size: Annotated[Annotated[int, Ge(BLOCK), Le(1 << 30), WHOLE] | None, AUTO] = None
    """Bytes in one request to the disk."""
    queue_depth: Annotated[Annotated[int, Ge(1), Le(1 << 15), WHOLE] | None, AUTO] = None
    """Requests under way at once."""

    @model_validator(mode="after")
    def _whole_blocks(self) -> Aio:
        if self.block_size is not None and self.block_size % BLOCK:
            near = max(round(self.block_size / BLOCK), 1) * BLOCK
            raise ValueError(f"block_size {self.block_size} is not a multiple of {BLOCK} bytes; write {near}")
        return self
