"""Write the entries of a checkpoint to files of torch Distributed Checkpoint (DCP), which plain PyTorch reads too.

Torch's own writer is not used: its ranks send one another the plan of all items, there and back, before they write
them. Here each rank writes its items at once, and tells rank 0 where they are.

[Note: Memory while saving]
One item after the other is written. A piece of a shard is a view of a large flat buffer. Pieces in CPU memory are
written from where they lie, with no copy; pieces on a GPU are copied to memory that is given back to the system when
the next piece is written.
"""

from __future__ import annotations

import io
import mmap
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zeroengine.checkpoint.compact_items import ItemWriter
from zeroengine.checkpoint.dcp_metadata import METADATA, ByteRange
from zeroengine.checkpoint.entries import StateEntries
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.checkpoint.manifest import FileRecord
from zeroengine.disk.mapped_memory import populate, populate_pages
from zeroengine.disk.sequential_files import DirectFile, SyncedFile, create
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box
from zeroengine.utils.progress import Report
from zeroengine.utils.torch_internals import storage_info

# As torch writes it into the metadata.
DCP_VERSION = "1.0.0"


class _RankItems(NamedTuple):
    """What rank 0 has to know of another rank's items.

    Attributes:
        file: The name of the rank's file.
        shapes: The shape and dtype of each tensor, by name.
        pieces: The name, offsets, sizes and place of each piece of a tensor.
        objects: The place of each further value, by name.
    """

    file: str
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], ByteRange]]
    objects: dict[str, ByteRange]


def save_files(
    path: Path,
    entries: StateEntries,
    objects: Mapping[str, Any],
    aliases: Mapping[str, str],
    group: dist.ProcessGroup | None,
    report: Report,
) -> dict[str, FileRecord]:
    """Write every rank's entries and objects into the directory `path`. A collective.

    Args:
        path: The directory. A file of the same name in it is written over.
        entries: The tensors by name; the pieces of all ranks together make up each of them.
        objects: Further values by name, each from one rank alone.
        aliases: Further names, and the entries that they stand for.
        group: The ranks that write; None where this process alone does.
        report: Takes the number of bytes written since its last call.

    Returns:
        What the manifest records of the files that this rank wrote, by name.

    Raises:
        CheckpointError: On every rank of the group; one of them failed.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    files: dict[str, FileRecord] = {}
    items: _RankItems | None = None
    error: BaseException | None = None
    # Every rank takes part in the exchanges before it raises, or the others would wait for it.
    try:
        items = _write_items(path, f"__{rank}_0.distcp", entries, objects, report, files)
    except BaseException as raised:
        error = raised
    rows: list[Any] = [(None if error is None else failure_reason(error), items)] * size
    if group is not None:
        dist.gather_object(rows[0], rows if rank == 0 else None, group=group, group_dst=0)
    verdict: list[str | None] = [None]
    if rank == 0:
        try:
            verdict = [next((f"rank {number}: {reason}" for number, (reason, _) in enumerate(rows) if reason), None)]
            if verdict[0] is None:
                _write_metadata(path, [row[1] for row in rows], aliases, report, files)
        except BaseException as raised:
            error, verdict = raised, [f"rank 0: {failure_reason(raised)}"]
    if group is not None:
        dist.broadcast_object_list(verdict, group=group, group_src=0)
    # An interrupt ends the program, and a process that writes alone knows its own error.
    if error is not None and (group is None or not isinstance(error, Exception)):
        raise error
    if verdict[0] is not None:
        raise CheckpointError(verdict[0]) from error
    return files


class _HashedFile:
    """A file whose content is hashed as it is written."""

    def __init__(self, file: DirectFile | SyncedFile, report: Report) -> None:
        self._file, self._report = file, report
        self.hash = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        """Hash and write ``data``; return the bytes written."""
        # The hash covers what was asked for rather than what is on the disk, so a later check finds bytes that the disk
        # lost.
        self.hash.update(data)
        count = int(self._file.write(data))
        self._report(count)
        return count

    def tell(self) -> int:
        """Return the bytes written so far."""
        return int(self._file.tell())


@contextmanager
def _hashed(path: Path, known_bytes: int, report: Report, files: dict[str, FileRecord]) -> Iterator[_HashedFile]:
    """Open a file that is synced when it is closed, and add its record to `files` then."""
    with create(path, known_bytes) as file:
        hashed = _HashedFile(file, report)
        yield hashed
        nbytes = hashed.tell()
    # A file that failed gets no checksum, so it cannot appear in a manifest.
    files[path.name] = FileRecord(bytes=nbytes, xxh3=hashed.hash.hexdigest())


def _write_items(
    path: Path,
    name: str,
    entries: StateEntries,
    objects: Mapping[str, Any],
    report: Report,
    files: dict[str, FileRecord],
) -> _RankItems:
    """Write this rank's file."""
    items = _RankItems(name, {key: (tuple(entry.shape), entry.dtype) for key, entry in entries.items()}, [], {})
    known_bytes = sum(entry.nbytes for entry in entries.values())
    with _hashed(path / name, known_bytes, report, files) as file:
        writer = ItemWriter(file)
        for key, entry in entries.items():
            for box, tensor in entry.pieces:
                place = writer.write(key, _in_cpu_memory(box, tensor.detach()))
                items.pieces.append((key, tuple(box.offsets), tuple(box.sizes), place))
        for key, value in objects.items():
            saved = io.BytesIO()
            torch.save(value, saved)
            items.objects[key] = writer.write(key, saved)
    files[name].items = writer.digest.hexdigest()
    return items


