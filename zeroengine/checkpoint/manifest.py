"""Describe a checkpoint, with the size and checksum of each of its files. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import xxhash
from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import is_file_name
from zeroengine.utils.progress import Report, ignore_progress

MANIFEST = "zeroengine.json"
# The value of this key is the checksum of the rest of the manifest.
CHECKSUM_KEY = "checksum"
# Format 1 had neither `checksum` nor `sequence`.
FORMAT = 2
READ_BYTES = 1 << 22


class FileRecord(BaseModel):
    """The record of one file in a manifest: its bytes, XXH3 checksum, and the digest that `digest_of_items` gives."""

    bytes: Annotated[int, Ge(0)]
    xxh3: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    items: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None = None


class Manifest(BaseModel):
    """Describe one checkpoint.

    Attributes:
        sequence: A number above those of all checkpoints that were in the folder at the save; 0 in format 1.
        left_out: The frozen parameters that are not in it, where it was saved with `frozen=False`.
        digests: The names of the units, and the digests of their parameters and moments, if these were taken.
    """

    # A later version may add fields, and an older reader ignores them. Infinities occur among hyperparameters.
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")

    format: Annotated[int, Ge(1)]
    tag: str
    step: Annotated[int, Ge(0)]
    stage: Annotated[int, Ge(0), Le(3)]
    world_size: Annotated[int, Ge(1)]
    precision: str
    optimizer: str
    saved_at: str
    sequence: Annotated[int, Ge(0)] = 0
    versions: dict[str, str]
    counters: dict[str, Annotated[int, Ge(0)]]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any]
    config: dict[str, Any]
    left_out: list[str] = []
    digests: dict[str, Any] = {}
    files: Annotated[dict[str, FileRecord], MinLen(1)]

    @property
    def num_steps(self) -> int:
        """The number of steps taken, with those that were skipped. ``step`` counts the others alone."""
        return self.step + self.counters.get("skipped_steps", 0)

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> str:
        """Return the text of the file, with a checksum of the rest in it."""
        # The checksum is taken of the values as JSON gives them back, since the reader compares what it has parsed.
        tree = json.loads(self.model_dump_json())
        return json.dumps(tree | {CHECKSUM_KEY: _checksum_of_tree(tree)}, indent=1)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the file `path`.

    Raises:
        CheckpointError: It cannot be read, is damaged, or is of a newer format.
    """
    with as_checkpoint_errors(f"{path} is damaged", prefix=f"{path} "):
        try:
            return _parse(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            # pydantic lists every wrong field. Three are enough to see what happened.
            fields = ", ".join(".".join(str(part) for part in item["loc"]) for item in error.errors()[:3])
            raise CheckpointError(f"is damaged: wrong or missing are {fields}") from error


def _parse(text: str) -> Manifest:
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise CheckpointError("is damaged: it is no JSON object")
    # The format is checked before the checksum and the fields: a newer format may compute or name them differently.
    version = tree.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"has format {version}; this version of zeroengine reads up to {FORMAT}: install a newer one"
        )
    expected = tree.pop(CHECKSUM_KEY, None)
    # Checkpoints of format 1 have no checksum, and remain readable.
    if version != 1 and expected != _checksum_of_tree(tree):
        raise CheckpointError("is damaged: its checksum differs")
    manifest = Manifest.model_validate(tree)
    # A name that leads out of the folder could make a check read any file.
    for name in manifest.files:
        if not is_file_name(name):
            raise CheckpointError(f"is damaged: it lists a file outside of the checkpoint, {name!r}")
    return manifest


def _checksum_of_tree(tree: dict[str, Any]) -> str:
    # Sorted keys make the checksum independent of the order in which fields were written.
    return xxhash.xxh3_64(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def checksum_of_file(path: Path, report: Report = ignore_progress) -> str:
    """Return the XXH3 checksum of a file, in hexadecimal digits.

    Args:
        path: The file.
        report: Takes the number of bytes read since its last call.
    """
    total = xxhash.xxh3_64()
    with open(path, "rb") as file:
        # The file may be larger than memory, so it is read in pieces.
        while chunk := file.read(READ_BYTES):
            total.update(chunk)
            report(len(chunk))
    return total.hexdigest()


def find_damage(
    path: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    verify: bool = True,
    report: Report = ignore_progress,
) -> list[str]:
    """Return one sentence for each file of a checkpoint that is missing or not as the manifest says.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest.
        names: The files to look at; all of them where None.
        verify: Read the files and compare their checksums; otherwise compare sizes only.
        report: Takes the number of bytes read since its last call.
    """
    problems: list[str] = []
    for name in manifest.files if names is None else names:
        file, expected = path / name, manifest.files[name]
        try:
            size = file.stat().st_size
            # The size is compared first, since it costs nothing and finds a truncated file at once.
            if size != expected.bytes:
                problems.append(f"{file} has {size:,} bytes, not {expected.bytes:,}")
            elif verify and checksum_of_file(file, report) != expected.xxh3:
                problems.append(f"{file} has been changed: its checksum differs")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    return problems
