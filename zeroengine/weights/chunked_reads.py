"""Tensors in the files of a DCP checkpoint, read as the files lie: each once, from its start to its end, in chunks.

A file is a row of items, each of them what ``torch.save`` makes of one tensor: a zip archive that compresses nothing.
So a tensor's bytes lie side by side somewhere within it, and a few bytes around them say where and of what dtype.
"""

from __future__ import annotations

import io
import math
import os
import pickle
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

from zeroengine.checkpoint.dcp_metadata import ByteRange, StoredPiece, Window
from zeroengine.errors import CheckpointError

CHUNK = 1 << 22  # bytes; a multiple of every dtype's size
NUM_BUFFERS = 4  # of a chunk each
AHEAD = 1 << 24  # bytes that the system is asked to read on
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}

Take = Callable[
    [StoredPiece, int, torch.Tensor], None
]  # its elements from the first given on, 1-D; good until it returns


@dataclass(frozen=True)
class LocatedPiece:
    """A piece, and where its elements are."""

    piece: StoredPiece
    start: int  # its first byte within the file
    dtype: torch.dtype | None  # None: not known, the item is to be loaded as a whole
    crc: int = 0  # of its bytes, CRC-32; 0: not known

    @property
    def nbytes(self) -> int:
        return self.piece.length if self.dtype is None else math.prod(self.piece.sizes) * self.dtype.itemsize


def locate(path: Path, pieces: Iterable[StoredPiece]) -> list[LocatedPiece]:
    """``pieces``, all of the file ``path``, in the order in which they lie there."""
    with open(path, "rb") as file:
        found = [_locate(_Archive(file, ByteRange(piece.start, piece.length)), piece) for piece in pieces]
    return sorted(found, key=lambda one: one.start)


def read(
    path: Path, located: Iterable[LocatedPiece], take: Take, report: Callable[[int], None], *, check: str
) -> str | None:
    """Gives ``take`` the elements of pieces, all of the file ``path``.

    Args:
        check: ``file`` reads all of it, for its checksum; ``pieces`` compares those of the pieces; or ``nothing``.

    Returns:
        The file's checksum, where it is asked for.

    Raises:
        CheckpointError: the file is cut short, or the checksum of a piece differs.
    """
    total = xxhash.xxh3_64() if check == "file" else None
    crc, item = 0, bytearray()
    with open(path, "rb", buffering=0) as file:
        ranges = _ranges(located, path.stat().st_size if total is not None else None)
        for (one, start, stop), data in _filled(file, path, ranges, total):
            report(len(data))
            if one is None:
                continue
            last = stop == one.start + one.nbytes
            if one.dtype is None:
                item += data
                if last:
                    take(one.piece, 0, _load(item, one.piece))
                    item = bytearray()
                continue
            take(one.piece, (start - one.start) // one.dtype.itemsize, torch.frombuffer(data, dtype=one.dtype))
            if check == "pieces":
                crc = zlib.crc32(data, 0 if start == one.start else crc)
                if last and one.crc and crc != one.crc:
                    raise CheckpointError(f"{path} has been changed: the checksum of {one.piece.name} differs")
    return None if total is None else total.hexdigest()


_Range = tuple["LocatedPiece | None", int, int]  # of what, from byte, to byte


def read_at(file: io.FileIO, path: Path, into: memoryview, at: int) -> None:
    """Fill ``into`` with the bytes of the file that begin at byte ``at``.

    Raises:
        CheckpointError: the file ends before.
    """
    while into:
        count = os.preadv(file.fileno(), [into], at)
        if not count:
            raise CheckpointError(f"{path} is cut short")
        into, at = into[count:], at + count


def _ranges(located: Iterable[LocatedPiece], size: int | None) -> Iterator[_Range]:
    """The file's chunks, in order: those of each piece and, where ``size`` is given, what lies between and behind."""
    at = 0
    for one in located:
        if size is not None:
            yield from _chunks(None, at, one.start)
        at = one.start + one.nbytes
        yield from _chunks(one, one.start, at)
    if size is not None:
        yield from _chunks(None, at, size)


def _chunks(one: LocatedPiece | None, start: int, stop: int) -> Iterator[_Range]:
    for at in range(start, stop, CHUNK):
        yield one, at, min(at + CHUNK, stop)


def _filled(file: io.FileIO, path: Path, ranges: Iterable[_Range], total: Any) -> Iterator[tuple[_Range, memoryview]]:
    """Each range with its bytes, good until the next is asked for; a thread reads, and hashes, ahead."""
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(NUM_BUFFERS)]
    ahead: deque[tuple[_Range, Future[memoryview]]] = deque()

    def fill(view: memoryview, at: int) -> memoryview:
        read_at(file, path, view, at)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), at + len(view), AHEAD, os.POSIX_FADV_WILLNEED)
        if total is not None:
            total.update(view)
        return view

    with ThreadPoolExecutor(1, "zeroengine-read") as reader:
        for i, range_ in enumerate(ranges):
            if len(ahead) == NUM_BUFFERS - 1:  # one more is the caller's
                first, filled = ahead.popleft()
                yield first, filled.result()
            _, start, stop = range_
            ahead.append((range_, reader.submit(fill, buffers[i % NUM_BUFFERS][: stop - start], start)))
        while ahead:
            first, filled = ahead.popleft()
            yield first, filled.result()


class _Archive(Window):
    """An item of a file, that is a zip archive."""

    def entry(self, info: zipfile.ZipInfo, length: int | None = None) -> tuple[int, bytes]:
        """Where an entry's content begins, and its content. Its checksum may be unset, which zipfile takes ill."""
        self.seek(info.header_offset)
        header = self.read(30)
        at = self.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
        data = self.read(info.file_size if length is None else length)
        if length is None and info.CRC and zlib.crc32(data) != info.CRC:
            raise _Unusual
        return at, data


class _Unusual(Exception):
    """An item that is best left to torch.load."""


class _Unpickler(pickle.Unpickler):
    """Knows plain contiguous tensors alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _plain_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise _Unusual

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        return dtype, key


def _plain_tensor(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> tuple[str, torch.dtype, int, tuple[int, ...]]:
    dtype, key = storage
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise _Unusual
        expected *= length
    return key, dtype, offset, tuple(size)


def _locate(item: _Archive, piece: StoredPiece) -> LocatedPiece:
    try:
        archive = zipfile.ZipFile(item)
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        order = entries.get("byteorder")
        if order is not None and item.entry(order)[1] != b"little":
            raise _Unusual
        key, dtype, offset, size = _Unpickler(io.BytesIO(item.entry(entries["data.pkl"])[1])).load()
        data = entries[f"data/{key}"]
        nbytes = math.prod(size) * dtype.itemsize
        if size != piece.sizes or data.compress_type != zipfile.ZIP_STORED:
            raise _Unusual
        if offset * dtype.itemsize + nbytes > data.file_size:
            raise _Unusual
        at, _ = item.entry(data, length=0)
        crc = data.CRC if nbytes == data.file_size else 0
        return LocatedPiece(piece, piece.start + at + offset * dtype.itemsize, dtype, crc)
    except Exception:  # nothing that we know: torch says what is wrong with it
        return LocatedPiece(piece, piece.start, None)


def _load(item: bytearray, piece: StoredPiece) -> torch.Tensor:
    tensor = torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.sizes:
        raise CheckpointError(f"{piece.file} does not hold what it is said to of {piece.name}")
    return tensor.detach().contiguous().view(-1)
