"""What is in a folder of checkpoints. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zeroengine.checkpoint.dcp_metadata import EXTRA, METADATA, names_in, read_metadata, tied
from zeroengine.checkpoint.directory import LATEST, MANIFEST, CheckpointDirectory, Manifest, check_tag, tag_of
from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import checked_path
from zeroengine.utils.progress import progress

WHOLE, DAMAGED, UNFINISHED, UNCHECKED, PLAIN = "whole", "damaged", "unfinished", "not checked", "no checksums"
THREADS = 4  # files hashed at a time


def find_checkpoint(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Manifest | None]:
    """The directory of a checkpoint, and what it says of itself; None where plain PyTorch wrote it.

    Args:
        folder: of checkpoints, or one checkpoint.
        tag: the checkpoint's name; the newest where None.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(os.path.abspath(checked_path(folder, "the folder of checkpoints", CheckpointError)))
    plain = path if tag is None else path / check_tag(tag)
    if is_plain(plain):
        return plain, None
    directory = CheckpointDirectory(path)
    if tag is None and (path / MANIFEST).is_file():
        directory, tag = CheckpointDirectory(path.parent), path.name
    tag = directory.latest() if tag is None else tag
    return directory.checkpoint(tag), directory.manifest(tag)


def is_plain(path: Path) -> bool:
    """Whether plain PyTorch wrote the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: zeroengine did, and the manifest is missing.
    """
    if not (path / METADATA).is_file() or (path / MANIFEST).is_file():
        return False
    if any(name.startswith(EXTRA) for name in names_in(path)):
        raise CheckpointError(
            f"{path} is not whole: zeroengine wrote it, and {MANIFEST} is missing. Copy that file, too; or load "
            "another checkpoint, with tag= or fallback=True."
        )
    return True


@dataclass
class CheckpointInfo:
    """One checkpoint, or what is left of one."""

    tag: str
    path: str
    verdict: str
    nbytes: int
    latest: bool = False
    problems: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    seen: float = 0.0  # when it was last written to, in seconds of the epoch

    @property
    def saved_at(self) -> str:
        if self.manifest is not None:
            return self.manifest.saved_at
        return datetime.fromtimestamp(self.seen, timezone.utc).isoformat(timespec="seconds")

    def to_dict(self) -> dict[str, Any]:
        tree = {key: value for key, value in asdict(self).items() if key not in ("manifest", "seen")}
        tree["saved_at"] = self.saved_at
        if self.manifest is not None:
            own = self.manifest.model_dump(exclude={"config", "param_groups", "loss_scaler", "tag", "saved_at"})
            tree |= own | {"files": len(own["files"])}
        return tree


@dataclass
class FolderInfo:
    """What was found, oldest first, and what is wrong with the folder itself."""

    path: Path
    checkpoints: list[CheckpointInfo]
    problems: list[str]

    @property
    def damaged(self) -> bool:
        return bool(self.problems) or any(found.verdict == DAMAGED for found in self.checkpoints)


def inspect_folder(folder: str | os.PathLike[str], tag: str | None = None, *, verify: bool = True) -> FolderInfo:
    """What is in ``folder``: a folder of checkpoints, or one checkpoint.

    Args:
        tag: of this checkpoint alone.
        verify: read every file and compare checksums; otherwise sizes only.

    Raises:
        CheckpointError: there is nothing.
    """
    path = Path(os.path.abspath(checked_path(folder, "the folder of checkpoints", CheckpointError)))
    if tag is None and ((path / MANIFEST).is_file() or (path / METADATA).is_file()):
        found, problems = [_inspect_checkpoint(path, path.name)], []
    else:
        found = [one for one in _scan(path) if tag is None or one.tag == check_tag(tag)]
        problems = _mark_latest(path, found) if tag is None or found else []
        if not found and not problems:
            find_checkpoint(path, tag)  # says what is wrong
            raise CheckpointError(f"{path} holds no checkpoint")
    _check(found, verify)
    return FolderInfo(path, found, problems)


def _scan(path: Path) -> list[CheckpointInfo]:
    if not path.is_dir():
        return []
    found = [one for entry in path.iterdir() if entry.is_dir() for one in _entry(path, entry)]
    return sorted(found, key=_age)


