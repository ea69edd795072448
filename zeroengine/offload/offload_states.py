"""States that leave the device for a while, so that another job can have its memory, and come back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from zeroengine import ops
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.disk_store import DiskStore, padded_nbytes
from zeroengine.offload.placement import open_disk
from zeroengine.utils.paths import checked_path

STATES = ("optimizer", "gradients", "parameters")
USUAL = ("optimizer", "gradients")


class StateOffloader:
    """Where states of one engine are while they are away. Their tensors stay what they are, without memory."""

    def __init__(self) -> None:
        self._away: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by state: the tensor, and its values
        self._disk: DiskStore | None = None  # where values are, if not in CPU memory

    def __bool__(self) -> bool:
        return bool(self._away)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self._away)

    def check_request(
        self,
        include: Iterable[str] | None,
        device: str,
        nvme_path: str | os.PathLike[str] | None,
        configured: str | None,
    ) -> str | None:
        """Return the folder that the states go to, or None for CPU memory.

        Args:
            nvme_path: as passed to ``offload_states``.
            configured: the folder of the configuration, where ``nvme_path`` is None.

        Raises:
            ZeroEngineError: what was asked of ``offload_states`` cannot be.
        """
        for name in include or ():
            if name not in STATES:
                raise ZeroEngineError(f"offload_states(): include has {name!r}; write any of {', '.join(STATES)}")
        if device not in ("cpu", "nvme"):
            raise ZeroEngineError(f'offload_states(): device is {device!r}; write "cpu" or "nvme"')
        if self:
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
        """Takes ``states`` to CPU memory, or to the folder ``path`` of a disk.

        Raises:
            ZeroEngineError: memory that cannot be given back, or a path that cannot be used; nothing has left then.
        """
        tensors = {name: [t for t in of if t.untyped_storage().nbytes()] for name, of in states.items()}
        for name, of in tensors.items():
            if not all(t.untyped_storage().resizable() for t in of):
                raise ZeroEngineError(
                    f"offload_states(): the {name} are in memory that the ranks share, which cannot be given back: "
                    'leave them out of `include`, or write "comm": {"transport": "gloo"}'
                )
        disk = None
        if path is not None:
            nbytes = sum(padded_nbytes(t.nbytes) for of in tensors.values() for t in of)
            disk = self._disk = open_disk(os.fspath(path), nbytes, config, rank)
        for name, of in tensors.items():
            away = self._away.setdefault(name, [])
            for tensor in of:
                flat = tensor.detach().view(-1)
                values = torch.empty_like(flat, device="cpu") if disk is None else disk.empty(flat.numel(), flat.dtype)
                away.append((tensor, values.copy_(flat)))
                tensor.untyped_storage().resize_(0)
                if disk is not None:
                    disk.evict(values)

    def reload(self, refill: Callable[[torch.Tensor], None]) -> None:
        """Every tensor has its memory, which ``refill`` gives it, and its values again."""
        while self._away:
            _, away = self._away.popitem()
            for tensor, values in away:
                refill(tensor)
                ops.advise_huge_pages(tensor)
                tensor.detach().view(-1).copy_(values)
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def check_resident(self, what: str, needs: Iterable[str] = STATES) -> None:
        """
        Raises:
            ZeroEngineError: ``what`` needs states that are away.
        """
        missing = [name for name in needs if name in self._away]
        if missing:
            raise ZeroEngineError(
                f"{what} while the {' and '.join(missing)} are offloaded: call engine.reload_states() before"
            )


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor`` that are in memory: none while it is away."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
