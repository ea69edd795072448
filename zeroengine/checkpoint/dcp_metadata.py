"""Read what a torch Distributed Checkpoint (DCP) holds and where it lies. Needs no torch.

A DCP metadata file is a pickle of torch's classes. Each of them becomes a record of its fields here, so that
`zero-inspect` starts without torch, and so that nothing in the file can run.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash

from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import is_file_name
from zeroengine.utils.safe_pickle import AllowList, SafeUnpickler

METADATA = ".metadata"
# The names of the objects that only zeroengine reads begin so.
ZEROENGINE_PREFIX = "zeroengine."


OpenFile = Callable[[Path], io.BufferedReader]


def open_local(path: Path) -> io.BufferedReader:
    """Open a file of this host to read."""
    return open(path, "rb")


class ByteRange(NamedTuple):
    """The bytes of one value in a file, its item: the first byte and their number."""

    start: int
    length: int


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, or an object, and the item of a file that holds it.

    Attributes:
        name: The name of the tensor or object.
        offsets: The box's first element in each dimension of the tensor; empty for an object.
        sizes: The box's elements in each dimension.
        file: The name of the file.
        start: The item's first byte within the file.
        length: The item's size in bytes.
        transforms: The transformations, such as compression, that the item went through.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: its shape, torch's name for its dtype ("float32"), and the boxes that make it up."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """Everything in one DCP checkpoint.

    Attributes:
        tensors: The tensors by name, in the file's order.
        objects: The other values by name.
        items: The bytes of every value, by the name of the file.
        open_file: Opens one of its files by its path.
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredPiece]
    items: dict[str, list[ByteRange]]
    open_file: OpenFile = open_local


def read_metadata(path: Path, open_file: OpenFile = open_local) -> DcpMetadata:
    """Return what the checkpoint directory `path` holds.

    Args:
        path: The directory.
        open_file: Opens one of its files by its path. The file may be on another host.

    Raises:
        CheckpointError: There is no metadata, it cannot be read, or it lacks part of a tensor.
    """
    if open_file is open_local and not (path / METADATA).exists():
        raise CheckpointError(f"{path} holds no checkpoint: there is no {METADATA} file in it")
    # A damaged pickle may raise almost anything, and none of it is the user's mistake.
    with as_checkpoint_errors(f"{path / METADATA} cannot be read", prefix=f"{path}: "):
        with open_file(path / METADATA) as file:
            return replace(_convert(SafeUnpickler(io.BytesIO(file.read()), _ALLOW_LIST).load()), open_file=open_file)


def find_tied_names(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, str]:
    """Return those of `names` whose tensor is stored under another name too, each with the first of its names."""
    first_names: dict[tuple[tuple[str, int], ...], str] = {}
    tied = {}
    for name in names:
        # Two names are tied where they refer to the same bytes. DCP does not record that names are aliases.
        items = tuple((piece.file, piece.start) for piece in tensors[name].pieces)
        # A tensor without elements has no items, and would seem to be tied to every other empty tensor.
        first = first_names.setdefault(items, name) if items else name
        if first != name:
            tied[name] = first
    return tied


class DigestOfItems:
    """A digest of the checksums (CRC-32) that the items of a file have in the file itself."""

    def __init__(self) -> None:
        self._total = xxhash.xxh3_64()

    def add(self, item: ByteRange, archive: zipfile.ZipFile | None) -> None:
        """Add an item, in the order of the file. One that is no archive has no checksums: its position counts alone."""
        for info in archive.infolist() if archive is not None else ():
            self._total.update(f"{info.filename} {info.file_size} {info.CRC}\n".encode())
        self._total.update(f"{item.start} {item.length}\n".encode())

    def hexdigest(self) -> str:
        """Return the digest, in hexadecimal digits."""
        return self._total.hexdigest()


def digest_of_items(path: Path, items: Iterable[ByteRange]) -> str:
    """Return the digest of the items of a file.

    Each item is a zip archive, whose directory is all that is read.
    """
    digest = DigestOfItems()
    with open(path, "rb") as file:
        # The order of the items depends on the writer, and the digest must not.
        for item in sorted(set(items)):
            archive = None
            # torch.save did not write this item.
            with contextlib.suppress(zipfile.BadZipFile):
                archive = zipfile.ZipFile(FileWindow(file, item.start, item.length))
            digest.add(item, archive)
    return digest.hexdigest()


class FileWindow(io.RawIOBase):
    """An item of a file, as a file that can be read."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position within the item."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, never from past the end of the item, and return the number of bytes."""
        remaining = max(self._length - self._position, 0)
        # Several windows share one file object, so each read sets the position first.
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[:remaining])
        self._position += count
        return count


# -- From torch's records to ours -----------------------------------------------------------------


def _convert(tree: Any) -> DcpMetadata:
    """Return the metadata of a checkpoint from the records in its file.

    Raises:
        CheckpointError: Part of a tensor is missing, or an item lies outside of the checkpoint.
    """
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredPiece] = {}
    for name, value in tree.state_dict_metadata.items():
        name = str(name)
        if isinstance(value, _TensorRecord):
            tensors[name] = _convert_tensor(name, value, tree.storage_data)
        else:
            objects[name] = _find_piece(name, None, (), tree.storage_data)
    if not tree.storage_data:
        raise CheckpointError(f"its {METADATA} file is not a checkpoint's metadata")
    items: dict[str, list[ByteRange]] = {}
    # Items are listed for all files, also for values that this version does not know, since the digests cover them.
    for info in tree.storage_data.values():
        items.setdefault(info.relative_path, []).append(ByteRange(int(info.offset), int(info.length)))
    for file in items:
        # A name with a folder in it could make a reader open any file of the machine.
        if not is_file_name(file):
            raise CheckpointError(f"its {METADATA} file names {file!r}, outside of the checkpoint: it is refused")
    return DcpMetadata(tensors, objects, items)


