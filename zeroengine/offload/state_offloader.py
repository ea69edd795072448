"""Move states off the device for a while, so that another job can use its memory, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

import torch

from zeroengine import ops
from zeroengine.config import Config
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.host_memory import check_host_memory
from zeroengine.offload.interfaces import Medium, padded_nbytes
from zeroengine.offload.placement import open_disk
from zeroengine.utils.files import checked_path

OFFLOADABLE_STATES = ("parameters", "masters", "moments", "averages", "gradients")
# Names of several states.
STATE_GROUPS = {"optimizer": ("masters", "moments", "averages"), "all": OFFLOADABLE_STATES}
DEFAULT_STATES = ("optimizer", "gradients")


def named_states(include: str | Iterable[str]) -> list[str]:
    """Return the argument ``include`` of ``offload_states`` as a sorted list.

    Raises:
        ZeroEngineError: A name is unknown.
    """
    names = [include] if isinstance(include, str) else list(include) if isinstance(include, Iterable) else [include]
    for name in names:
        if name not in (*STATE_GROUPS, *OFFLOADABLE_STATES):
            known = ", ".join((*STATE_GROUPS, *OFFLOADABLE_STATES))
            raise ZeroEngineError(f"offload_states(): include has {name!r}; write any of {known}")
    return sorted(names)


class StateOffloader:
    """Moves states of one engine off the device and back. Tensors stay the same objects, without memory in between.

    Args:
        config: The configuration, for the settings that drive a disk and page-lock memory.
        rank: This process's rank, for messages.
        device: The device that the engine computes on.
    """

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._config, self._rank, self._device = config, rank, device
        # By state: each tensor, and its bytes in CPU memory or on a disk.
        self._offloaded: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # The store of the values, if they are not in CPU memory.
        self._disk: DiskStore | None = None
        self._postponed: list[Callable[[], object]] = []

    @property
    def has_offloaded_states(self) -> bool:
        """Return whether any states are off the device."""
        return bool(self._offloaded)

    def bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Return the bytes of the states that are away, by name, if they are in ``medium``."""
        if medium != ("cpu" if self._disk is None else "nvme"):
            return {}
        return {name: sum(values.nbytes for _, values in pairs) for name, pairs in self._offloaded.items()}

    def check_request(self, device: str, nvme_path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
        """Return the folder that the states go to, or None for CPU memory.

        Args:
            device: "cpu" or "nvme", as passed to ``offload_states``.
            nvme_path: As passed to ``offload_states``. None: the folder in the configuration.

        Raises:
            ZeroEngineError: The arguments of ``offload_states`` are wrong, or states are already offloaded.
        """
        if device not in ("cpu", "nvme"):
            raise ZeroEngineError(f'offload_states(): device is {device!r}; write "cpu" or "nvme"')
        if self.has_offloaded_states:
            raise ZeroEngineError("offload_states(): states are offloaded already; call reload_states() before")
        if nvme_path is not None:
            nvme_path = checked_path(nvme_path, "offload_states(nvme_path)")
            if device != "nvme":
                raise ZeroEngineError(
                    f"offload_states(): nvme_path names a folder on a disk, and device is {device!r}; write "
                    'device="nvme", or leave nvme_path out'
                )
            return nvme_path
        zero = self._config.zero_optimization
        configured = zero.offload_optimizer.disk or zero.offload_param.disk
        if device == "nvme" and configured is None:
            raise ZeroEngineError('offload_states(): device "nvme" needs a folder on a disk: write nvme_path=...')
        return configured if device == "nvme" else None

    def offload(
        self, states: Mapping[str, Iterable[torch.Tensor]], path: str | os.PathLike[str] | None, *, skips_shared: bool
    ) -> None:
        """Move states to CPU memory, or to the folder ``path`` of a disk, and free their memory.

        If it raises nothing was moved, and ``reload`` frees what it has taken.

        Args:
            states: The tensors of each state.
            path: The folder; None: CPU memory.
            skips_shared: Whether memory that cannot be freed stays.

        Raises:
            ZeroEngineError: Memory cannot be freed, there is too little elsewhere, or a path cannot be used.
        """
        # Whole storages move, each once, because states of an optimizer may be transposed, or share one. A tensor
        # without memory, such as the full buffer of a released unit, has nothing to move.
        moved = {}
        for name, tensors in states.items():
            by_address = {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}
            moved[name] = [t for t in by_address.values() if t.untyped_storage().resizable() or not skips_shared]
            if not all(t.untyped_storage().resizable() for t in moved[name]):
                raise ZeroEngineError(
                    f"offload_states(): the {name} are in memory that the ranks share, which cannot be given back: "
                    'leave them out of `include`, or write "comm": {"transport": "gloo"}'
                )
        total = sum(padded_nbytes(t.untyped_storage().nbytes()) for tensors in moved.values() for t in tensors)
        if path is None:
            check_host_memory(total, on_disk=False)
        copies, start = self._copies(path), 0
        host = torch.empty(0) if copies is None else copies.host_memory(total, torch.uint8)
        disk = self._disk = None if path is None else open_disk(os.fspath(path), total, self._config, self._rank)
        offloaded: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in moved}
        for name, tensor in ((name, tensor) for name, tensors in moved.items() for tensor in tensors):
            flat = _storage_bytes(tensor)
            if disk is not None:
                values = disk.empty(flat.numel(), flat.dtype)
                disk.fill(values, flat)
            else:
                assert copies is not None
                # One piece of page-locked memory holds all values, because locking takes time.
                values, start = host[start : start + flat.numel()], start + padded_nbytes(flat.numel())
                copies.copy(values, flat)
            offloaded[name].append((tensor, values))
        if copies is not None:
            copies.synchronize()
        self._offloaded = offloaded
        for pairs in offloaded.values():
            for tensor, _ in pairs:
                # The tensor keeps its identity and shape; only its storage is freed.
                tensor.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            # The memory is for another allocator, such as that of a sampling engine.
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Bring all states back. If there is too little memory for them this raises, and they stay away."""
        pairs = [pair for pairs in self._offloaded.values() for pair in pairs]
        try:
            for tensor, values in pairs:
                tensor.untyped_storage().resize_(values.nbytes)
                # The advice for huge pages went with the old memory.
                ops.advise_huge_pages(tensor)
        except BaseException:
            for tensor, _ in pairs:
                tensor.untyped_storage().resize_(0)
            raise
        copies = self._copies(self._disk)
        for tensor, values in pairs:
            if copies is not None:
                copies.copy(_storage_bytes(tensor), values)
            else:
                populate(values)
                _storage_bytes(tensor).copy_(values)
                if self._disk is not None:
                    self._disk.evict(values)
        if copies is not None:
            copies.synchronize()
        self._offloaded = {}
        if self._disk is not None:
            # The files served this one time. Closing them frees their space.
            self._disk.close()
            self._disk = None
        postponed, self._postponed = self._postponed, []
        for action in postponed:
            action()

    def when_resident(self, action: Callable[[], object], required: Iterable[str]) -> None:
        """Call ``action`` now, or after ``reload`` if any of the states ``required`` is away."""
        if any(name in self._offloaded for name in required):
            self._postponed.append(action)
        else:
            action()

    def check_resident(self, action: str, required: Iterable[str] = OFFLOADABLE_STATES) -> None:
        """Check that the states that ``action`` needs are on the device.

        Raises:
            ZeroEngineError: Some of them are offloaded.
        """
        missing = [name for name in required if name in self._offloaded]
        if missing:
            raise ZeroEngineError(
                f"{action} while the {', '.join(missing)} are offloaded: call engine.reload_states() before"
            )

    def _copies(self, disk: object) -> GPUCopies | None:
        """Return what copies between the device and page-locked memory; None with a disk, or where both are one."""
        zero = self._config.zero_optimization
        pin = zero.offload_optimizer.pin_memory and zero.offload_param.pin_memory
        return GPUCopies(self._device, pin=pin) if disk is None and self._device.type == "cuda" else None


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor`` that are in memory: 0 while it is offloaded."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
