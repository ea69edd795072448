"""The protocols of a store of states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from zeroengine.disk.aligned_memory import round_up_to_block
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.utils.work import Work

Medium = Literal["cpu", "nvme"]


class StateStore(Protocol):
    """A place where states live, for users that work on copies of them."""

    def poison(self, error: BaseException) -> None:
        """Record that an update or a gradient was lost: these states must not be used again."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a state that lives here, or a part of one."""

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to read a state into memory of as many bytes.

        Args:
            state: A state, or a part of one that begins at a multiple of 4096 bytes.
            into: Page-aligned memory: of ``GPUCopies.device_memory`` or of a ``Pipeline``, a full buffer, or memory
                that a transport sends from.
        """

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to write memory over a state. The arguments are as for ``read``."""


class OffloadStore(StateStore, Protocol):
    """A store outside of the memory of the device that computes, where new states can be made.

    Attributes:
        medium: The kind of memory that the states are in.
    """

    medium: Medium

    @property
    def copies(self) -> GPUCopies | None:
        """Copies between the device and the host, whose streams order the transfers; None if the device is the CPU.

        With streams a transfer can be issued behind the work that it depends on. Without them the host first waits for
        that work.
        """

    def empty(self, numel: int, dtype: torch.dtype, *, allocated: bool = True) -> torch.Tensor:
        """Return a new 1-D state of zeros, as a CPU tensor that can be used in place.

        Args:
            numel: The number of elements.
            dtype: Their dtype.
            allocated: Whether it must have room on a disk now. Otherwise it may take it when it gets values.
        """

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of a state, and return when it is done. For rare use: ``write`` is faster."""

    def evict(self, *states: torch.Tensor) -> None:
        """Free the memory that using states in place took. Their values stay."""

    def close(self) -> None:
        """End the transfers under way, and free what the store holds."""


@contextmanager
def poison_on_error(*stores: StateStore) -> Iterator[None]:
    """Poison ``stores`` if the body raises, because a part of their states may be lost."""
    try:
        yield
    except BaseException as error:
        for store in stores:
            store.poison(error)
        raise


def padded_nbytes(nbytes: int) -> int:
    """Return the bytes that a state of ``nbytes`` bytes takes in a file: whole blocks, at least one."""
    return round_up_to_block(max(nbytes, 1))


def device_memory_for(store: OffloadStore, state: torch.Tensor) -> torch.Tensor:
    """Return new memory on the device that a state of ``store``, which has streams, can be read into."""
    assert store.copies is not None
    return store.copies.device_memory(padded_nbytes(state.nbytes))[: state.nbytes].view(state.dtype)
