"""Tensors in the files of a DCP checkpoint, read as the files lie: each once, from its start to its end, in chunks.

A file is a row of items, each of them what ``torch.save`` makes of one tensor: a zip archive that compresses nothing.
So a tensor's bytes lie side by side somewhere within it, and a few bytes around them say where and of what dtype.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from ..errors import CheckpointError

CHUNK = 1 << 23  # bytes; a multiple of every dtype's size
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


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the item that holds it."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # the item's first byte within the file
    length: int  # of the item, in bytes


Take = Callable[[Piece, int, torch.Tensor], None]  # its elements from the first given on, 1-D; good until it returns


def pieces_of(metadata: Metadata, name: str) -> list[Piece]:
    """The pieces of a tensor.

    Raises:
        CheckpointError: they are not all there, or lie in files of another kind.
    """
    known = metadata.state_dict_metadata[name]
    assert isinstance(known, TensorStorageMetadata)
    found = []
    for chunk in known.chunks:
        info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise CheckpointError(f"the checkpoint lacks part of {name}: it is incomplete")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{name} is stored in a form of its own ({', '.join(info.transform_descriptors)})")
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{name} is said to lie in {info.relative_path!r}, outside of the checkpoint")
        place = (info.relative_path, info.offset, info.length)
        found.append(Piece(name, tuple(chunk.offsets), tuple(chunk.sizes), *place))
    if sum(math.prod(piece.sizes) for piece in found) != math.prod(known.size):
        raise CheckpointError(f"the checkpoint lacks part of {name}: it is incomplete")
    return found


def tied(metadata: Metadata, names: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` whose values are another's, stored once, and the first name of each."""
    first: dict[Any, str] = {}
    found = {}
    for name in names:
        places = tuple((piece.file, piece.start) for piece in pieces_of(metadata, name))
        kept = first.setdefault(places, name) if places else name
        if kept != name:
            found[name] = kept
    return found


def read(path: Path, pieces: Iterable[Piece], take: Take, report: Callable[[int], None], *, hashed: bool) -> str | None:
    """Gives ``take`` the elements of ``pieces``, all of the file ``path``.

    Returns:
        The file's checksum, for which all of it is read; None where not ``hashed``.
    """
    total = xxhash.xxh3_64() if hashed else None
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:

        def through(stop: int) -> Iterator[int]:
            """Reads on, filling the buffer: gives how far."""
            while file.tell() < stop:
                count = _fill(file, buffer[: min(CHUNK, stop - file.tell())], path)
                if total is not None:
                    total.update(buffer[:count])
                report(count)
                yield count

        def skip(to: int) -> None:
            if total is None:
                file.seek(to)
            else:
                for _ in through(to):
                    pass

        for piece in sorted(pieces, key=lambda piece: piece.start):
            with open(path, "rb") as other:
                where = _locate(_create_file_view(other, piece.start, piece.length), piece)
            if where is None:
                skip(piece.start)
                item = b"".join(bytes(buffer[:count]) for count in through(piece.start + piece.length))
                take(piece, 0, _load(item, piece))
                continue
            at, dtype = where
            skip(piece.start + at)
            first = 0
            for count in through(piece.start + at + math.prod(piece.sizes) * dtype.itemsize):
                numel = count // dtype.itemsize
                take(piece, first, torch.frombuffer(buffer, dtype=dtype, count=numel))
                first += numel
        if total is not None:
            skip(path.stat().st_size)
    return None if total is None else total.hexdigest()


def _fill(file: io.FileIO, view: memoryview, path: Path) -> int:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{path} is cut short")
        done += count
    return done


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


def _locate(item: Any, piece: Piece) -> tuple[int, torch.dtype] | None:
    """Where an item's elements begin, in bytes, and their dtype; None where it is to be loaded as a whole."""
    try:
        archive = zipfile.ZipFile(item)
        root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
        key, dtype, offset, size = _Unpickler(io.BytesIO(archive.read(f"{root}data.pkl"))).load()
        order = f"{root}byteorder"
        if size != piece.sizes or (order in archive.namelist() and archive.read(order) != b"little"):
            return None
        info = archive.getinfo(f"{root}data/{key}")
        fits = (offset + math.prod(size)) * dtype.itemsize <= info.file_size
        if info.compress_type != zipfile.ZIP_STORED or not fits:
            return None
        item.seek(info.header_offset)
        header = item.read(30)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return info.header_offset + len(header) + names + offset * dtype.itemsize, dtype
    except Exception:  # nothing of ours: torch says what is wrong with it
        return None


def _load(item: bytes, piece: Piece) -> torch.Tensor:
    tensor = torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.sizes:
        raise CheckpointError(f"{piece.file} does not hold what it is said to of {piece.name}")
    return tensor.detach().contiguous().view(-1)
