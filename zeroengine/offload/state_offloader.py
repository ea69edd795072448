"""Move states off the device for a while, so that another job can use its memory, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from zeroengine import ops
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.interfaces import padded_nbytes
from zeroengine.offload.placement import open_disk
from zeroengine.utils.paths import checked_path

OFFLOADABLE_STATES = ("optimizer", "gradients", "parameters")
DEFAULT_STATES = ("optimizer", "gradients")


class StateOffloader:
    """Moves states of one engine off the device and back. Tensors stay the same objects, without memory in between."""

    def __init__(self) -> None:
        # By state: each tensor, and its values in CPU memory or on a disk.
        self._offloaded: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # The store of the values, if they are not in CPU memory.
        self._disk: DiskStore | None = None

    @property
    def has_offloaded_states(self) -> bool:
        """Return whether any states are off the device."""
        return bool(self._offloaded)

    def holds(self, name: str) -> bool:
        """Return whether the state ``name`` is away."""
        return name in self._offloaded

    def check_request(
        self,
        include: Iterable[str] | None,
        device: str,
        nvme_path: str | os.PathLike[str] | None,
        configured: str | None,
    ) -> str | None:
        """Return the folder that the states go to, or None for CPU memory.

        Args:
            include: The states, as passed to ``offload_states``.
            device: "cpu" or "nvme", as passed to ``offload_states``.
            nvme_path: As passed to ``offload_states``.
            configured: The folder in the configuration, used if ``nvme_path`` is None.

        Raises:
            ZeroEngineError: The arguments of ``offload_states`` are wrong, or states are already offloaded.
        """
        for name in include or ():
            if name not in OFFLOADABLE_STATES:
                raise ZeroEngineError(
                    f"offload_states(): include has {name!r}; write any of {', '.join(OFFLOADABLE_STATES)}"
                )
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
        if device == "nvme" and configured is None:
            raise ZeroEngineError('offload_states(): device "nvme" needs a folder on a disk: write nvme_path=...')
        return configured if device == "nvme" else None

    def offload(
        self,
        states: Mapping[str, Sequence[torch.Tensor]],
        path: str | os.PathLike[str] | None,
        config: Config,
        rank: int,
    ) -> None:
        """Move states to CPU memory, or to the folder ``path`` of a disk, and free their memory.

        Args:
            states: The tensors of each state.
            path: The folder; None: CPU memory.
            config: The configuration, for the settings that drive a disk.
            rank: This process's rank, for messages.

        Raises:
            ZeroEngineError: Memory cannot be freed, or a path cannot be used. Then nothing was moved.
        """
        # Whole storages move, each once, because states of an optimizer may be transposed, or share one. A tensor
        # without memory, such as the full buffer of a released unit, has nothing to move.
        moved = {
            name: {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}.values()
            for name, tensors in states.items()
        }
        # All checks come before the first tensor moves, so that an error leaves everything in place.
        for name, tensors in moved.items():
            if not all(t.untyped_storage().resizable() for t in tensors):
                raise ZeroEngineError(
                    f"offload_states(): the {name} are in memory that the ranks share, which cannot be given back: "
                    'leave them out of `include`, or write "comm": {"transport": "gloo"}'
                )
        disk = None
        if path is not None:
            nbytes = sum(padded_nbytes(t.untyped_storage().nbytes()) for tensors in moved.values() for t in tensors)
            disk = self._disk = open_disk(os.fspath(path), nbytes, config, rank)
        for name, tensors in moved.items():
            pairs = self._offloaded.setdefault(name, [])
            for tensor in tensors:
                flat = _storage_bytes(tensor)
                values = torch.empty_like(flat, device="cpu") if disk is None else disk.empty(flat.numel(), flat.dtype)
                pairs.append((tensor, values.copy_(flat)))
                # The tensor keeps its identity and shape; only its storage is freed.
                tensor.untyped_storage().resize_(0)
                if disk is not None:
                    # The copy left the mapped pages in memory.
                    disk.evict(values)

    def reload(self) -> None:
        """Bring all states back."""
        while self._offloaded:
            _, pairs = self._offloaded.popitem()
            for tensor, values in pairs:
                tensor.untyped_storage().resize_(values.nbytes)
                # The advice for huge pages went with the old memory.
                ops.advise_huge_pages(tensor)
                _storage_bytes(tensor).copy_(values)
        if self._disk is not None:
            # The files served this one time. Closing them frees their space.
            self._disk.close()
            self._disk = None

    def check_resident(self, action: str, required: Iterable[str] = OFFLOADABLE_STATES) -> None:
        """Check that the states that ``action`` needs are on the device.

        Raises:
            ZeroEngineError: Some of them are offloaded.
        """
        missing = [name for name in required if name in self._offloaded]
        if missing:
            raise ZeroEngineError(
                f"{action} while the {' and '.join(missing)} are offloaded: call engine.reload_states() before"
            )


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor`` that are in memory: 0 while it is offloaded."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
