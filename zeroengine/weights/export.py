"""Weights out of a checkpoint, as safetensors that Hugging Face loads. Needs no GPU and no process group.

Every file of the checkpoint is read once, from its start to its end, and each chunk goes to its place: memory is that
of a chunk, whatever the model's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.checkpoint.dcp_metadata import (
    METADATA,
    ByteRange,
    StoredPiece,
    StoredTensor,
    digest_of_items,
    items_by_file,
    read_metadata,
    tied,
)
from zeroengine.checkpoint.directory import CheckpointDirectory, Manifest, checksum, tag_of
from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.errors import CheckpointError
from zeroengine.utils.byte_size import parse_byte_size
from zeroengine.utils.progress import progress
from zeroengine.weights import chunked_reads, huggingface_format
from zeroengine.weights.output_folder import OutputFolder, parse_dtype

MODEL = "model."


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    source: Path
    files: int
    tensors: int
    tied: int
    nbytes: int


def export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    shard_size: str | int = "5GB",
    force: bool = False,
    verify: bool = True,
    prefix: str | None = None,
) -> ExportResult:
    """Writes a checkpoint's parameters and buffers to the folder ``out``: whole or not at all.

    Parameters are the fp32 masters. A tied parameter is written once; the files' metadata says what its other names
    stand for.

    Args:
        folder: of checkpoints, or one checkpoint, also of plain torch Distributed Checkpoint.
        tag: the checkpoint's name; the newest where None.
        dtype: what floating tensors are cast to: fp32, bf16 or fp16; None: as they are.
        shard_size: bytes of values in a file at most, such as ``5GB``.
        force: replace the weights in ``out``.
        verify: check the checksum of every file that is read.
        prefix: what stands before parameter names in the checkpoint; found out where None.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or ``out`` is there already.
        OSError: reading or writing failed.
    """
    target, most = parse_dtype(dtype), parse_byte_size(shard_size, "shard size", CheckpointError)
    to = None if target is None else getattr(torch, target)
    path, manifest = find_checkpoint(folder, tag)
    with CheckpointDirectory(path.parent).held(tag_of(path.name)) if manifest is not None else nullcontext():
        return _export(path, manifest, out, to, most, force=force, verify=verify, prefix=prefix)


def _export(
    path: Path,
    manifest: Manifest | None,
    out: str | os.PathLike[str],
    to: torch.dtype | None,
    most: int,
    *,
    force: bool,
    verify: bool,
    prefix: str | None,
) -> ExportResult:
    output = OutputFolder(out)
    output.check(force=force, apart_from=[path])
    if manifest is not None and verify:
        _check_file(path, METADATA, manifest, hashed=True)
    stored = read_metadata(path)
    names = {there: name for name, there in weights_of(stored, manifest, prefix, path).items()}
    aliases = tied(stored, names)
    kept = {there: name for there, name in names.items() if there not in aliases}
    specs = {
        name: huggingface_format.TensorSpec(stored[there].shape, getattr(torch, stored[there].dtype)).cast(to)
        for there, name in kept.items()
    }
    plan = huggingface_format.plan(specs, {names[alias]: names[there] for alias, there in aliases.items()}, most)
    by_file: dict[str, list[StoredPiece]] = {}
    for there in kept:
        for piece in stored[there].pieces:
            by_file.setdefault(piece.file, []).append(piece)
    checked = manifest if verify else None
    items = items_by_file(path)
    for file in by_file:
        _check_file(path, file, checked)
    sources = [
        _CheckpointFile(path / file, chunked_reads.locate(path / file, by_file[file]), items[file], checked, verify)
        for file in sorted(by_file)
    ]
    writer = huggingface_format.SafetensorsWriter(output.begin(plan.nbytes), plan)
    try:
        writer.create()

        def take(piece: StoredPiece, first: int, values: torch.Tensor) -> None:
            writer.write(names[piece.name], piece.offsets, piece.sizes, first, values)

        with progress(f"exporting {path.name}", sum(source.nbytes for source in sources)) as report:
            for source in sources:
                source.read(take, report)
        writer.close()
        writer.sync()
        output.commit()
    except BaseException:
        writer.close()
        output.abandon()
        raise
    return ExportResult(output.path, path, len(plan.sizes), len(specs), len(aliases), plan.nbytes)


def weights_of(
    stored: Mapping[str, StoredTensor], manifest: Manifest | None, prefix: str | None, path: Path
) -> dict[str, str]:
    """The names of a checkpoint's parameters and buffers, and what each is called in there.

    Raises:
        CheckpointError: it has none.
    """
    if prefix is None:
        prefix = MODEL if manifest is not None else _prefix(stored)
    found = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if not prefix:
        found = {name: name for name in found if _state_of(name) is None}
    if not found:
        raise CheckpointError(f"{path} holds no weights: no name in it begins with {prefix!r}")
    return found


def _prefix(names: Iterable[str]) -> str:
    """What plain PyTorch put before parameter names.

    It is what stands before most of those that the optimizer has state of; without one, ``model.`` where all have it.
    """
    names = list(names)
    params = {param for name in names if (param := _state_of(name)) is not None}
    weights = [name for name in names if _state_of(name) is None]
    counts: dict[str, int] = {}
    for name in weights:
        for before in _beginnings(name):
            if name.removeprefix(before) in params:
                counts[before] = counts.get(before, 0) + 1
    if counts:
        return max(counts, key=lambda before: counts[before])
    return MODEL if all(name.startswith(MODEL) for name in weights) else ""


def _state_of(name: str) -> str | None:
    """The parameter, where a name is that of optimizer state: ``optimizer.state.<parameter>.exp_avg``."""
    before, found, rest = name.partition("state.")
    is_state = found and (not before or before.endswith("."))
    return rest.rpartition(".")[0] if is_state else None


def _beginnings(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join([*parts[:i], ""]) if i else "" for i in range(len(parts)))


def _check_file(path: Path, name: str, manifest: Manifest | None, *, hashed: bool = False) -> None:
    try:
        size = (path / name).stat().st_size
        if manifest is not None:
            if name not in manifest.files:
                raise CheckpointError(f"{path / name} is not among the checkpoint's files: it is damaged")
            if size != manifest.files[name].bytes:
                raise CheckpointError(f"{path / name} has {size:,} bytes, not {manifest.files[name].bytes:,}")
            if hashed and checksum(path / name) != manifest.files[name].xxh3:
                raise _changed(path / name)
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has been changed: its checksum differs")


class _CheckpointFile:
    """A file of the checkpoint, and what is wanted of it.

    Where most of it is wanted, all is read, and its checksum compared; else the checksums that the wanted pieces have
    in the file itself. Those are slower, but optimizer state need not be read for them. The manifest's digest of all of
    these tells a file that another checkpoint has under the same name.
    """

    def __init__(
        self,
        path: Path,
        located: list[chunked_reads.LocatedPiece],
        items: list[ByteRange],
        manifest: Manifest | None,
        verify: bool,
    ) -> None:
        self._path, self._located = path, located
        self._expected = None if manifest is None else manifest.files[path.name].xxh3
        wanted, size = sum(one.nbytes for one in located), path.stat().st_size
        self._check = "pieces" if verify else "nothing"
        if manifest is not None:
            digest = manifest.files[path.name].items
            if digest is None or 2 * wanted >= size or not all(one.crc or not one.nbytes for one in located):
                self._check = "file"
            elif digest != digest_of_items(path, items):
                raise _changed(path)
        self.nbytes = size if self._check == "file" else wanted

    def read(self, take: chunked_reads.Take, report: Callable[[int], None]) -> None:
        try:
            total = chunked_reads.read(self._path, self._located, take, report, check=self._check)
        except (OSError, CheckpointError):
            raise
        except Exception as error:
            if self._expected is not None and checksum(self._path) != self._expected:
                raise _changed(self._path) from error
            raise CheckpointError(f"{self._path} cannot be read: {type(error).__name__}: {error}") from error
        if self._check == "file" and total != self._expected:
            raise _changed(self._path)
