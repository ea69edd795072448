"""Export a checkpoint's weights as safetensors that Hugging Face loads. Needs no GPU and no process group.

Every file of the checkpoint is read once, from its start to its end, and each chunk is written to its place. So the
memory is that of a few chunks, whatever the model's size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.checkpoint.dcp_metadata import (
    METADATA,
    ByteRange,
    DcpMetadata,
    StoredPiece,
    StoredTensor,
    digest_of_items,
    find_tied_names,
    read_metadata,
)
from zeroengine.checkpoint.directory import CheckpointFolder, tag_of
from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.checkpoint.manifest import Manifest, checksum_of_file
from zeroengine.errors import CheckpointError
from zeroengine.utils.byte_size import parse_byte_size
from zeroengine.utils.progress import Report, progress
from zeroengine.weights.chunked_reads import LocatedPiece, TakeValues, locate, read_pieces
from zeroengine.weights.huggingface_format import SafetensorsWriter, TensorSpec, plan_files
from zeroengine.weights.output_folder import OutputFolder, parse_dtype

MODEL = "model."


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: The folder of weights.
        source: The checkpoint's directory.
        files: The number of safetensors files.
        tensors: The number of tensors, tied ones once.
        tied: The number of further names of tied tensors.
        nbytes: The size of the files in bytes.
    """

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
    """Write a checkpoint's parameters and buffers to the folder `out`, which then appears as a whole.

    Parameters are the fp32 masters. A tied parameter is written once; the files' metadata maps its other names to it.

    Args:
        folder: A folder of checkpoints, or one checkpoint, also of plain torch Distributed Checkpoint.
        out: The folder to write.
        tag: The checkpoint's name; the newest where None.
        dtype: The dtype that floating tensors are cast to: fp32, bf16 or fp16; None keeps each tensor's own.
        shard_size: The bytes of values in a file at most, such as "5GB".
        force: Replace the weights in `out`.
        verify: Check the checksum of every file that is read.
        prefix: What stands before parameter names in the checkpoint; found out where None.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged, or `out` exists already.
        OSError: Reading or writing failed.
    """
    dtype_name, max_bytes = parse_dtype(dtype), parse_byte_size(shard_size, "shard size", CheckpointError)
    target_dtype = None if dtype_name is None else getattr(torch, dtype_name)
    path, manifest = find_checkpoint(folder, tag)
    # The lock keeps a training job that goes on from removing the checkpoint in the middle of the export.
    with CheckpointFolder(path.parent).held(tag_of(path.name)) if manifest is not None else nullcontext():
        output = OutputFolder(out)
        output.check(force=force, apart_from=[path])
        source = _CheckpointSource(path, manifest, prefix, verify=verify)
        return source.write(output, target_dtype, max_bytes)


class _CheckpointSource:
    """The weights of one checkpoint.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest; None where plain PyTorch wrote it.
        prefix: What stands before parameter names; found out where None.
        verify: Check checksums.

    Raises:
        CheckpointError: It is damaged, or holds no weights.
    """

    def __init__(self, path: Path, manifest: Manifest | None, prefix: str | None, *, verify: bool) -> None:
        self._path, self._manifest, self._verify = path, manifest, verify
        if manifest is not None and verify:
            # The metadata says where everything lies, so it is verified before anything is read by it.
            _check_file(path, METADATA, manifest, hashed=True)
        self._metadata: DcpMetadata = read_metadata(path)
        tensors = self._metadata.tensors
        self._names = {stored: name for name, stored in weight_names(tensors, manifest, prefix, path).items()}
        self._tied = find_tied_names(tensors, self._names)
        # Tied names refer to the same bytes, which are written once.
        self._stored_names = [stored for stored in self._names if stored not in self._tied]

    def write(self, output: OutputFolder, dtype: torch.dtype | None, max_bytes: int) -> ExportResult:
        """Write the weights to a folder: all of them, or nothing."""
        tensors, names = self._metadata.tensors, self._names
        specs = {
            names[stored]: TensorSpec(tensors[stored].shape, getattr(torch, tensors[stored].dtype)).cast(dtype)
            for stored in self._stored_names
        }
        # Positions follow from names, shapes and dtypes alone, so every file can be laid out before a value is read.
        layout = plan_files(specs, {names[alias]: names[first] for alias, first in self._tied.items()}, max_bytes)
        files = self._files()
        writer = SafetensorsWriter(output.begin(layout.nbytes), layout)

        def take_values(piece: StoredPiece, first: int, values: torch.Tensor) -> None:
            writer.write(names[piece.name], piece.offsets, piece.sizes, first, values)

        try:
            writer.create()
            with progress(f"exporting {self._path.name}", sum(file.nbytes for file in files)) as report:
                for file in files:
                    file.read(take_values, report)
            writer.close()
            # The files are synced before the rename, so that a power cut cannot leave a folder with the final name and
            # empty files.
            writer.sync()
            output.commit()
        # Also an interrupted export must not leave its partial files on the disk.
        except BaseException:
            writer.close()
            output.abandon()
            raise
        return ExportResult(output.path, self._path, len(layout.sizes), len(specs), len(self._tied), layout.nbytes)

    def _files(self) -> list[_CheckpointFile]:
        """Return the files that hold weights, in the order of their names."""
        pieces: dict[str, list[StoredPiece]] = {}
        for stored in self._stored_names:
            for piece in self._metadata.tensors[stored].pieces:
                # DCP can compress items by extensions. The bytes of such an item are not those of the tensor.
                if piece.transforms:
                    raise CheckpointError(f"{stored} is compressed ({', '.join(piece.transforms)}): not supported")
                pieces.setdefault(piece.file, []).append(piece)
        manifest = self._manifest if self._verify else None
        for name in pieces:
            _check_file(self._path, name, manifest)
        # Files are read one after the other, which disks and network file systems serve fastest.
        return [
            _CheckpointFile(self._path / name, pieces[name], self._metadata.items[name], manifest, self._verify)
            for name in sorted(pieces)
        ]


