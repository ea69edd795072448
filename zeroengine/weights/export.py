"""Export a checkpoint's weights as safetensors that Hugging Face loads. Needs no GPU and no process group.

Every file of the checkpoint is read once, from its start to its end, and each chunk is written to its place. So the
memory is that of a few chunks, whatever the model's size.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroengine.checkpoint.dcp_metadata import (
    METADATA,
    DcpMetadata,
    StoredPiece,
    StoredTensor,
    digest_of_items,
    find_tied_names,
    read_metadata,
)
from zeroengine.checkpoint.directory import CheckpointFolder, tag_of
from zeroengine.checkpoint.entries import AVERAGE, MODEL
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.checkpoint.manifest import Manifest, find_damage
from zeroengine.checkpoint.name_mapping import split_state_name, torch_dtype
from zeroengine.errors import CheckpointError
from zeroengine.utils.formats import listed, parse_byte_size
from zeroengine.utils.progress import progress
from zeroengine.weights.chunked_reads import LocatedPiece, locate, read_pieces
from zeroengine.weights.huggingface_format import FileLayout, SafetensorsWriter, TensorSpec, cast_spec, plan_files
from zeroengine.weights.output_folder import OutputFolder, parse_dtype

log = logging.getLogger("zeroengine")

# The names that a warning shows.
NUM_SHOWN = 3


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
    ema: bool = False,
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
        ema: Write the moving averages in place of the masters that have one.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged, or `out` exists already.
        OSError: Reading or writing failed.
    """
    dtype_name, max_bytes = parse_dtype(dtype), parse_byte_size(shard_size, "shard size", CheckpointError)
    path, manifest = find_checkpoint(folder, tag)
    # The lock keeps a training job that goes on from removing the checkpoint in the middle of the export.
    with CheckpointFolder(path.parent).held(tag_of(path.name)) if manifest is not None else nullcontext():
        if manifest is not None and manifest.left_out:
            raise CheckpointError(
                f"{path} was saved with frozen=False, without {len(manifest.left_out)} frozen parameters such as "
                f"{manifest.left_out[0]}: it is no whole model. Load it into a model that has their values, and call "
                "engine.save_weights(directory), with trainable_only=True for an adapter alone."
            )
        output = OutputFolder(out)
        output.check(force=force, apart_from=path)
        if manifest is not None and verify:
            # The metadata says where everything lies, so it is verified before anything is read by it.
            _check_file(path, METADATA, manifest, verify=True)
        metadata = read_metadata(path)
        names = _weight_names(metadata.tensors, manifest, prefix, path)
        if ema:
            names = _with_averages(names, metadata.tensors, path)
        tensors, tied = metadata.tensors, find_tied_names(metadata.tensors, names)
        others = [name.removeprefix(MODEL) for name in metadata.objects if name.startswith(MODEL)]
        if manifest is not None and others:
            log.warning(
                "%s holds values other than tensors, which safetensors cannot: %s are left out of %s",
                path,
                listed(others, NUM_SHOWN),
                output.path,
            )
        # Tied names refer to the same bytes, which are written once.
        stored_names = [stored for stored in names if stored not in tied]
        patterns = (manifest.config.get("keep_dtype") or ()) if manifest is not None else ()
        kept = {name for pattern in patterns for name in fnmatch.filter(names.values(), pattern)}
        specs = {names[s]: TensorSpec(tensors[s].shape, torch_dtype(tensors[s].dtype)) for s in stored_names}
        specs = {name: spec if name in kept else cast_spec(spec, dtype_name) for name, spec in specs.items()}
        # Positions follow from names, shapes and dtypes alone, so every file can be laid out before a value is read.
        layout = plan_files(specs, {names[alias]: names[first] for alias, first in tied.items()}, max_bytes)
        files = _files_to_read(path, metadata, stored_names, manifest, verify=verify)
        _write(files, names, layout, output, f"exporting {path.name}", verify=verify)
    return ExportResult(output.path, path, len(layout.sizes), len(specs), len(tied), layout.nbytes)


def _write(
    files: Mapping[Path, Sequence[LocatedPiece]],
    names: Mapping[str, str],
    layout: FileLayout,
    output: OutputFolder,
    label: str,
    *,
    verify: bool,
) -> None:
    """Write the weights in `files` to a folder: all of them, or nothing."""
    writer = SafetensorsWriter(output.begin(layout.nbytes), layout)

    def take_values(piece: StoredPiece, first: int, values: torch.Tensor) -> None:
        writer.write(names[piece.name], piece.offsets, piece.sizes, first, values)

    total = sum(located.nbytes for pieces in files.values() for located in pieces)
    try:
        writer.create()
        # The files are synced before the rename, so that a power cut cannot leave a folder with the final name and
        # empty files. They are read one after the other, which disks and network file systems serve fastest.
        with writer.synced(), progress(label, total) as report:
            for path, pieces in files.items():
                read_pieces(path, pieces, take_values, report, verify=verify)
        output.commit()
    # Also an interrupted export must not leave its partial files on the disk.
    except BaseException:
        output.abandon()
        raise