def _age(found: CheckpointInfo) -> tuple[int, str, float, str]:
    """As ``CheckpointDirectory.tags``; first come those that do not say when they were saved."""
    if found.manifest is None:
        return -1, "", found.seen, found.tag
    return *found.manifest.order, found.seen, found.tag


def _entry(path: Path, entry: Path) -> Iterator[CheckpointInfo]:
    name = entry.name
    if name.startswith(".") and name.endswith(".writing"):
        yield CheckpointInfo(tag_of(name), str(entry), UNFINISHED, _size(entry), seen=entry.stat().st_mtime)
    elif name.startswith(".") and name.endswith(".replaced"):
        tag = tag_of(name)
        if not (path / tag).exists():  # its writer died between two renames: it counts
            yield _inspect_checkpoint(entry, tag)
    elif not name.startswith(".") and any(
        (entry / MANIFEST).is_file() or file.name == METADATA or file.suffix == ".distcp" for file in entry.iterdir()
    ):
        yield _inspect_checkpoint(entry, name)


def _inspect_checkpoint(path: Path, tag: str) -> CheckpointInfo:
    found = CheckpointInfo(tag, str(path), UNCHECKED, _size(path), seen=path.stat().st_mtime)
    if (path / MANIFEST).is_file():
        try:
            found.manifest = CheckpointDirectory(path.parent).manifest(tag)
        except CheckpointError as error:
            found.verdict, found.problems = DAMAGED, [str(error)]
    elif (path / METADATA).is_file():
        found.verdict = PLAIN
        try:
            is_plain(path)
        except CheckpointError as error:
            found.verdict, found.problems = DAMAGED, [str(error)]
    else:
        found.verdict, found.problems = DAMAGED, [f"{path} has neither {MANIFEST} nor {METADATA}"]
    return found


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _mark_latest(path: Path, found: list[CheckpointInfo]) -> list[str]:
    whole = [one for one in found if one.manifest is not None]
    if not (path / LATEST).is_file():
        if whole:
            whole[-1].latest = True
        return []
    try:
        tag = CheckpointDirectory(path).latest()
    except (OSError, ValueError) as error:
        return [f"{path / LATEST} cannot be read: {error}"]
    for one in found:
        one.latest = one.tag == tag and one.verdict != UNFINISHED
    if not (path / tag).is_dir() and not any(one.latest for one in found):
        return [f"{path / LATEST} names {tag!r}, which is not there"]
    return []


def _check(found: list[CheckpointInfo], verify: bool) -> None:
    """Looks at every file that a manifest lists."""
    checked = [one for one in found if one.manifest is not None]
    files = [(one, name) for one in checked for name in (one.manifest.files if one.manifest else ())]
    total = sum(one.manifest.nbytes for one in checked if one.manifest is not None)

    with progress("checking", total, verify) as report, ThreadPoolExecutor(THREADS) as threads:

        def problems_of(file: tuple[CheckpointInfo, str]) -> list[str]:
            one, name = file
            assert one.manifest is not None
            if verify:
                return CheckpointDirectory(Path(one.path).parent).damage(one.tag, [name], report)
            return _size_damage(Path(one.path) / name, one.manifest.files[name].bytes)

        for (one, _), problems in zip(files, threads.map(problems_of, files), strict=True):
            one.problems += problems
    for one in checked:
        one.verdict = DAMAGED if one.problems else WHOLE if verify else UNCHECKED


def _size_damage(path: Path, expected: int) -> list[str]:
    try:
        size = path.stat().st_size
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    return [] if size == expected else [f"{path} has {size:,} bytes, not {expected:,}"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str | None = None  # stored once, under that name


def list_tensors(path: Path) -> list[TensorInfo]:
    """The tensors of the checkpoint in ``path``, by name.

    Raises:
        CheckpointError: its metadata is missing or damaged.
    """
    stored = read_metadata(path)
    aliases = tied(stored, stored)
    return [
        TensorInfo(
            name, tensor.shape, tensor.dtype, math.prod(tensor.shape) * _itemsize(tensor.dtype), aliases.get(name)
        )
        for name, tensor in sorted(stored.items())
    ]


def _itemsize(dtype: str) -> int:
    """Bytes of an element: ``float8_e5m2`` has 8 bits, ``complex64`` 64."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) // 8 if found is not None else 1
