"""States that leave the device for a while, so that another job can have its memory, and come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .. import ops
from ..errors import ZeroEngineError
from .store import DiskStore

STATES = ("optimizer", "gradients", "parameters")


class Parking:
    """Where states of one engine are while they are away. Their tensors stay what they are, without memory."""

    def __init__(self) -> None:
        self._away: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by state: the tensor, and its values

    def __bool__(self) -> bool:
        return bool(self._away)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self._away)

    def leave(self, states: Mapping[str, Iterable[torch.Tensor]], disk: DiskStore | None) -> None:
        """Takes ``states`` to CPU memory, or to ``disk``.

        Raises:
            ZeroEngineError: memory that cannot be given back; nothing has left then.
        """
        tensors = {name: [t for t in of if t.untyped_storage().nbytes()] for name, of in states.items()}
        for name, of in tensors.items():
            if not all(t.untyped_storage().resizable() for t in of):
                raise ZeroEngineError(
                    f"offload_states(): the {name} are in memory that the ranks share, which cannot be given back: "
                    'leave them out of `include`, or write "comm": {"transport": "gloo"}'
                )
        for name, of in tensors.items():
            away = self._away.setdefault(name, [])
            for tensor in of:
                flat = tensor.detach().view(-1)
                values = torch.empty_like(flat, device="cpu") if disk is None else disk.empty(flat.numel(), flat.dtype)
                away.append((tensor, values.copy_(flat)))
                tensor.untyped_storage().resize_(0)
                if disk is not None:
                    disk.let_go()

    def come_back(self) -> None:
        """Every tensor has its memory and its values again."""
        while self._away:
            _, away = self._away.popitem()
            for tensor, values in away:
                tensor.untyped_storage().resize_(values.nbytes)
                ops.advise_huge_pages(tensor)
                tensor.detach().view(-1).copy_(values)

    def check(self, what: str, needs: Iterable[str] = STATES) -> None:
        """
        Raises:
            ZeroEngineError: ``what`` needs states that are away.
        """
        missing = [name for name in needs if name in self._away]
        if missing:
            raise ZeroEngineError(
                f"{what} while the {' and '.join(missing)} are offloaded: call engine.reload_states() before"
            )


def held(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor`` that are in memory: none while it is away."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