def _files_to_read(
    path: Path, metadata: DcpMetadata, stored_names: Iterable[str], manifest: Manifest | None, *, verify: bool
) -> dict[Path, list[LocatedPiece]]:
    """Return the weights in each file, in the order of the files' names."""
    pieces_of: defaultdict[str, list[StoredPiece]] = defaultdict(list)
    for stored in stored_names:
        for piece in metadata.tensors[stored].pieces:
            # DCP can compress items by extensions. The bytes of such an item are not those of the tensor.
            if piece.transforms:
                raise CheckpointError(f"{stored} is compressed ({', '.join(piece.transforms)}): not supported")
            pieces_of[piece.file].append(piece)
    # All files are looked at before the first of them is read, which may take minutes.
    if manifest is not None and verify:
        for name in pieces_of:
            _check_file(path, name, manifest)
    files = {}
    for name, pieces in sorted(pieces_of.items()):
        with as_checkpoint_errors(f"{path / name} cannot be read"):
            files[path / name] = located = locate(path / name, pieces)
            if manifest is None or not verify:
                continue
            # Each item has a checksum in the file itself, which is compared when the item is read, so optimizer state
            # need not be read. These would also agree in a file that another checkpoint has under the same name, which
            # the digest tells apart. Without them all of the file is read once more.
            digest = manifest.files[name].items
            if digest is None or not all(item.crc or not item.nbytes for item in located):
                _check_file(path, name, manifest, verify=True)
            elif digest != digest_of_items(path / name, metadata.items[name]):
                raise CheckpointError(f"{path / name} has been changed: its checksum differs")
    return files


def _weight_names(
    tensors: Mapping[str, StoredTensor], manifest: Manifest | None, prefix: str | None, path: Path
) -> dict[str, str]:
    """Return the names of a checkpoint's parameters and buffers, by their names in the checkpoint.

    Raises:
        CheckpointError: It has none.
    """
    if prefix is None:
        prefix = MODEL if manifest is not None else _find_prefix(tensors)
    # Without a prefix, names of the optimizer's state look like weights and have to be left out.
    names = {
        name: name.removeprefix(prefix)
        for name in tensors
        if name.startswith(prefix) and (prefix or split_state_name(name) is None)
    }
    if not names:
        raise CheckpointError(f"{path} holds no weights: no name in it begins with {prefix!r}")
    return names


def _with_averages(names: Mapping[str, str], stored: Collection[str], path: Path) -> dict[str, str]:
    """Return the names with the moving averages in place of the parameters that have one.

    Raises:
        CheckpointError: None has.
    """
    chosen = {
        average if (average := AVERAGE + at.removeprefix(MODEL)) in stored else at: name for at, name in names.items()
    }
    if chosen == names:
        raise CheckpointError(
            f'{path} holds no moving averages: "ema" in the configuration keeps them. Leave --ema (ema=True) out.'
        )
    return chosen


def _find_prefix(names: Collection[str]) -> str:
    """Return what plain PyTorch put before parameter names.

    The optimizer's state names the parameters, so it is what stands before most of these. Without an optimizer it is
    `model.`, where all names have it.
    """
    names_of_state = {name: split[0] for name in names if (split := split_state_name(name)) is not None}
    parameters = set(names_of_state.values())
    weights = [name for name in names if name not in names_of_state]
    # Every beginning of a name could be the prefix. The optimizer's state tells which one leaves a parameter's name.
    counts = Counter(
        name[:i]
        for name in weights
        for i in range(len(name))
        if name[i:] in parameters and (i == 0 or name[i - 1] == ".")
    )
    if counts:
        return counts.most_common(1)[0][0]
    return MODEL if all(name.startswith(MODEL) for name in weights) else ""


def _check_file(path: Path, name: str, manifest: Manifest, *, verify: bool = False) -> None:
    """Check that a file has the size, and where `verify` the checksum, that the manifest says."""
    if name not in manifest.files:
        raise CheckpointError(f"{path / name} is not among the checkpoint's files: it is damaged")
    # A size that differs shows a truncated copy without reading the file.
    for problem in find_damage(path, manifest, [name], verify=verify):
        raise CheckpointError(problem)
