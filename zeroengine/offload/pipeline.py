"""States on disk, brought through a few buffers: reads, computation and writes beside one another.

buffer 0   read a . . compute a . . write a . . . . . read d
buffer 1   . . read b . . . . compute b . . write b
buffer 2   . . . . read c . . . . . . . compute c . . write c
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .aio import Transfer, aligned_empty
from .store import DiskStore, padded


@dataclass(frozen=True)
class Stream:
    """One state's part in a piece of work: where it lives, and which ways it goes."""

    home: torch.Tensor  # 1-D; on disk it is moved, in memory it is used where it is
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
    writes: list[Transfer] = field(default_factory=list)

    def free(self) -> None:
        """Returns when everything that left from here has arrived."""
        while self.writes:
            self.writes.pop().wait()


@dataclass
class _Loading:
    piece: Piece
    buffer: _Buffer
    tensors: list[torch.Tensor]
    reads: list[Transfer]
    writes: list[tuple[DiskStore, torch.Tensor, torch.Tensor]]  # from where, and which state


class Pipeline:
    """Runs pieces over states, some of which are on disks. Its buffers are kept.

    Args:
        num_buffers: at least three.
        piece_numel: elements of a piece at most. A multiple of 4096, so that every piece begins at a block.
        element_bytes: of all the streams of a piece together, at most.
    """

    def __init__(self, disks: Sequence[DiskStore], num_buffers: int, piece_numel: int, element_bytes: int) -> None:
        assert num_buffers >= 3 and not piece_numel % 4096
        self._disks, self.piece_numel = disks, piece_numel
        self._buffers = [_Buffer(aligned_empty(piece_numel * element_bytes, torch.uint8)) for _ in range(num_buffers)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def disk_of(self, tensor: torch.Tensor) -> DiskStore | None:
        """Where a state lives; None: in memory."""
        return next((disk for disk in self._disks if disk.holds(tensor)), None)

    def run(self, pieces: Iterable[Piece]) -> None:
        """Returns when every piece is computed and its results are on disk.

        Raises:
            OffloadError: a read or write failed; some pieces are done and some are not, and the disks know it.
        """
        try:
            self._run(pieces)
        except BaseException as error:
            for disk in self._disks:
                disk.fail(error)
            raise

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
            disk = self.disk_of(home)
            if disk is None:
                loading.tensors.append(home)
                continue
            start, end = end, end + padded(home.nbytes)
            part = buffer.memory[start : start + home.nbytes].view(home.dtype)
            loading.tensors.append(part)
            if stream.reads:
                loading.reads.append(disk.read(home, part))
            if stream.writes:
                loading.writes.append((disk, part, home))
        return loading

    def _finish(self, loading: _Loading) -> None:
        while loading.reads:
            loading.reads.pop(0).wait()
        loading.piece.compute(*loading.tensors)
        loading.buffer.writes += [disk.write(part, home) for disk, part, home in loading.writes]


def _settle(transfers: list[Transfer]) -> Exception | None:
    """Waits for all of them, and gives the first error."""
    first = None
    while transfers:
        try:
            transfers.pop().wait()
        except Exception as error:
            first = first or error
    return first
