"""Write the entries of a checkpoint to files of torch Distributed Checkpoint (DCP), which plain PyTorch reads too.

[Note: Memory while saving]
One item after the other is asked for (`lookup_object`) and written. A piece of a shard is a view of a large flat
buffer. Pieces in CPU memory are written from where they lie, with no copy; pieces on a GPU are copied to memory that is
given back to the system when the next piece is asked for.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroengine.checkpoint.compact_items import ItemWriter
from zeroengine.checkpoint.dcp_metadata import METADATA
from zeroengine.checkpoint.entries import StateEntries
from zeroengine.checkpoint.manifest import FileRecord
from zeroengine.disk.mapped_memory import populate, populate_pages
from zeroengine.disk.sequential_files import DirectFile, SyncedFile, create
from zeroengine.partition.boxes import Box
from zeroengine.utils.progress import Report
from zeroengine.utils.torch_internals import storage_info


def save_files(
    path: Path,
    entries: StateEntries,
    objects: Mapping[str, Any],
    aliases: Mapping[str, str],
    group: dist.ProcessGroup | None,
    report: Report,
) -> dict[str, FileRecord]:
    """Write every rank's entries and objects into the new directory `path`. A collective.

    Args:
        path: The directory, which exists and is empty.
        entries: The tensors by name; the pieces of all ranks together make up each of them.
        objects: Further values by name, each from one rank alone.
        aliases: Further names, and the entries that they stand for.
        group: The ranks that write; None where this process alone does.
        report: Takes the number of bytes written since its last call.

    Returns:
        What the manifest records of the files that this rank wrote, by name.
    """
    writer = _DcpWriter(path, aliases, report)
    planner = _SavePlanner(entries, objects)
    # Without a process group DCP warns about its own argument, which is passed on purpose.
    if group is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save({}, storage_writer=writer, planner=planner, no_dist=True)
    else:
        dcp_save({}, storage_writer=writer, planner=planner, process_group=group)
    return writer.files


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


class _HashingFileSystem(FileSystem):
    """Creates files that are hashed, and synced when they are closed."""

    def __init__(self, report: Report) -> None:
        self.checksums: dict[str, str] = {}
        self._report = report

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str, known_bytes: int = 0) -> Iterator[Any]:
        """Open a new file, and note its checksum when it is closed.

        Args:
            path: The file.
            mode: As DCP asks for it: to write bytes.
            known_bytes: What it will hold for certain.
        """
        with create(path, known_bytes) as file:
            hashed = _HashedFile(file, self._report)
            yield hashed
        # A file that failed gets no checksum, so it cannot appear in a manifest.
        self.checksums[Path(path).name] = hashed.hash.hexdigest()


class _DcpWriter(FileSystemWriter):
    """Write a rank's files and, on the coordinator, the metadata with the aliases in it."""

    def __init__(self, path: Path, aliases: Mapping[str, str], report: Report) -> None:
        # Files are synced when they are closed, so DCP need not do it.
        # The directory is new. A file that exists there already would be a mistake.
        super().__init__(path, overwrite=False, sync_files=False)
        self.fs = self._hashing = _HashingFileSystem(report)
        self._path, self._aliases = path, aliases
        self.files: dict[str, FileRecord] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's items, and describe the file. DCP makes an error in here an error of all ranks."""
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        known_bytes = sum(
            data.chunk.sizes.numel() * data.properties.dtype.itemsize
            for data in (item.tensor_data for item in plan.items)
            if data is not None
        )
        with self._hashing.create_stream(self._path / name, "wb", known_bytes) as file:
            items = ItemWriter(file)
            for item in plan.items:
                place = items.write(item.index.fqn, planner.resolve_data(item))
                results.append(WriteResult(item.index, place.length, storage_info(name, *place)))
        self._describe(name, self._hashing.checksums[name], items.digest.hexdigest())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _describe(self, name: str, checksum: str, digest: str | None) -> None:
        self.files[name] = FileRecord(bytes=(self._path / name).stat().st_size, xxh3=checksum, items=digest)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Add the aliases, and write the metadata."""
        all_results = [result for rank_results in results for result in rank_results]
        # Aliases are added by the coordinator alone, after all ranks have written, so tied values are stored once.
        for alias, name in self._aliases.items():
            if name in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
                all_results += [
                    replace(result, index=replace(result.index, fqn=alias))
                    for result in all_results
                    if result.index.fqn == name
                ]
        super().finish(metadata, [_with_shared_objects(metadata, all_results)])
        # DCP writes the metadata to a temporary name and renames it.
        # The manifest lists files by their final names.
        self._describe(METADATA, self._hashing.checksums[f"{METADATA}.tmp"], None)


def _with_shared_objects(metadata: Metadata, results: list[WriteResult]) -> list[WriteResult]:
    """Return the results with one object for equal names and sizes, which a pickle then holds once."""
    names = {name: name for name in metadata.state_dict_metadata}
    sizes: dict[torch.Size, torch.Size] = {}
    properties: dict[torch.dtype, TensorProperties] = {}

    def shared(size: torch.Size | None) -> Any:
        return None if size is None else sizes.setdefault(size, size)

    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            # The writer sets nothing of a tensor's properties but the dtype.
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties.setdefault(value.properties.dtype, value.properties),
                shared(value.size),
                [ChunkStorageMetadata(shared(chunk.offsets), shared(chunk.sizes)) for chunk in value.chunks],
            )
    return [
        replace(
            result,
            index=replace(result.index, fqn=names[result.index.fqn], offset=shared(result.index.offset)),
            storage_data=replace(result.storage_data, relative_path=sys.intern(result.storage_data.relative_path)),
        )
        for result in results
    ]


class _SavePlanner(DefaultSavePlanner):
    """Plans the items of this rank's entries and objects, and gives their values. See "Memory while saving"."""

    def __init__(self, entries: StateEntries, objects: Mapping[str, Any]) -> None:
        # Names are flat already, and DCP would otherwise split them at the dots.
        super().__init__(flatten_state_dict=False)
        self._entries, self._objects = entries, objects
        self._pieces: dict[MetadataIndex, tuple[Box, torch.Tensor]] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the items of this rank's boxes and objects."""
        items = []
        for name, entry in self._entries.items():
            for box, tensor in entry.pieces:
                index = MetadataIndex(name, torch.Size(box.offsets))
                self._pieces[index] = box, tensor
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        # DCP's default planner reads this attribute again while it writes.
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value of an item."""
        if index.offset is None:
            return self._objects[index.fqn]
        box, tensor = self._pieces[index]
        # A piece in a mapped swap file must be in memory before it is read: a failing disk would be SIGBUS.
        populate(tensor)
        # A piece without gaps is written where it lies. Copying it would take memory and time for nothing.
        if tensor.is_cpu and tensor.is_contiguous():
            # It may also be in another mapped file, such as one that is imported.
            populate_pages(tensor)
            return tensor.detach()
        # A private mapping goes back to the system at once, whereas the allocator might keep freed memory for itself.
        memory = mmap.mmap(-1, max(box.numel * tensor.dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copy = torch.frombuffer(memory, dtype=tensor.dtype, count=box.numel).view(box.sizes)
        return copy.copy_(tensor.detach())
