"""Look at a folder of checkpoints: what is in it, and what is wrong with it. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from zeroengine.checkpoint.dcp_metadata import METADATA, ZEROENGINE_PREFIX, find_tied_names, read_metadata
from zeroengine.checkpoint.directory import LATEST, CheckpointFolder, check_tag, tag_of
from zeroengine.checkpoint.manifest import MANIFEST, Manifest, find_damage, read_manifest
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import checked_path
from zeroengine.utils.progress import progress

# What the names of the optimizer's state begin with. `entries.py` has the name, and needs torch.
OPTIMIZER = "optimizer.state."
WHOLE, DAMAGED, UNFINISHED, UNCHECKED, PLAIN = "whole", "damaged", "unfinished", "not checked", "no checksums"
# Each thread hashes one file at a time.
NUM_THREADS = 4


def find_checkpoint(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Manifest | None]:
    """Return the directory of a checkpoint and its manifest, which is None where plain PyTorch wrote it.

    Args:
        folder: A folder of checkpoints, or one checkpoint.
        tag: The checkpoint's name; the newest where None.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(os.path.abspath(checked_path(folder, "the folder of checkpoints", CheckpointError)))
    plain = path if tag is None else path / check_tag(tag)
    # A checkpoint of plain PyTorch has no manifest and no folder around it that this code knows.
    if is_plain(plain):
        return plain, None
    directory = CheckpointFolder(path)
    # The user may name one checkpoint directly. Its folder then decides as always.
    if tag is None and (path / MANIFEST).is_file():
        directory, tag = CheckpointFolder(path.parent), path.name
    tag = directory.latest() if tag is None else tag
    return directory.checkpoint(tag), directory.manifest(tag)


def is_plain(path: Path) -> bool:
    """Return whether plain PyTorch wrote the checkpoint in the directory `path`.

    Raises:
        CheckpointError: The metadata cannot be read, or zeroengine wrote it and the manifest is missing.
    """
    if not (path / METADATA).is_file() or (path / MANIFEST).is_file():
        return False
    # zeroengine stores objects of its own in every checkpoint. Their names show that a missing manifest is a loss.
    if any(name.startswith(ZEROENGINE_PREFIX) for name in read_metadata(path).objects):
        raise CheckpointError(
            f"{path} is not whole: zeroengine wrote it, and {MANIFEST} is missing. Copy that file, too; or load "
            "another checkpoint, with tag= or fallback=True."
        )
    return True