def _write_metadata(
    path: Path, ranks: list[_RankItems], aliases: Mapping[str, str], report: Report, files: dict[str, FileRecord]
) -> None:
    """Write what DCP reads first: the tensors, and where their pieces are."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    names: dict[str, list[str]] = {}
    # Tied values are stored once.
    for alias, name in aliases.items():
        names.setdefault(name, []).append(alias)
    # A pickle holds an object once, so equal sizes are one object.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    properties: dict[torch.dtype, TensorProperties] = {}

    def shared(size: tuple[int, ...]) -> torch.Size:
        return sizes.setdefault(size, torch.Size(size))

    for items in ranks:
        for name, (shape, dtype) in items.shapes.items():
            of_dtype = properties.setdefault(dtype, TensorProperties(dtype=dtype))
            tensors.setdefault(name, TensorStorageMetadata(of_dtype, shared(shape), []))
        for name, offsets, box_sizes, place in items.pieces:
            tensors[name].chunks.append(ChunkStorageMetadata(shared(offsets), shared(box_sizes)))
            info = storage_info(items.file, *place)
            for key in (name, *names.get(name, ())):
                storage[MetadataIndex(key, shared(offsets))] = info
        for name, place in items.objects.items():
            tensors[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = storage_info(items.file, *place)
    tensors |= {alias: tensors[name] for alias, name in aliases.items() if name in tensors}
    about = StorageMeta(checkpoint_id=path, save_id=str(uuid.uuid4()))
    metadata = Metadata(tensors, storage_data=storage, storage_meta=about, version=DCP_VERSION)
    with _hashed(path / METADATA, 0, report, files) as file:
        pickle.dump(metadata, file)


def _in_cpu_memory(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of a piece's values. See "Memory while saving"."""
    # A piece in a mapped swap file must be in memory before it is read: a failing disk would be SIGBUS.
    populate(tensor)
    tensor = tensor.resolve_conj().resolve_neg()
    # A piece without gaps is written where it lies. Copying it would take memory and time for nothing.
    if tensor.is_cpu and tensor.is_contiguous():
        # It may also be in another mapped file, such as one that is imported.
        populate_pages(tensor)
        return tensor
    # A private mapping goes back to the system at once, whereas the allocator might keep freed memory for itself.
    memory = mmap.mmap(-1, max(box.numel * tensor.dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=box.numel).view(box.sizes).copy_(tensor)
