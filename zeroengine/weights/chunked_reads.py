"""Read tensors from the files of a DCP checkpoint in bounded memory, each file once and from start to end.

A file is a row of items, each of them a zip archive that `torch.save` wrote for one tensor, without compression. So a
tensor's bytes lie side by side within the file, and a few bytes around them say where and of what dtype.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from zeroengine.checkpoint.dcp_metadata import FileWindow, StoredPiece
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import Report
from zeroengine.utils.safe_pickle import AllowList, SafeUnpickler

# A chunk has so many bytes, a multiple of every dtype's size.
CHUNK = 1 << 22
# So many buffers of one chunk each are in use.
NUM_BUFFERS = 4
# The system is asked to read so many bytes beforehand.
READAHEAD = 1 << 24

# Takes some of a piece's elements: the piece, the index of the first of them, and their values (1-D), which are valid
# until it returns.
TakeValues = Callable[[StoredPiece, int, torch.Tensor], None]


@dataclass(frozen=True)
class LocatedPiece:
    """A piece, and where its elements are.

    Attributes:
        start: The first byte of its elements within the file.
        dtype: The dtype of its elements; None where it is not known, and the item must be loaded as a whole.
        crc: The CRC-32 of the elements' bytes; 0 where it is not known.
    """

    piece: StoredPiece
    start: int
    dtype: torch.dtype | None
    crc: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes to read: the elements, or the whole item."""
        return self.piece.length if self.dtype is None else math.prod(self.piece.sizes) * self.dtype.itemsize


def locate(path: Path, pieces: Iterable[StoredPiece]) -> list[LocatedPiece]:
    """Return where the elements of pieces are, all in the file `path`, in the order in which they lie there."""
    with open(path, "rb") as file:
        located = [_locate(FileWindow(file, piece.start, piece.length), piece) for piece in pieces]
    return sorted(located, key=lambda piece: piece.start)


def read_pieces(
    path: Path, pieces: Iterable[LocatedPiece], take_values: TakeValues, report: Report, *, check: str
) -> str | None:
    """Read the elements of pieces, all in the file `path`.

    Args:
        path: The file.
        pieces: The pieces, in the order of their positions.
        take_values: Takes the elements.
        report: Takes the number of bytes read since its last call.
        check: "file" reads all of the file for its checksum; "pieces" compares the checksums of the pieces; "nothing".

    Returns:
        The file's XXH3 checksum, where it is asked for.

    Raises:
        CheckpointError: The file is cut short, or the checksum of a piece differs.
    """
    total = xxhash.xxh3_64() if check == "file" else None
    crc, item = 0, bytearray()
    # Python's own buffer would copy every chunk once more.
    with open(path, "rb", buffering=0) as file:
        ranges = _ranges_to_read(pieces, path.stat().st_size if total is not None else None)
        for (located, start, stop), data in _read_ahead(file, path, ranges, total):
            report(len(data))
            # Bytes between the pieces are read only for the checksum of the file.
            if located is None:
                continue
            is_last = stop == located.start + located.nbytes
            # An item of an unusual kind can only be read as a whole by torch.load, so its chunks are collected.
            if located.dtype is None:
                item += data
                if is_last:
                    take_values(located.piece, 0, _load_item(item, located.piece))
                    item = bytearray()
                continue
            first = (start - located.start) // located.dtype.itemsize
            take_values(located.piece, first, torch.frombuffer(data, dtype=located.dtype))
            if check == "pieces":
                # The checksum of a piece runs over its chunks, and starts anew with each piece.
                crc = zlib.crc32(data, 0 if start == located.start else crc)
                # A checksum of 0 means that none was stored.
                if is_last and located.crc and crc != located.crc:
                    raise CheckpointError(f"{path} has been changed: the checksum of {located.piece.name} differs")
    return None if total is None else total.hexdigest()


# A piece, or None for bytes between pieces, and the first byte and the end of one chunk of it.
_Range = tuple["LocatedPiece | None", int, int]


def read_at(file: io.FileIO, path: Path, buffer: memoryview, position: int) -> None:
    """Fill `buffer` with the bytes of the file that begin at `position`.

    Raises:
        CheckpointError: The file ends before.
    """
    # One call may return fewer bytes than were asked for, for example after a signal.
    while buffer:
        count = os.preadv(file.fileno(), [buffer], position)
        if not count:
            raise CheckpointError(f"{path} is cut short")
        buffer, position = buffer[count:], position + count


def _ranges_to_read(pieces: Iterable[LocatedPiece], size: int | None) -> Iterator[_Range]:
    """Yield the chunks of each piece and, where `size` is given, of what lies between and behind them, in order."""
    runs: list[_Range] = []
    end = 0
    for located in pieces:
        runs += [(None, end, located.start), (located, located.start, located.start + located.nbytes)]
        end = located.start + located.nbytes
    runs.append((None, end, size or 0))
    for located_run, start, stop in runs:
        if located_run is not None or size is not None:
            for first in range(start, stop, CHUNK):
                yield located_run, first, min(first + CHUNK, stop)


