"""StateEntries to and from the files of torch Distributed Checkpoint, which plain PyTorch reads and writes as well."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import errno
import io
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zeroengine.checkpoint.dcp_metadata import ByteRange, digest_of_items
from zeroengine.checkpoint.directory import FileRecord
from zeroengine.checkpoint.entries import StateEntries
from zeroengine.disk.mapped_memory import populate
from zeroengine.disk.sequential_files import SequentialFile, create
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box
from zeroengine.utils.paths import is_file_name

METADATA = ".metadata"
Written = dict[str, tuple[str, "list[ByteRange] | None"]]  # by name of the file: its checksum, and where its items are
Report = Callable[[int], None]  # bytes since the last call
Read = Callable[[str, Box, torch.Tensor], None]


def save(
    path: Path,
    entries: StateEntries,
    objects: Mapping[str, Any],
    aliases: Mapping[str, str],
    group: dist.ProcessGroup | None,
    report: Report,
    read: Read | None = None,
) -> Written:
    """Writes every rank's entries and objects into the new directory ``path``. A collective.

    Args:
        objects: further values by name, each from one rank alone.
        aliases: further names, and the entries that they stand for.
        group: None where this process alone writes.
        read: fills a tensor with the values of an entry's piece that is on the meta device, when it is written.

    Returns:
        What this rank wrote: see ``describe``.
    """
    writer = _Writer(path, aliases, report)
    writer.per_thread_copy_ahead = 0  # one piece after the other: see `lookup_object`
    planner = _SavePlanner(entries, objects, read)
    if group is None:
        with _no_warning():
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    else:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    return {name: (total, writer.items.get(name)) for name, total in writer.hashing.sums.items()}


def describe(path: Path, written: Written) -> dict[str, FileRecord]:
    """Return what the manifest says of the files that ``save`` has written on this rank, by name. No collective.

    Raises:
        OSError: one cannot be read.
    """
    return {
        name: FileRecord(
            bytes=(path / name).stat().st_size,
            xxh3=total,
            items=None if items is None else digest_of_items(path / name, items),
        )
        for name, (total, items) in written.items()
    }


def load(
    path: Path, metadata: Metadata, entries: StateEntries, objects: Iterable[str], report: Report
) -> dict[str, Any]:
    """Reads what ``entries`` have pieces for into them, cast to their dtypes, and gives the objects. Not a collective.

    Raises:
        CheckpointError: part of an entry is not there, or cannot be read, or an object could run code.
    """
    return _load(path, metadata, _LoadPlanner(entries, objects, metadata, report))


def check_readable(path: Path, metadata: Metadata, entries: StateEntries, report: Report) -> None:
    """Read what ``load`` would, and keep nothing of it.

    Raises:
        CheckpointError: as ``load`` does.
    """
    _load(path, metadata, _Rehearsal(entries, (), metadata, report))


def _load(path: Path, metadata: Metadata, planner: _LoadPlanner) -> dict[str, Any]:
    try:
        with _no_warning():
            dcp.load({}, storage_reader=_Reader(path, metadata), planner=planner, no_dist=True)
    except dcp.CheckpointException as error:  # no Exception: it would pass by whoever catches those
        inner = innermost(error)
        if isinstance(inner, CheckpointError) or not isinstance(inner, Exception):
            raise inner from None
        raise CheckpointError(f"{path} cannot be read: {cause(inner)}") from inner
    return planner.objects


def innermost(error: BaseException) -> BaseException:
    """What a rank raised, of what DCP makes of it."""
    failures = getattr(error, "failures", None)
    return innermost(next(iter(failures.values()))[0]) if failures else error


def cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {cause(inner)}"
    if isinstance(error, OSError) and error.strerror:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        return f"{what}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def _no_warning() -> Iterator[None]:
    """``no_dist`` asks for what torch warns of then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Hashed:
    """A file that is hashed on the way."""

    def __init__(self, file: SequentialFile, report: Report) -> None:
        self._file, self._report = file, report
        self.hash = xxhash.xxh3_64()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.hash.update(data)
        try:
            written = int(self._file.write(data))
        except OSError as error:
            self.error = self.error or error
            raise
        self._report(written)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _HashingFileSystem(FileSystem):
    def __init__(self, report: Report) -> None:
        self.sums: dict[str, str] = {}
        self._report = report

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with create(path) as file:
            hashed = _Hashed(file, self._report)
            try:
                yield hashed
            except Exception as error:
                if hashed.error is not None and error is not hashed.error:
                    raise hashed.error from error  # torch.save complains of what came of it
                raise
        self.sums[Path(path).name] = hashed.hash.hexdigest()


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path, aliases: Mapping[str, str], report: Report) -> None:
        super().__init__(path, overwrite=False, sync_files=False)  # they are when they are closed
        self.fs = self.hashing = _HashingFileSystem(report)
        self._aliases = aliases
        self.items: dict[str, list[ByteRange]] = {}  # of the files that this rank wrote

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        results = super().write_data(*args, **kwargs)
        for result in results.value():
            place = result.storage_data
            self.items.setdefault(place.relative_path, []).append(ByteRange(place.offset, place.length))
        return results

    def finish(self, metadata: Metadata, results: Any) -> None:
        found = [result for of_rank in results for result in of_rank]
        for alias, kept in self._aliases.items():
            if kept in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[kept]
                found += [_renamed(result, alias) for result in found if result.index.fqn == kept]
        super().finish(metadata, [found])
        self.hashing.sums[METADATA] = self.hashing.sums.pop(f"{METADATA}.tmp")


