"""The memory of parameters while modules are built: most of it is empty, and filled again for a use.

All of it is one thread's. What another one writes to a parameter shows in the parameter's version counter alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroengine.deferred_init.trace import Version, replay
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.malloc_trim import return_freed_memory


@dataclass
class Holder:
    """A parameter that was seen in a storage."""

    param: weakref.ref[nn.Parameter]
    name: str
    writes: int  # as torch counts them, that were seen
    coming: int = 0  # that torch may count when the operation has returned


@dataclass(eq=False)
class Known:
    """What is known of a storage. It goes when the storage goes.

    Attributes:
        version: of its values; None where nothing could make them again.
        why: nothing could.
        address: what gave its memory away; it must stay where it is.
    """

    number: int
    owner: object
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    version: Version | None = None
    why: str = ""
    address: str = ""
    empty: bool = False
    params: list[Holder] = field(default_factory=list)

    def holders(self) -> list[tuple[Holder, nn.Parameter]]:
        """Of the parameters that were seen here those that still are."""
        alive = self.storage()
        pairs = [(holder, param) for holder in self.params if (param := holder.param()) is not None]
        return [(h, param) for h, param in pairs if not param.is_meta and param.untyped_storage() is alive]

    def as_bytes(self) -> torch.Tensor:
        alive = self.storage()
        assert alive is not None
        return torch.empty(0, dtype=torch.uint8, device=alive.device).set_(alive, 0, (self.nbytes,), (1,))

    def check(self) -> None:
        """
        Raises:
            ZeroEngineError: a parameter here was written, and nobody saw how.
        """
        for holder, param in self.holders():
            unseen = param._version > holder.writes + holder.coming
            holder.writes, holder.coming = param._version, 0
            if unseen:
                raise ZeroEngineError(
                    f"{holder.name}, of shape {tuple(param.shape)}, was written where zeroengine.meta_init() cannot "
                    "see it, such as in another thread: its values would be lost. Build the model in the thread that "
                    "entered the `with`."
                )


class Room:
    """The storages of parameters that are in memory.

    Args:
        nbytes: that they may have together, beside the one used last and those in use.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        self._full: dict[Known, None] = {}  # the least recently used first
        self._nbytes = 0
        self._freed = 0  # bytes since they were given back

    def use(self, known: Known, *, values: bool = True) -> None:
        """``known`` is about to be used, or was.

        Args:
            values: whether they are read.
        """
        if known.empty:
            self._fill(known, values)
        if not known.params or known.why:
            return
        if known in self._full:
            del self._full[known]
        else:
            self._nbytes += known.nbytes
        self._full[known] = None

    def make(self, busy: Container[Known] = ()) -> None:
        """Empties what was not used for long, if too much is full."""
        if self._nbytes <= self._most:
            return
        self._full = {known: None for known in self._full if known.storage() is not None and not known.why}
        before = self._nbytes = sum(known.nbytes for known in self._full)
        for known in list(self._full)[:-1]:
            if self._nbytes <= self._most // 2:
                break
            if known not in busy:
                self.empty(known)
        self._freed += before - self._nbytes
        if self._freed > self._most // 2:
            self._freed = 0
            return_freed_memory()

    def close(self) -> None:
        self._full.clear()

    def empty(self, known: Known) -> None:
        """Frees the memory, but not of what cannot be resized."""
        known.check()
        alive = known.storage()
        assert alive is not None
        if known in self._full:
            del self._full[known]
            self._nbytes -= known.nbytes
        if alive.resizable() and known.nbytes:
            alive.resize_(0)
            known.empty = True

    def _fill(self, known: Known, values: bool) -> None:
        alive = known.storage()
        assert alive is not None
        alive.resize_(known.nbytes)
        known.empty = False
        if not values:
            return
        if known.version is not None:
            replay(known.version, known.number, known.as_bytes())
        else:
            known.as_bytes().zero_()
