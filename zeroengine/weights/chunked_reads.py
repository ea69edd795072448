"""Read tensors from the files of a DCP checkpoint in bounded memory, each file once and from start to end.

A file is a row of items, each of them a zip archive that `torch.save` wrote for one tensor, without compression. So a
tensor's bytes lie side by side within the file, and a few bytes around them say where and of what dtype.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroengine.checkpoint.dcp_load import load_item
from zeroengine.checkpoint.dcp_metadata import FileWindow, StoredPiece
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import Report
from zeroengine.utils.safe_pickle import AllowList, SafeUnpickler
from zeroengine.utils.torch_internals import storage_dtypes

# A chunk has so many bytes, a multiple of every dtype's size.
CHUNK = 1 << 22
# The system is asked to read so many bytes beforehand.
READAHEAD = 1 << 24

T = TypeVar("T")
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
    path: Path, pieces: Iterable[LocatedPiece], take_values: TakeValues, report: Report, *, verify: bool
) -> None:
    """Read the elements of pieces, all in the file `path`.

    Args:
        path: The file.
        pieces: The pieces, in the order of their positions.
        take_values: Takes the elements.
        report: Takes the number of bytes read since its last call.
        verify: Compare the checksums of the pieces.

    Raises:
        CheckpointError: The file is cut short, or the checksum of a piece differs.
    """
    # Python's own buffer would copy every chunk once more.
    with open(path, "rb", buffering=0) as file:
        for piece, first, values in _read_ahead(_chunks(file, path, pieces, verify)):
            take_values(piece, first, values)
            report(values.nbytes)


def _chunks(
    file: io.FileIO, path: Path, pieces: Iterable[LocatedPiece], verify: bool
) -> Iterator[tuple[StoredPiece, int, torch.Tensor]]:
    """Yield the arguments of `TakeValues`. Values are valid until the chunk after the next is asked for."""
    buffers = itertools.cycle([memoryview(bytearray(CHUNK)) for _ in range(2)])
    for located in pieces:
        # An item of an unusual kind can only be read as a whole, by torch.load.
        if located.dtype is None:
            yield located.piece, 0, _load_item(path, located.piece)
            continue
        crc = 0
        for offset in range(0, located.nbytes, CHUNK):
            view, position = next(buffers)[: located.nbytes - offset], located.start + offset
            read_at(file, path, view, position)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), position + len(view), READAHEAD, os.POSIX_FADV_WILLNEED)
            crc = zlib.crc32(view, crc) if verify else 0
            yield located.piece, offset // located.dtype.itemsize, torch.frombuffer(view, dtype=located.dtype)
        # A checksum of 0 means that none was stored.
        if verify and located.crc and crc != located.crc:
            raise CheckpointError(f"{path} has been changed: the checksum of {located.piece.name} differs")


def _read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items. A thread computes the next one while the caller uses the last one."""
    # Reading and checksums release the interpreter's lock, so they go on while the caller converts values.
    with ThreadPoolExecutor(1, "zeroengine-read") as reader:
        pending = reader.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = reader.submit(next, items, None)
            yield item


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
    | {f"torch.{name}": dtype for name, dtype in storage_dtypes().items()}
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


def _load_item(path: Path, piece: StoredPiece) -> torch.Tensor:
    """Return the elements (1-D) of a whole item.

    Raises:
        CheckpointError: It is not the tensor that the metadata says, or cannot be read.
    """
    with as_checkpoint_errors(f"{path} cannot be read"), open(path, "rb") as file:
        tensor = load_item(file, piece)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.sizes:
        raise CheckpointError(f"{piece.file} does not hold what it is said to of {piece.name}")
    return tensor.detach().contiguous().view(-1)