def _renamed(result: Any, name: str) -> Any:
    return dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=name))


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, entries: StateEntries, objects: Mapping[str, Any], read: Read | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._entries, self._objects, self._read = entries, objects, read
        self._data: dict[MetadataIndex, tuple[Box, torch.Tensor]] = {}
        self._memory: mmap.mmap | None = None  # of the last piece that was copied

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, entry in self._entries.items():
            for box, tensor in entry.pieces:
                index = MetadataIndex(name, torch.Size(box.offsets))
                self._data[index] = box, tensor
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return self._objects[index.fqn]
        box, tensor = self._data[index]
        populate(tensor)
        if tensor.is_cpu and tensor.is_contiguous():
            return _alone(tensor)
        made = self._empty(tensor.dtype, box)
        if tensor.is_meta:
            assert self._read is not None
            self._read(index.fqn, box, made)
        else:
            made.copy_(tensor.detach())
        return made

    def _empty(self, dtype: torch.dtype, box: Box) -> torch.Tensor:
        """Memory for a part of some tensor, which torch would copy as a whole and keep until the file ends."""
        if self._memory is not None:  # written by now
            self._memory.madvise(mmap.MADV_DONTNEED)
        self._memory = mmap.mmap(-1, max(box.numel * dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(self._memory, dtype=dtype, count=box.numel).view(box.sizes)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a storage of its own: of a view torch would write a copy."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or not tensor.nbytes:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _LoadPlanner(LoadPlanner):
    def __init__(self, entries: StateEntries, objects: Iterable[str], metadata: Metadata, report: Report) -> None:
        self._entries, self._wanted, self._metadata, self._report = entries, objects, metadata, report
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, entry in self._entries.items():
            known = self._metadata.state_dict_metadata[name]
            assert isinstance(known, TensorStorageMetadata)
            for box, tensor in entry.pieces:
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                self._pieces[MetadataIndex(name, chunk.offsets)] = tensor
                found = create_read_items_for_chunk_list(name, known, [chunk])
                if sum(item.lengths.numel() for item in found) != box.numel:
                    raise CheckpointError(f"the checkpoint lacks part of {name}: it is incomplete")
                items += found
        for name in self._wanted:
            items += _read_object(name)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.objects[name] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            what = "holds more than tensors, numbers and strings, and could run code: it is refused"
            if not isinstance(error, pickle.UnpicklingError) or "GLOBAL" not in str(error):
                what = f"cannot be read: {cause(error)}"
            raise CheckpointError(f"{name} in the checkpoint {what}") from error

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._pieces[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return self.prepare(tensor)

    def prepare(self, target: torch.Tensor) -> torch.Tensor:
        """Return the memory that a part of a tensor is read into, given where it goes."""
        populate(target, write=True)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._report(tensor.nbytes)


class _Rehearsal(_LoadPlanner):
    """Reads into memory that is thrown away."""

    def prepare(self, target: torch.Tensor) -> torch.Tensor:
        return torch.empty(target.shape, dtype=target.dtype, device="cpu")


def _read_object(name: str) -> list[ReadItem]:
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]


# -- metadata -------------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size device",
    "collections": "OrderedDict",
    "pathlib": "Path PosixPath",
}


class _Unpickler(pickle.Unpickler):
    """Builds what a DCP metadata file holds, and nothing else: a pickle is a program."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "pathlib._local":  # as Python 3.13 pickles a path
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        if is_dtype or name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise CheckpointError(f"its {METADATA} file holds {module}.{name}, which no checkpoint does: it is refused")


def _member(kind: Any, name: Any) -> Any:
    """How some versions of Python pickle an enum's member (3.11.2 is one)."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise CheckpointError(
            f"its {METADATA} file asks for {name!r} of {kind!r}, which no checkpoint does: it is refused"
        )
    return kind[name]


def read_metadata(path: Path) -> Metadata:
    """The DCP metadata of the checkpoint directory ``path``.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        metadata = _Unpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {METADATA} file in it") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path / METADATA} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not metadata.storage_data:
        raise CheckpointError(f"{path / METADATA} is not a checkpoint's metadata")
    for file in files_of(metadata):
        if not is_file_name(file):
            raise CheckpointError(f"{path / METADATA} names {file!r}, outside of the checkpoint: it is refused")
    return metadata


def files_of(metadata: Metadata) -> set[str]:
    """The names of the files that hold what ``metadata`` describes."""
    return {getattr(info, "relative_path", None) for info in (metadata.storage_data or {}).values()}  # type: ignore[misc]
