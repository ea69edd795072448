"""The protocols of a store of states, and of copies between a device and the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from zeroengine.disk.aligned_memory import round_up_to_block
from zeroengine.utils.work import Work

T = TypeVar("T")
Medium = Literal["cpu", "nvme"]
# Into device memory, or out of it.
Direction = Literal["in", "out"]


class Copies(Protocol):
    """Copies between one device and the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Work | None = None) -> Work:
        """Start ``target.copy_(source)``. One of the two is on the host.

        Neither may be written, and ``target`` not be read, before the returned work was awaited.

        Args:
            target: The tensor that the values are copied into.
            source: The values, of the same shape and dtype.
            after: The work that the copy is ordered behind. None: the work of the current stream, which inside
                ``on_copy_stream`` is the stream of the copy itself.
        """

    def record_event(self) -> Work:
        """Return a work that is done when everything in the current stream so far is."""

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        """Make the stream of the copies in that direction the current one, ordered behind the one that was current."""

    def wait_stream(self) -> None:
        """Order later kernels of the current stream behind every copy so far."""

    def synchronize(self) -> None:
        """Block the host until every copy so far is done."""

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new 1-D host memory of zeros, of exactly this size, that copies are fast from and to."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` new bytes on the device."""


class Poisonable(Protocol):
    """An owner of states that an error can leave half written."""

    def poison(self, error: BaseException) -> None:
        """Note that an update or a gradient was lost: these states must not be used again."""


class StateStore(Poisonable, Protocol):
    """A place where states live, for those who work on copies of them."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a state that lives here, or a part of one."""

    def read(self, state: torch.Tensor, into: torch.Tensor) -> Work:
        """Start to read a state into memory of as many bytes.

        Args:
            state: A state, or a part of one that begins at a multiple of 4096 bytes.
            into: Page-aligned memory: of ``staging_buffer`` or of a ``Pipeline``, a full buffer, or memory that a
                transport sends from.
        """

    def write(self, source: torch.Tensor, state: torch.Tensor) -> Work:
        """Start to write memory over a state. The arguments are as for ``read``."""


class OffloadStore(StateStore, Protocol):
    """A store outside of the memory of the device that computes, where new states can be made.

    Attributes:
        medium: The kind of memory that the states are in.
        stream_ordered: Whether the device's streams order the transfers, so that a transfer can be issued behind the
            work that it depends on. Otherwise the host waits for one before it issues the other.
    """

    medium: Medium
    stream_ordered: bool

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D state, zeros until written, as a CPU tensor that can be used in place."""

    def fill(self, state: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of a state. This is for rare use, and returns when it is done; ``write`` is faster."""

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        """Return new bytes on the device that ``read`` and ``write`` take."""

    def on_copy_stream(self, direction: Direction) -> AbstractContextManager[Any]:
        """Make the stream of the transfers in that direction current; do nothing where they are in no stream."""

    def record_event(self) -> Work:
        """Return a work that is done when everything in the current stream so far is."""

    def evict(self, *states: torch.Tensor) -> None:
        """Give back the memory that using states in place took. Their values stay."""


@contextmanager
def poison_on_error(*owners: Poisonable) -> Iterator[None]:
    """Poison ``owners`` when the body raises, because a part of their states may be lost then."""
    try:
        yield
    except BaseException as error:
        for owner in owners:
            owner.poison(error)
        raise


class AddressMap(Generic[T]):
    """Values by ranges of addresses."""

    def __init__(self) -> None:
        # Ascending: the first address, the address behind the last one, and the value.
        self._ranges: list[tuple[int, int, T]] = []

    def add(self, address: int, nbytes: int, value: T) -> None:
        """Map ``nbytes`` bytes at ``address``, which overlap no earlier range, to ``value``."""
        # Ranges do not overlap, so their order by address stays fixed.
        index = bisect_right(self._ranges, address, key=lambda entry: entry[0])
        self._ranges.insert(index, (address, address + nbytes, value))

    def find(self, tensor: torch.Tensor) -> T | None:
        """Return the value of the range that ``tensor`` begins in."""
        # The range before the first one that begins behind the address is the only one that can hold it.
        address = tensor.data_ptr()
        index = bisect_right(self._ranges, address, key=lambda entry: entry[0])
        if not index or address >= self._ranges[index - 1][1]:
            return None
        return self._ranges[index - 1][2]

    def values(self) -> list[T]:
        """Return the values of all ranges, by address."""
        return [value for _, _, value in self._ranges]


def padded_nbytes(nbytes: int) -> int:
    """Return the bytes that a state of ``nbytes`` bytes takes in a file: whole blocks, at least one."""
    return round_up_to_block(max(nbytes, 1))