def _read_ahead(
    file: io.FileIO, path: Path, ranges: Iterable[_Range], total: Any
) -> Iterator[tuple[_Range, memoryview]]:
    """Yield each range with its bytes, which are valid until the next one is asked for.

    A thread reads and hashes the next ranges meanwhile. There are no more buffers than ranges under way, plus the one
    that the caller uses.
    """
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(NUM_BUFFERS)]
    pending: deque[tuple[_Range, Future[memoryview]]] = deque()

    def fill(view: memoryview, position: int) -> memoryview:
        # Filling a buffer releases the interpreter's lock, so reading goes on while the caller converts values.
        read_at(file, path, view, position)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), position + len(view), READAHEAD, os.POSIX_FADV_WILLNEED)
        # The hash runs in this thread, in the order of the file, for the ranges are submitted in that order.
        if total is not None:
            total.update(view)
        return view

    with ThreadPoolExecutor(1, "zeroengine-read") as reader:
        for i, range_ in enumerate(ranges):
            # The buffer of the oldest range is reused only after the caller has come back for the next one.
            if len(pending) == NUM_BUFFERS - 1:
                first, filled = pending.popleft()
                yield first, filled.result()
            _, start, stop = range_
            pending.append((range_, reader.submit(fill, buffers[i % NUM_BUFFERS][: stop - start], start)))
        while pending:
            first, filled = pending.popleft()
            yield first, filled.result()


# -- Where an item keeps its elements -------------------------------------------------------------


def _describe_tensor(
    storage: tuple[torch.dtype, str], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> tuple[str, torch.dtype, int, tuple[int, ...]]:
    """Return a contiguous tensor's storage key, dtype, offset in elements, and sizes."""
    dtype, key = storage
    # Only contiguous tensors can be read as one run of bytes.
    if not torch.empty_strided(size, stride, dtype=dtype, device="meta").is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return key, dtype, offset, tuple(size)


_ALLOW_LIST = AllowList(
    {"torch._utils._rebuild_tensor_v2": _describe_tensor, "collections.OrderedDict": OrderedDict}
    | {f"torch.{name}": dtype for name, dtype in torch.storage._storage_type_to_dtype_map().items()}
)


def _locate(item: FileWindow, piece: StoredPiece) -> LocatedPiece:
    """Return where a piece's elements are, or the piece as a whole where its item is not as usual."""
    # Whatever is wrong with the item, torch.load reports it when the item is read.
    with contextlib.suppress(Exception):
        archive = zipfile.ZipFile(item)
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        checksums = {name: info.CRC for name, info in entries.items()}
        for info in entries.values():
            # torch can be told to leave checksums unset, and zipfile would compare them all the same.
            info.CRC = info.CRC or None  # type: ignore[assignment]
        unpickler = SafeUnpickler(io.BytesIO(archive.read(entries["data.pkl"])), _ALLOW_LIST)
        # Not a method of SafeUnpickler: torch.load sets the attribute, which a method would hide from the unpickler.
        # A persistent id is of the form ("storage", dtype, key, location, number of elements).
        unpickler.persistent_load = lambda persistent_id: persistent_id[1:3]  # type: ignore[method-assign]
        key, dtype, offset, size = unpickler.load()
        data, nbytes = entries[f"data/{key}"], math.prod(size) * dtype.itemsize
        if (
            # torch.load swaps the bytes of a file from a machine of another byte order, and this reader does not.
            ("byteorder" not in entries or archive.read(entries["byteorder"]) == b"little")
            and size == piece.sizes
            and data.compress_type == zipfile.ZIP_STORED
            # A damaged description could otherwise make the reader take bytes of another item.
            and offset * dtype.itemsize + nbytes <= data.file_size
        ):
            # Opening an entry reads its local header and moves to its content.
            with archive.open(data):
                start = piece.start + item.tell() + offset * dtype.itemsize
            # The stored checksum covers the whole storage, so it helps only where the piece is all of it.
            crc = checksums[f"data/{key}"] if nbytes == data.file_size else 0
            return LocatedPiece(piece, start, dtype, crc)
    return LocatedPiece(piece, piece.start, None)


def _load_item(item: bytearray, piece: StoredPiece) -> torch.Tensor:
    """Return the elements (1-D) of a whole item.

    Raises:
        CheckpointError: It is not the tensor that the metadata says.
    """
    tensor = torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.sizes:
        raise CheckpointError(f"{piece.file} does not hold what it is said to of {piece.name}")
    return tensor.detach().contiguous().view(-1)
