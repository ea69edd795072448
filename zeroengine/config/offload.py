"""Define the keys that say where states live: on the device, in CPU memory, or on NVMe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from zeroengine.config.fields import AUTO, CHOSEN, Auto, Between, Folder, Fraction, Section

# Direct I/O needs requests that are multiples of a disk's block, so aio.block_size is a multiple of these bytes.
BLOCK = 4096
MAX_BUFFERS = 1024


class _Offload(Section):
    """Keys that both offload sections share."""

    device: Annotated[Literal["none", "cpu", "nvme", "auto"], Auto(words=(None,), kept=(CHOSEN,))] = "none"
    """none: on the device. cpu: in CPU memory, which is the same on a machine without a GPU. nvme: in files. "auto":
    the first of these that fits into free memory, nvme only with `nvme_path`; `initialize` says which."""
    nvme_path: Annotated[Folder | None, AUTO] = None
    """A folder on the disk that holds the states, for device "nvme". Each run makes its own files in it."""
    pin_memory: Annotated[bool, AUTO] = True
    """Use page-locked CPU memory, so that a GPU copies to and from it while it computes."""

    @model_validator(mode="after")
    def _check_path(self) -> _Offload:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError('device "nvme" needs a folder on a disk; write "nvme_path": "/local_nvme"')
        return self

    @property
    def disk(self) -> str | None:
        """The folder of the states on NVMe, or None where they are elsewhere."""
        return self.nvme_path if self.device == "nvme" else None


class OffloadOptimizer(_Offload):
    """Where the optimizer's states live: master weights, moments, and on NVMe the gradients of the next update."""

    ratio: Annotated[Fraction, AUTO] = 1.0
    """Fraction of the optimizer's states that is offloaded, rounded to whole units. The rest stays on the device."""
    buffer_count: Annotated[int, Between(3, MAX_BUFFERS), AUTO] = 4
    """Buffers between disk and update: one is being updated, one written, and the others are read ahead."""
    buffer_size: Annotated[int, Between(1, 1 << 32), AUTO] = 1 << 21
    """Elements of the optimizer's shard in one buffer; with moments of 8 bits a multiple of 262,144."""


class OffloadParam(_Offload):
    """Where the parameter shards live, at stage 3."""

    ratio: Annotated[Fraction, AUTO] = 1.0
    """Fraction of the parameters that is offloaded, rounded to whole units. The rest stays on the device."""
    buffer_count: Annotated[int, Between(2, MAX_BUFFERS), AUTO] = 5
    """Largest number of shards that are on their way from disk to the other ranks."""
    in_place: bool = False
    """Whether `load_weights()` leaves frozen weights in their safetensors files, if these are on the disk of
    `nvme_path` and have the dtype of the parameters. They are read there from then on, and take no room in `nvme_path`.
    Otherwise they are copied, which takes longer at the start, and forwards read the copies with less work."""


class ActivationCheckpointing(Section):
    """Where activation checkpoints keep their inputs. The model itself calls `torch.utils.checkpoint`."""

    cpu_checkpointing: Annotated[bool, AUTO] = False
    """Keep them in page-locked CPU memory between forward and backward. No effect where the CPU computes."""


class Aio(Section):
    """How files on NVMe are read and written. "auto" values are measured on the disk, in less than a second."""

    backend: Annotated[Literal["io_uring", "threads"] | None, AUTO] = None
    """The system interface for transfers. "auto": the first of these that works here."""
    block_size: Annotated[Annotated[int, Between(BLOCK, 1 << 30)] | None, AUTO] = None
    """Bytes in one request to the disk."""
    queue_depth: Annotated[Annotated[int, Between(1, 4096)] | None, AUTO] = None
    """Largest number of requests under way at once."""

    @model_validator(mode="after")
    def _check_block_size(self) -> Aio:
        if self.block_size is not None and self.block_size % BLOCK:
            # The message offers the nearest multiple, which is at least one block.
            near = max(round(self.block_size / BLOCK), 1) * BLOCK
            raise ValueError(f"block_size {self.block_size} is not a multiple of {BLOCK} bytes; write {near}")
        return self
