"""The tensors of a torch Distributed Checkpoint (DCP) and where they lie, read without torch and without its code.

A DCP metadata file is a pickle of torch's classes. Here each of them is a record of its fields, and nothing else is
built: a pickle is a program.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import xxhash

from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import is_file_name

METADATA = ".metadata"
EXTRA = "zeroengine."  # what the names of objects begin with that only zeroengine reads


class ByteRange(NamedTuple):
    """Where one value lies in a file: its first byte, and how many they are."""

    start: int
    length: int


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, and the item of a file that holds it."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # the item's first byte within the file
    length: int  # of the item, in bytes


@dataclass(frozen=True)
class StoredTensor:
    """One whole tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name: float32
    pieces: tuple[StoredPiece, ...]


def read_metadata(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint directory ``path``, by name, in their order.

    Raises:
        CheckpointError: there is no metadata, or it cannot be read, or part of a tensor is not there.
    """
    with _unpickled(path) as tree:
        known, places = tree.state_dict_metadata.items(), tree.storage_data
        return {name: _stored(name, item, places) for name, item in known if isinstance(item, _Tensor)}


def names_in(path: Path) -> list[str]:
    """The names of everything in the checkpoint directory ``path``, objects included.

    Raises:
        CheckpointError: there is no metadata, or it cannot be read.
    """
    with _unpickled(path) as tree:
        return [str(name) for name in tree.state_dict_metadata]


@contextlib.contextmanager
def _unpickled(path: Path) -> Iterator[Any]:
    """Yield the metadata of a checkpoint directory; whatever goes wrong with it within is a CheckpointError."""
    try:
        yield _Unpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {METADATA} file in it") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path / METADATA} cannot be read: {type(error).__name__}: {error}") from error


def items_by_file(path: Path) -> dict[str, list[ByteRange]]:
    """Where everything lies in the files of the checkpoint directory ``path``, objects included.

    Raises:
        CheckpointError: there is no metadata, or it cannot be read.
    """
    items: dict[str, list[ByteRange]] = {}
    with _unpickled(path) as tree:
        for info in tree.storage_data.values():
            items.setdefault(str(info.relative_path), []).append(ByteRange(int(info.offset), int(info.length)))
    return items


def digest_of_items(path: Path, items: Iterable[ByteRange]) -> str:
    """Return a digest of the checksums (CRC-32) that the items of a file have in the file itself.

    Each item is a zip archive, whose directory is all that is read.
    """
    total = xxhash.xxh3_64()
    with open(path, "rb") as file:
        for item in sorted(set(items)):
            with contextlib.suppress(zipfile.BadZipFile):  # not of torch.save: its place alone counts
                for info in zipfile.ZipFile(Window(file, item)).infolist():  # type: ignore[arg-type]
                    total.update(f"{info.filename} {info.file_size} {info.CRC}\n".encode())
            total.update(f"{item.start} {item.length}\n".encode())
    return total.hexdigest()


class Window(io.RawIOBase):
    """An item of a file, as a file."""

    def __init__(self, file: IO[bytes], item: ByteRange) -> None:
        self._file, self._start, self._length, self._at = file, item.start, item.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def tied(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` that are stored under another name too, and the first name of each."""
    first: dict[Any, str] = {}
    found = {}
    for name in names:
        places = tuple((piece.file, piece.start) for piece in tensors[name].pieces)
        kept = first.setdefault(places, name) if places else name
        if kept != name:
            found[name] = kept
    return found


def _stored(name: str, tensor: _Tensor, places: Mapping[Any, Any]) -> StoredTensor:
    shape = tuple(tensor.size)
    pieces = []
    for chunk in tensor.chunks:
        info = places.get(_Index(name, tuple(chunk.offsets)))
        if info is None:
            raise CheckpointError(f"part of {name} is missing: the checkpoint is incomplete")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{name} is compressed ({', '.join(info.transform_descriptors)}): not supported")
        if not is_file_name(info.relative_path):
            raise CheckpointError(f"{name} is said to lie in {info.relative_path!r}, outside of the checkpoint")
        place = (info.relative_path, int(info.offset), int(info.length))
        if place[1] < 0 or place[2] <= 0:
            raise CheckpointError(f"part of {name} is said to have {place[2]} bytes at {place[1]}: it is damaged")
        pieces.append(StoredPiece(name, tuple(chunk.offsets), tuple(chunk.sizes), *place))
    tiles = [(piece.offsets, piece.sizes) for piece in pieces]
    if sum(math.prod(sizes) for _, sizes in tiles) != math.prod(shape) or not _tile(shape, tiles):
        raise CheckpointError(f"part of {name} is missing: the checkpoint is incomplete")
    return StoredTensor(shape, str(tensor.properties.state[0]), tuple(pieces))


def _tile(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether boxes (offsets and sizes) lie within ``shape`` and no two of them overlap."""
    boxes = [box for box in boxes if 0 not in box[1]]
    cuts = [len({offsets[dim] for offsets, _ in boxes if dim < len(offsets)}) for dim in range(len(shape))]
    along = cuts.index(max(cuts)) if cuts else 0  # the dimension that is cut most often
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # those that reach as far as the present one begins
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][along : along + 1]):
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(at < 0 or size < 0 or at + size > most for at, size, most in zip(offsets, sizes, shape, strict=True)):
            return False
        open_ = [box for box in open_ if not shape or box[0][along] + box[1][along] > offsets[along]]
        for others, extents in open_:
            dims = zip(offsets, sizes, others, extents, strict=True)
            if all(at < other + extent and other < at + size for at, size, other, extent in dims):
                return False
        open_.append((offsets, sizes))
    return True


class _Record:
    """Any of torch's classes."""

    state: Any

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Tensor(_Record):
    size: tuple[int, ...]
    chunks: list[Any]
    properties: _Record


class _Index(_Record):
    offset: tuple[int, ...] | None = None  # of a tensor's piece

    def __init__(self, fqn: str, offset: tuple[int, ...]) -> None:
        self.fqn, self.offset = fqn, offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))


def _itself(value: Any) -> Any:
    return value


def _named(kind: Any, name: Any) -> Any:
    """An enum's member, as some versions of Python pickle it (3.11.2 is one)."""
    return name


_KNOWN: dict[str, dict[str, Any]] = {
    "builtins": {"getattr": _named},
    "torch.distributed.checkpoint.metadata": {
        "TensorStorageMetadata": _Tensor,
        "MetadataIndex": _Index,
        "_MEM_FORMAT_ENCODING": _itself,
    }
    | dict.fromkeys(
        ["BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "StorageMeta", "TensorProperties"], _Record
    ),
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _Record},
    "torch.serialization": {"_get_layout": _itself},
    "torch": {"Size": tuple, "device": _itself},
    "collections": {"OrderedDict": OrderedDict},
    "pathlib": dict.fromkeys(["Path", "PosixPath"], PurePosixPath),
    "pathlib._local": dict.fromkeys(["Path", "PosixPath"], PurePosixPath),  # of Python 3.13
}
_DTYPE = re.compile(r"[a-z]+[0-9a-z_]*")  # a name is all that becomes of it


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get(module, {}).get(name)
        if found is None and module == "torch" and _DTYPE.fullmatch(name):
            return name
        if found is None:
            raise CheckpointError(f"its {METADATA} file holds {module}.{name}, which no checkpoint does: it is refused")
        return found