def weight_names(
    tensors: Mapping[str, StoredTensor], manifest: Manifest | None, prefix: str | None, path: Path
) -> dict[str, str]:
    """Return the names of a checkpoint's parameters and buffers, each with its name in the checkpoint.

    Raises:
        CheckpointError: It has none.
    """
    if prefix is None:
        prefix = MODEL if manifest is not None else _find_prefix(tensors)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    # Without a prefix, names of the optimizer's state look like weights and have to be left out.
    if not prefix:
        names = {name: name for name in names if _parameter_of_state(name) is None}
    if not names:
        raise CheckpointError(f"{path} holds no weights: no name in it begins with {prefix!r}")
    return names


def _find_prefix(names: Iterable[str]) -> str:
    """Return what plain PyTorch put before parameter names.

    The optimizer's state names the parameters, so it is what stands before most of these. Without an optimizer it is
    `model.`, where all names have it.
    """
    names = list(names)
    parameters = {parameter for name in names if (parameter := _parameter_of_state(name)) is not None}
    weights = [name for name in names if _parameter_of_state(name) is None]
    counts: dict[str, int] = {}
    for name in weights:
        # Every beginning of a name could be the prefix. The optimizer's state tells which of them leaves a parameter's
        # name.
        for prefix in _prefixes(name):
            if name.removeprefix(prefix) in parameters:
                counts[prefix] = counts.get(prefix, 0) + 1
    if counts:
        return max(counts, key=lambda prefix: counts[prefix])
    return MODEL if all(name.startswith(MODEL) for name in weights) else ""


def _parameter_of_state(name: str) -> str | None:
    """Return the parameter of a name of optimizer state, such as `optimizer.state.<parameter>.exp_avg`."""
    before, separator, rest = name.partition("state.")
    is_state = separator and (not before or before.endswith("."))
    return rest.rpartition(".")[0] if is_state else None


def _prefixes(name: str) -> Iterator[str]:
    """Yield the beginnings of a name that end with a dot, and the empty one."""
    parts = name.split(".")
    return (".".join([*parts[:i], ""]) if i else "" for i in range(len(parts)))


def _check_file(path: Path, name: str, manifest: Manifest | None, *, hashed: bool = False) -> None:
    """Check that a file exists and has the size, and where `hashed` the checksum, that the manifest says."""
    file = path / name
    try:
        size = file.stat().st_size
        if manifest is not None:
            if name not in manifest.files:
                raise CheckpointError(f"{file} is not among the checkpoint's files: it is damaged")
            # A size that differs shows a truncated copy without reading the file.
            if size != manifest.files[name].bytes:
                raise CheckpointError(f"{file} has {size:,} bytes, not {manifest.files[name].bytes:,}")
            if hashed and checksum_of_file(file) != manifest.files[name].xxh3:
                raise _changed_error(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _changed_error(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has been changed: its checksum differs")


class _CheckpointFile:
    """A file of the checkpoint, and the weights in it.

    Where weights are most of the file, all of it is read and its checksum compared. Otherwise the checksums are
    compared that the weights' items have in the file itself: they are slower, but optimizer state need not be read.
    These would also agree in a file that another checkpoint has under the same name, which the manifest's digest of
    the items tells apart.

    Attributes:
        nbytes: The number of bytes to read.
    """

    def __init__(
        self,
        path: Path,
        pieces: Sequence[StoredPiece],
        items: Sequence[ByteRange],
        manifest: Manifest | None,
        verify: bool,
    ) -> None:
        self._path = path
        self._pieces: list[LocatedPiece] = locate(path, pieces)
        self._expected = None if manifest is None else manifest.files[path.name].xxh3
        num_wanted, size = sum(piece.nbytes for piece in self._pieces), path.stat().st_size
        self._check = "pieces" if verify else "nothing"
        if manifest is not None:
            digest = manifest.files[path.name].items
            all_have_checksums = all(piece.crc or not piece.nbytes for piece in self._pieces)
            # Reading all of the file costs little more where weights are most of it, and its checksum covers more.
            if digest is None or 2 * num_wanted >= size or not all_have_checksums:
                self._check = "file"
            elif digest != digest_of_items(path, items):
                raise _changed_error(path)
        self.nbytes = size if self._check == "file" else num_wanted

    def read(self, take_values: TakeValues, report: Report) -> None:
        """Read the weights.

        Raises:
            CheckpointError: The file is damaged.
        """
        try:
            checksum = read_pieces(self._path, self._pieces, take_values, report, check=self._check)
        except (OSError, CheckpointError):
            # These errors have a message of their own.
            raise
        except Exception as error:
            # Any other error comes from bytes that make no sense. The checksum tells a damaged file from a mistake in
            # the reader.
            if self._expected is not None and checksum_of_file(self._path) != self._expected:
                raise _changed_error(self._path) from error
            raise CheckpointError(f"{self._path} cannot be read: {type(error).__name__}: {error}") from error
        if self._check == "file" and checksum != self._expected:
            raise _changed_error(self._path)
