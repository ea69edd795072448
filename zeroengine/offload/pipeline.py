"""States that live elsewhere, brought through a few buffers: reads, computation and writes beside one another.

buffer 0   read a . . compute a . . write a . . . . . read d
buffer 1   . . read b . . . . compute b . . write b
buffer 2   . . . . read c . . . . . . . compute c . . write c
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from zeroengine.disk.aligned_memory import aligned_empty
from zeroengine.offload.device_copies import Copies
from zeroengine.offload.disk_store import StateStore, padded_nbytes, poison_on_error
from zeroengine.utils.work import Work


@dataclass(frozen=True)
class Stream:
    """One state's part in a piece of work: where it lives, and which ways it goes."""

    home: torch.Tensor  # 1-D; in a `StateStore` it is moved, elsewhere it is used where it is
    reads: bool = True
    writes: bool = False


@dataclass(frozen=True)
class Piece:
    """Equal parts of several states, and what is to be done with them."""

    streams: Sequence[Stream]
    compute: Callable[..., None]  # with a tensor of each stream


@dataclass
class _Buffer:
    memory: torch.Tensor  # bytes
    writes: list[Work] = field(default_factory=list)

    def free(self) -> None:
        """Returns when everything that left from here has arrived."""
        while self.writes:
            self.writes.pop().wait_host()


@dataclass
class _Loading:
    piece: Piece
    buffer: _Buffer
    tensors: list[torch.Tensor]
    reads: list[Work]
    writes: list[tuple[StateStore, torch.Tensor, torch.Tensor]]  # from where, and which state


class Pipeline:
    """Runs pieces over states, some of which are elsewhere. Its buffers are kept.

    Args:
        homes: of the states that are moved.
        num_buffers: at least three.
        piece_numel: elements of a piece at most. A multiple of 4096, so that every piece begins at a block.
        element_bytes: of all the streams of a piece together that are moved, at most.
        copies: between host and device, where states are on a GPU.
    """

    def __init__(
        self,
        homes: Sequence[StateStore],
        num_buffers: int,
        piece_numel: int,
        element_bytes: int,
        copies: Copies | None = None,
    ) -> None:
        assert num_buffers >= 3 and not piece_numel % 4096
        self._homes, self._copies, self.piece_numel = homes, copies, piece_numel
        empty = aligned_empty if copies is None else copies.host_memory
        self._buffers = [_Buffer(empty(piece_numel * element_bytes, torch.uint8)) for _ in range(num_buffers)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def wait_stream(self) -> None:
        """Order later kernels of the device's current stream behind what was moved so far."""
        if self._copies is not None:
            self._copies.wait_stream()

    def home_of(self, tensor: torch.Tensor) -> StateStore | None:
        """Where a state lives that is moved; None: it is used where it is."""
        return next((home for home in self._homes if home.holds(tensor)), None)

    def run(self, pieces: Iterable[Piece]) -> None:
        """Returns when every piece is computed and its results are where they belong.

        Raises:
            OffloadError: a read or write failed; some pieces are done and some are not, and their homes know it.
        """
        with poison_on_error(*self._homes):
            if self._copies is not None:
                self._copies.synchronize()  # what was on its way from states that are now to be written
            self._run(pieces)

    def _run(self, pieces: Iterable[Piece]) -> None:
        waiting: deque[_Loading] = deque()
        rest = iter(pieces)
        turn = 0
        try:
            while True:
                while len(waiting) < len(self._buffers) - 2 and (piece := next(rest, None)) is not None:
                    waiting.append(self._start(piece, self._buffers[turn]))
                    turn = (turn + 1) % len(self._buffers)
                if not waiting:
                    break
                self._finish(waiting.popleft())
        finally:
            for loading in waiting:  # only where something failed
                _settle(loading.reads)
            failures = [error for buffer in self._buffers if (error := _settle(buffer.writes)) is not None]
        if failures:
            raise failures[0]

    def _start(self, piece: Piece, buffer: _Buffer) -> _Loading:
        buffer.free()
        loading = _Loading(piece, buffer, [], [], [])
        end = 0
        for stream in piece.streams:
            home = stream.home
            store = self.home_of(home)
            if store is None:
                loading.tensors.append(home)
                continue
            start, end = end, end + padded_nbytes(home.nbytes)
            part = buffer.memory[start : start + home.nbytes].view(home.dtype)
            loading.tensors.append(part)
            if stream.reads:
                loading.reads.append(store.read(home, part))
            if stream.writes:
                loading.writes.append((store, part, home))
        return loading

    def _finish(self, loading: _Loading) -> None:
        while loading.reads:
            loading.reads.pop(0).wait_host()
        loading.piece.compute(*loading.tensors)
        loading.buffer.writes += [store.write(part, home) for store, part, home in loading.writes]


def _settle(transfers: list[Work]) -> Exception | None:
    """Waits for all of them, and gives the first error."""
    first = None
    while transfers:
        try:
            transfers.pop().wait_host()
        except Exception as error:
            first = first or error
    return first