@dataclass
class CheckpointInfo:
    """One checkpoint, or what is left of one.

    Attributes:
        tag: Its name.
        path: Its directory.
        verdict: WHOLE, DAMAGED, UNFINISHED, UNCHECKED or PLAIN.
        nbytes: The size of its files in bytes.
        latest: Whether it is the newest.
        problems: What is wrong with it, a sentence each.
        manifest: Its manifest, where it has one that can be read.
        modified: When its directory was last written to, in seconds since the epoch.
    """

    tag: str
    path: str
    verdict: str
    nbytes: int
    latest: bool = False
    problems: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    modified: float = 0.0

    @property
    def saved_at(self) -> str:
        """The time of the save as an ISO date; of the last change, where there is no manifest."""
        if self.manifest is not None:
            return self.manifest.saved_at
        return datetime.fromtimestamp(self.modified, timezone.utc).isoformat(timespec="seconds")

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as values that JSON has."""
        tree = {key: value for key, value in asdict(self).items() if key not in ("manifest", "modified")}
        tree["saved_at"] = self.saved_at
        if self.manifest is not None:
            fields = self.manifest.model_dump(
                exclude={"config", "digests", "param_groups", "loss_scaler", "tag", "saved_at"}
            )
            tree |= fields | {"files": len(fields["files"]), "left_out": len(fields["left_out"])}
        return tree


@dataclass
class FolderInfo:
    """The checkpoints of a folder, the oldest first, and what is wrong with the folder itself."""

    path: Path
    checkpoints: list[CheckpointInfo]
    problems: list[str]

    @property
    def damaged(self) -> bool:
        """Whether anything is wrong with the folder or a checkpoint."""
        return bool(self.problems) or any(checkpoint.verdict == DAMAGED for checkpoint in self.checkpoints)


def inspect_folder(folder: str | os.PathLike[str], tag: str | None = None, *, verify: bool = True) -> FolderInfo:
    """Return what is in a folder of checkpoints, or in one checkpoint.

    Args:
        folder: The folder, or the checkpoint.
        tag: Look at this checkpoint alone.
        verify: Read every file and compare checksums; otherwise compare sizes only.

    Raises:
        CheckpointError: There is nothing.
    """
    path = Path(os.path.abspath(checked_path(folder, "the folder of checkpoints", CheckpointError)))
    if tag is None and ((path / MANIFEST).is_file() or (path / METADATA).is_file()):
        checkpoints, problems = [_inspect_checkpoint(path, path.name)], []
    else:
        checkpoints = [info for info in _inspect_all(path) if tag is None or info.tag == check_tag(tag)]
        problems = _mark_latest(path, checkpoints) if tag is None or checkpoints else []
        if not checkpoints and not problems:
            # This raises an error that says what is wrong, except where there is nothing to say.
            find_checkpoint(path, tag)
            raise CheckpointError(f"{path} holds no checkpoint")
    _check_files(checkpoints, verify)
    return FolderInfo(path, checkpoints, problems)


def _inspect_all(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints in the order of `CheckpointFolder.tags`, those without a manifest first."""
    entries = [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    return sorted(
        (info for entry in entries for info in _inspect_entry(path, entry)),
        key=lambda info: (info.manifest.sequence if info.manifest else -1, info.saved_at, info.modified, info.tag),
    )


def _inspect_entry(path: Path, entry: Path) -> Iterator[CheckpointInfo]:
    """Yield the checkpoint that a directory is, if it is one."""
    name = entry.name
    if name.startswith(".") and name.endswith(".writing"):
        yield CheckpointInfo(tag_of(name), str(entry), UNFINISHED, _size(entry), modified=entry.stat().st_mtime)
    elif name.startswith(".") and name.endswith(".replaced"):
        # A writer that died between two renames left the only checkpoint of the tag in this directory.
        if not (path / tag_of(name)).exists():
            yield _inspect_checkpoint(entry, tag_of(name))
    # Any file of DCP makes a directory a checkpoint, so that one without a manifest is reported as damaged rather than
    # ignored.
    elif not name.startswith(".") and any(
        (entry / MANIFEST).is_file() or file.name == METADATA or file.suffix == ".distcp" for file in entry.iterdir()
    ):
        yield _inspect_checkpoint(entry, name)


def _inspect_checkpoint(path: Path, tag: str) -> CheckpointInfo:
    info = CheckpointInfo(tag, str(path), UNCHECKED, _size(path), modified=path.stat().st_mtime)
    try:
        if (path / MANIFEST).is_file():
            info.manifest = read_manifest(path / MANIFEST)
        elif is_plain(path):
            info.verdict = PLAIN
        else:
            raise CheckpointError(f"{path} has neither {MANIFEST} nor {METADATA}")
    except CheckpointError as error:
        info.verdict, info.problems = DAMAGED, [str(error)]
    return info


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _mark_latest(path: Path, checkpoints: list[CheckpointInfo]) -> list[str]:
    """Mark the newest checkpoint, and return what is wrong with the file that names it."""
    if not (path / LATEST).is_file():
        # Without `latest` a load takes the newest checkpoint with a manifest, so that one is marked here.
        for info in [info for info in checkpoints if info.manifest is not None][-1:]:
            info.latest = True
        return []
    try:
        tag = CheckpointFolder(path).latest()
    except (OSError, ValueError) as error:
        return [f"{path / LATEST} cannot be read: {error}"]
    for info in checkpoints:
        info.latest = info.tag == tag and info.verdict != UNFINISHED
    # The tag may lie in a `.replaced` directory, which is marked above.
    if not (path / tag).is_dir() and not any(info.latest for info in checkpoints):
        return [f"{path / LATEST} names {tag!r}, which is not there"]
    return []


def _check_files(checkpoints: list[CheckpointInfo], verify: bool) -> None:
    """Look at every file that a manifest lists, and set the verdicts."""
    checked = [(info, info.manifest) for info in checkpoints if info.manifest is not None]
    total = sum(manifest.nbytes for _, manifest in checked)
    # Reading a file releases the interpreter's lock, so a few threads keep a fast disk busy.
    with progress("checking", total, verify) as report, ThreadPoolExecutor(NUM_THREADS) as threads:
        for info, manifest in checked:
            look_at = partial(find_damage, Path(info.path), manifest, verify=verify, report=report)
            info.problems += chain(*threads.map(look_at, ([name] for name in manifest.files)))
            info.verdict = DAMAGED if info.problems else WHOLE if verify else UNCHECKED


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        nbytes: Its size in bytes.
        tied_to: The name that it is stored under, where that is another one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str | None = None


def list_tensors(path: Path) -> list[TensorInfo]:
    """Return the tensors of the checkpoint in the directory `path`, by name.

    Raises:
        CheckpointError: The checkpoint's metadata is missing or damaged.
    """
    tensors = read_metadata(path).tensors
    # Numbers of the optimizer that are equal may be stored once.
    tied = find_tied_names(tensors, [name for name in tensors if not name.startswith(OPTIMIZER)])
    return [
        TensorInfo(name, tensor.shape, tensor.dtype, math.prod(tensor.shape) * _itemsize(tensor.dtype), tied.get(name))
        for name, tensor in sorted(tensors.items())
    ]


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element, from the bits in the dtype's name: `float8_e5m2` has 8, `complex64` has 64."""
    # The size follows from the name, because this module must not import torch to ask for it.
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits is not None else 1
