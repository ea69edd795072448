"""Read files of torch Distributed Checkpoint (DCP) into the entries of an engine.

Torch's own reader is not used: it would need a planner and a reader of ours around it, it unpickles the metadata
unsafely, and it reads an item anew for each box that overlaps with it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.dcp_metadata import DcpMetadata, FileWindow, StoredPiece
from zeroengine.checkpoint.entries import StateEntries, part_of_box
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import Report


def load_files(
    path: Path,
    metadata: DcpMetadata,
    entries: StateEntries,
    objects: Sequence[str],
    report: Report,
    *,
    check_only: bool = False,
) -> dict[str, Any]:
    """Read the pieces of `entries` into their tensors, cast to their dtypes. Not a collective.

    Args:
        path: The checkpoint's directory.
        metadata: What `path` holds.
        entries: The tensors to fill, by their names in the checkpoint.
        objects: The names of further values to read.
        report: Takes the number of bytes read since its last call.
        check_only: Read everything and leave the tensors as they are.

    Returns:
        The further values, by name.

    Raises:
        CheckpointError: Part of an entry is missing or cannot be read, or an object could run code.
    """
    # The wanted parts of each stored piece: a part's offsets in the whole tensor, and what it is copied to.
    parts: dict[StoredPiece, list[tuple[list[int], torch.Tensor]]] = {metadata.objects[name]: [] for name in objects}
    for name, entry in entries.items():
        for box, tensor in entry.pieces:
            missing = box.numel
            # The checkpoint may have been cut for another number of ranks, so a box may lie in several pieces. A piece
            # with another number of dimensions has no part of it.
            for piece in (piece for piece in metadata.tensors[name].pieces if len(piece.sizes) == len(box.sizes)):
                ranges = list(zip(box.offsets, box.sizes, piece.offsets, piece.sizes, strict=True))
                offsets = [max(own, stored) for own, _, stored, _ in ranges]
                ends = [min(own + size, stored + stored_size) for own, size, stored, stored_size in ranges]
                sizes = [end - offset for offset, end in zip(offsets, ends, strict=True)]
                if all(size > 0 for size in sizes):
                    parts.setdefault(piece, []).append((offsets, part_of_box(tensor, box.offsets, offsets, sizes)))
                    missing -= math.prod(sizes)
            # A gap would leave old values in the tensor without an error.
            if missing:
                raise CheckpointError(f"the checkpoint lacks part of {name}: it is incomplete")
    values: dict[str, Any] = {}
    in_file_order = sorted(parts, key=lambda piece: (piece.file, piece.start))
    for file_name, pieces in groupby(in_file_order, key=lambda piece: piece.file):
        with as_checkpoint_errors(f"{path} cannot be read"), metadata.open_file(path / file_name) as file:
            for piece in pieces:
                value = load_item(file, piece)
                if piece.name in objects:
                    values[piece.name] = value
                elif not _is_as_described(value, piece, metadata.tensors[piece.name].dtype):
                    raise CheckpointError(f"the metadata describes {piece.name} otherwise than it is: it is damaged")
                for offsets, target in parts[piece]:
                    part = part_of_box(value, piece.offsets, offsets, target.shape)
                    if not check_only:
                        # A target may be mapped from a swap file. Populating it raises an error where the disk fails.
                        populate(target, write=True)
                        target.copy_(part)
                    report(target.nbytes)
    return values


def _is_as_described(value: Any, piece: StoredPiece, dtype: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and tuple(value.shape) == tuple(piece.sizes)
        and str(value.dtype).removeprefix("torch.") == dtype
    )


def load_item(file: io.BufferedReader, piece: StoredPiece) -> Any:
    """Return the value of one item of a file.

    Raises:
        CheckpointError: It could run code.
        Exception: Whatever torch raises where the file is damaged. See ``as_checkpoint_errors``.
    """
    stream: Any = FileWindow(file, piece.start, piece.length)
    if piece.transforms:
        # Most checkpoints have none, and tools that read weights alone start faster without this import.
        from torch.distributed.checkpoint import FileSystemReader

        transforms: Any = FileSystemReader("").transforms
        stream = transforms.transform_load_stream(None, piece.transforms, stream)
        # torch.load has to seek, which a decompressed stream cannot.
        stream = io.BytesIO(stream.read())
    try:
        # The checkpoint may come from anybody, so only values that cannot run code are unpickled.
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch says in the message that a class was refused. Every other error means that the file is damaged.
        if "GLOBAL" not in str(error):
            raise
        raise CheckpointError(
            f"{piece.name} in the checkpoint holds more than tensors, numbers and strings, and could run code: it is "
            "refused"
        ) from error
