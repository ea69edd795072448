"""Read files of torch Distributed Checkpoint (DCP) into the entries of an engine."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from zeroengine.checkpoint.dcp_errors import failure_reason, innermost_error
from zeroengine.checkpoint.dcp_metadata import DcpMetadata, StoredPiece
from zeroengine.checkpoint.dcp_save import no_dist_warning_ignored
from zeroengine.checkpoint.entries import StateEntries, torch_dtype
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import Report


def load_files(
    path: Path, metadata: DcpMetadata, entries: StateEntries, objects: Sequence[str], report: Report
) -> dict[str, Any]:
    """Read the pieces of `entries` into their tensors, cast to their dtypes. Not a collective.

    Args:
        path: The checkpoint's directory.
        metadata: What `path` holds.
        entries: The tensors to fill, by their names in the checkpoint.
        objects: The names of further values to read.
        report: Takes the number of bytes read since its last call.

    Returns:
        The further values, by name.

    Raises:
        CheckpointError: Part of an entry is missing or cannot be read, or an object could run code.
    """
    return _load(path, _LoadPlanner(entries, objects, metadata, report))


def check_readable(path: Path, metadata: DcpMetadata, entries: StateEntries, report: Report) -> None:
    """Read what `load_files` would, and keep nothing of it.

    Raises:
        CheckpointError: As `load_files`.
    """
    _load(path, _CheckPlanner(entries, (), metadata, report))


def _load(path: Path, planner: _LoadPlanner) -> dict[str, Any]:
    try:
        # Each rank reads only its own boxes and needs nothing from the others, so DCP need not communicate. A rank that
        # fails then does not leave the others waiting inside DCP.
        with no_dist_warning_ignored():
            dcp_load({}, storage_reader=_DcpReader(path, planner), planner=planner, no_dist=True)
    # CheckpointException derives from BaseException, so handlers of our callers would miss it.
    except CheckpointException as error:
        inner = innermost_error(error)
        # An error of ours has its message already. An interrupt by the user must stay an interrupt.
        if isinstance(inner, CheckpointError) or not isinstance(inner, Exception):
            raise inner from None
        raise CheckpointError(f"{path} cannot be read: {failure_reason(inner)}") from inner
    return planner.objects


class _DcpReader(FileSystemReader):
    """Read the items of a plan without torch's unsafe unpickler: the metadata file has been read already."""

    def __init__(self, path: Path, planner: _LoadPlanner) -> None:
        super().__init__(path)
        self._planner = planner

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return where the pieces of the plan lie."""
        return Metadata({}, storage_data=self._planner.storage)


class _LoadPlanner(LoadPlanner):
    """Plans the reads of one rank's entries and objects, and takes the values.

    Attributes:
        objects: The objects that have been read, by name.
        storage: Where each piece lies, as torch's reader looks it up.
    """

    def __init__(self, entries: StateEntries, objects: Sequence[str], metadata: DcpMetadata, report: Report) -> None:
        self._entries, self._names, self._metadata, self._report = entries, objects, metadata, report
        self._targets: dict[MetadataIndex, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.storage: dict[MetadataIndex, _StorageInfo] = {}
        # The reader looks up pieces by name and offset, so only those that this rank asks for are listed.
        for name in entries:
            for piece in metadata.tensors[name].pieces:
                self.storage[MetadataIndex(name, torch.Size(piece.offsets))] = _storage_info(piece)
        for name in objects:
            self.storage[MetadataIndex(name)] = _storage_info(metadata.objects[name])

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor knows everything."""

    def create_local_plan(self) -> LoadPlan:
        """Return the reads of this rank's boxes and objects."""
        items: list[ReadItem] = []
        for name, entry in self._entries.items():
            stored = self._metadata.tensors[name]
            chunks = [_chunk(piece.offsets, piece.sizes) for piece in stored.pieces]
            properties = TensorProperties(dtype=torch_dtype(stored.dtype))
            # torch computes which stored boxes overlap with ours. The checkpoint may have been cut for another number
            # of ranks.
            tensor_metadata = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
            for box, tensor in entry.pieces:
                chunk = _chunk(box.offsets, box.sizes)
                self._targets[MetadataIndex(name, chunk.offsets)] = tensor
                reads = create_read_items_for_chunk_list(name, tensor_metadata, [chunk])
                # A gap would leave old values in the tensor without an error.
                if sum(item.lengths.numel() for item in reads) != box.numel:
                    raise CheckpointError(f"the checkpoint lacks part of {name}: it is incomplete")
                items += reads
        return LoadPlan(items + [_read_object(name) for name in self._names])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object with torch's restricted unpickler."""
        name = read_item.dest_index.fqn
        try:
            # The checkpoint may come from anybody, so only values that cannot run code are unpickled.
            self.objects[name] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            problem = "holds more than tensors, numbers and strings, and could run code: it is refused"
            # torch says in the message that a class was refused. Every other error means that the file is damaged.
            if not isinstance(error, pickle.UnpicklingError) or "GLOBAL" not in str(error):
                problem = f"cannot be read: {failure_reason(error)}"
            raise CheckpointError(f"{name} in the checkpoint {problem}") from error

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory that an item is read into."""
        target = self._targets[read_item.dest_index]
        # Part of a box may come from one stored piece and part from another, so the target is narrowed to this item.
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return self.prepare(target)

    def prepare(self, target: torch.Tensor) -> torch.Tensor:
        """Return the memory that part of a tensor is read into, given where it belongs."""
        # A target may be mapped from a swap file. Populating it raises an error where the disk fails.
        populate(target, write=True)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Report the bytes that were read."""
        self._report(tensor.nbytes)


class _CheckPlanner(_LoadPlanner):
    """Read into memory that is thrown away."""

    def prepare(self, target: torch.Tensor) -> torch.Tensor:
        """Return memory of its own for each item."""
        # The read is repeated into the states themselves later, so they must not change here.
        return torch.empty(target.shape, dtype=target.dtype, device="cpu")


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _storage_info(piece: StoredPiece) -> _StorageInfo:
    return _StorageInfo(piece.file, piece.start, piece.length, piece.transforms or None)


def _read_object(name: str) -> ReadItem:
    # A reader of DCP needs sizes even for a value that is not a tensor.
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