def _convert_tensor(name: str, tensor: _TensorRecord, storage: Mapping[Any, Any]) -> StoredTensor:
    shape = tuple(tensor.size)
    pieces = [_find_piece(name, tuple(chunk.offsets), tuple(chunk.sizes), storage) for chunk in tensor.chunks]
    # Whoever damaged the file may have made two boxes overlap and left a gap of the same size, so the sum of the sizes
    # is not enough.
    boxes = [(piece.offsets, piece.sizes) for piece in pieces]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape) or not _are_disjoint(shape, boxes):
        raise CheckpointError(f"part of {name} is missing: the checkpoint is incomplete")
    return StoredTensor(shape, str(tensor.properties.state[0]), tuple(pieces))


def _find_piece(
    name: str, offsets: tuple[int, ...] | None, sizes: tuple[int, ...], storage: Mapping[Any, Any]
) -> StoredPiece:
    info = storage.get(_IndexRecord(name, offsets))
    if info is None:
        raise CheckpointError(f"part of {name} is missing: the checkpoint is incomplete")
    start, length = int(info.offset), int(info.length)
    # The reader would otherwise read from the end of the file, or all of it.
    if start < 0 or length <= 0:
        raise CheckpointError(f"part of {name} is said to have {length} bytes at {start}: it is damaged")
    # Checkpoints of older versions of torch have no such field.
    transforms = tuple(getattr(info, "transform_descriptors", None) or ())
    return StoredPiece(name, offsets or (), sizes, info.relative_path, start, length, transforms)


Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def _are_disjoint(shape: tuple[int, ...], boxes: Boxes) -> bool:
    """Return whether boxes (offsets and sizes) lie within `shape` and no two of them overlap."""
    # A box without elements overlaps with nothing.
    boxes = [box for box in boxes if 0 not in box[1]]
    # The boxes are swept along the dimension that is cut most often, so that few are compared with each other.
    num_cuts = [len({offsets[dim] for offsets, _ in boxes if dim < len(offsets)}) for dim in range(len(shape))]
    sweep_dim = num_cuts.index(max(num_cuts)) if num_cuts else 0
    # These boxes reach to where the present box begins.
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][sweep_dim : sweep_dim + 1]):
        # A box of another number of dimensions would break the comparisons below.
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        bounds = zip(offsets, sizes, shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > length for offset, size, length in bounds):
            return False
        # Boxes that end before this one begins cannot overlap with it, nor with any that follows in the order.
        reaching = [box for box in reaching if not shape or box[0][sweep_dim] + box[1][sweep_dim] > offsets[sweep_dim]]
        for other_offsets, other_sizes in reaching:
            dims = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in dims):
                return False
        reaching.append((offsets, sizes))
    return True


# -- Stand-ins for torch's classes ----------------------------------------------------------------


class _Record:
    """Stand for any of torch's classes, with its fields as attributes."""

    state: Any

    def __setstate__(self, state: Any) -> None:
        # Some classes pickle their fields as a dict, and others as a tuple of their own.
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _TensorRecord(_Record):
    size: tuple[int, ...]
    chunks: list[Any]
    properties: _Record


# The metadata maps these records to positions, so they compare by value, as torch's own class does.
@dataclass(frozen=True)
class _IndexRecord(_Record):
    """Name a piece of a tensor, or an object, whose offset is None."""

    fqn: str
    offset: tuple[int, ...] | None = None


class _MemoryFormat:
    """Stand for an enumeration. Its members are pickled by value or by name, and are not used."""

    def __init__(self, member: Any) -> None:
        if member not in (0, 1, 2, "TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"):
            raise CheckpointError(f"its {METADATA} file asks for {member!r} of a memory format: it is refused")


_DTYPE = re.compile(r"[a-z]+[0-9a-z_]*")


def _dtype_name(module: str, name: str) -> str | None:
    """Return the name of what may be a dtype: nothing but the name is used."""
    return name if module == "torch" and _DTYPE.fullmatch(name) else None


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Only the classes of the file format are allowed. Any other name in the pickle is refused before anything is called.
_RECORDS = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "StorageMeta", "TensorProperties")
# Python 3.13 pickles paths under pathlib._local.
_PATHS = [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")]
_ALLOW_LIST = AllowList(
    {
        f"{_METADATA_MODULE}.TensorStorageMetadata": _TensorRecord,
        f"{_METADATA_MODULE}.MetadataIndex": _IndexRecord,
        f"{_METADATA_MODULE}._MEM_FORMAT_ENCODING": _MemoryFormat,
        "torch.distributed.checkpoint.filesystem._StorageInfo": _Record,
        "torch.serialization._get_layout": str,
        "torch.Size": tuple,
        "torch.device": str,
        "collections.OrderedDict": OrderedDict,
    }
    | {f"{_METADATA_MODULE}.{name}": _Record for name in _RECORDS}
    | dict.fromkeys(_PATHS, PurePosixPath),
    find_other=_dtype_name,
    enums=_MemoryFormat,
    subject=f"its {METADATA} file",
)
