"""Keeps the memory of parameters within a budget while modules are built.

Most storages are empty at any time. One that is used is filled again by replaying its version. All of this belongs to
one thread: a write by another thread shows in the parameter's version counter alone, which ``check_writes`` compares.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroengine.deferred_init.trace import StorageVersion, replay, storage_bytes
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.host_memory import trim_heap
from zeroengine.utils.torch_internals import version_of


@dataclass
class ParamRef:
    """A parameter that has been seen in a storage."""

    param: weakref.ref[nn.Parameter]
    name: str
    # The value of the parameter's version counter up to which the recorder knows every write.
    num_seen_writes: int
    # The most by which operations that the recorder has seen may have raised the counter since. Autograd raises it only
    # after the recorder has seen the operation, and not for every one.
    num_pending_writes: int = 0


@dataclass(eq=False)
class TrackedStorage:
    """A storage that was made while recording. The storage owns this object.

    Attributes:
        version: The way to its values, or None where they cannot be replayed.
        reason: Why they cannot.
        leaked_by: The function that gave away the address of its memory, which must therefore stay.
        is_empty: The storage has been resized to 0 bytes.
        params: The parameters that have been seen in it.
    """

    number: int
    owner: object  # the recorder
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    version: StorageVersion | None = None
    reason: str = ""
    leaked_by: str = ""
    is_empty: bool = False
    params: list[ParamRef] = field(default_factory=list)

    def live_params(self) -> list[tuple[ParamRef, nn.Parameter]]:
        """Return the parameters that still exist and still lie in this storage."""
        storage = self.storage()
        # A parameter may have been freed, moved to the meta device or given other data since it was seen here.
        pairs = [(ref, param) for ref in self.params if (param := ref.param()) is not None]
        return [(ref, param) for ref, param in pairs if not param.is_meta and param.untyped_storage() is storage]

    def live_storage(self) -> torch.UntypedStorage:
        """Return the storage, which still exists."""
        storage = self.storage()
        assert storage is not None
        return storage

    def as_bytes(self) -> torch.Tensor:
        """Return the storage as a tensor (1-D, uint8)."""
        # A parameter's own view would have its shape and dtype, and might cover only a part of the storage.
        return storage_bytes(self.live_storage())

    def check_writes(self) -> None:
        """Check that the recorder has seen every write to the parameters in this storage.

        Raises:
            ZeroEngineError: It has not, so the values could not be replayed.
        """
        for ref, param in self.live_params():
            unseen = version_of(param) > ref.num_seen_writes + ref.num_pending_writes
            # The counters are brought up to date before the error, so that it is raised once.
            ref.num_seen_writes, ref.num_pending_writes = version_of(param), 0
            if unseen:
                raise ZeroEngineError(
                    f"{ref.name}, of shape {tuple(param.shape)}, was written where zeroengine.meta_init() cannot "
                    "see it, such as in another thread: its values would be lost. Build the model in the thread that "
                    "entered the `with`."
                )


class StorageCache:
    """The parameters' storages that are in memory, least recently used first.

    Args:
        nbytes: The budget for all of them, beside the one used last and those in use.
    """

    def __init__(self, nbytes: int) -> None:
        self._budget_bytes = nbytes
        self._resident: OrderedDict[TrackedStorage, None] = OrderedDict()
        self._resident_bytes = 0
        # Bytes that were freed since memory was last returned to the system.
        self._freed_bytes = 0

    def touch(self, tracked: TrackedStorage, *, values: bool = True) -> None:
        """Fill a storage that is about to be used, and make it the most recently used one.

        Args:
            values: Whether its values are read.
        """
        if tracked.is_empty:
            self._fill(tracked, values)
        # Only parameters are emptied. What cannot be replayed stays in memory and is no part of the budget.
        if not tracked.params or tracked.reason:
            return
        if tracked not in self._resident:
            self._resident[tracked] = None
            self._resident_bytes += tracked.nbytes
        self._resident.move_to_end(tracked)

    def evict(self, busy: Container[TrackedStorage] = ()) -> None:
        """Empty the least recently used storages, down to half of the budget, if it is exceeded. Keep the ``busy``."""
        if self._resident_bytes <= self._budget_bytes:
            return
        # Storages may have died, or become ones that cannot be replayed, since they were listed.
        resident = (tracked for tracked in self._resident if tracked.storage() is not None and not tracked.reason)
        self._resident = OrderedDict.fromkeys(resident)
        before = self._resident_bytes = sum(tracked.nbytes for tracked in self._resident)
        # The last one was used just now, and its next use is likely to come soon. Half of the budget is freed, so that
        # not every operation evicts.
        for tracked in list(self._resident)[:-1]:
            if self._resident_bytes <= self._budget_bytes // 2:
                break
            if tracked not in busy:
                self.free(tracked)
        self._freed_bytes += before - self._resident_bytes
        # The C library keeps freed memory for itself, and the process would not shrink. Returning it is slow, so it is
        # done now and then.
        if self._freed_bytes > self._budget_bytes // 2:
            self._freed_bytes = 0
            trim_heap()

    def free(self, tracked: TrackedStorage) -> None:
        """Free the memory of a storage, unless it cannot be resized."""
        # What another thread has written could not be replayed, so it is an error before the values are gone.
        tracked.check_writes()
        storage = tracked.live_storage()
        if tracked in self._resident:
            del self._resident[tracked]
            self._resident_bytes -= tracked.nbytes
        # Memory that torch did not allocate, such as numpy's, cannot be resized.
        if storage.resizable() and tracked.nbytes:
            storage.resize_(0)
            tracked.is_empty = True

    def _fill(self, tracked: TrackedStorage, values: bool) -> None:
        tracked.live_storage().resize_(tracked.nbytes)
        tracked.is_empty = False
        if values and tracked.version is not None:
            replay(tracked.version, tracked.number, tracked.as_bytes())
        elif values:
            tracked.as_bytes().zero_()
