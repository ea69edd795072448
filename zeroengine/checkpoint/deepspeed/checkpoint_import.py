"""Import a DeepSpeed ZeRO checkpoint, with neither DeepSpeed nor a process group nor a GPU.

Tensors stay in DeepSpeed's files, mapped, until a piece of them is written: no more than that is in memory.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroengine.checkpoint.content import CheckpointContent
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.deepspeed.checkpoint_files import check_out, files_of, find_checkpoint
from zeroengine.checkpoint.deepspeed.converted_state import ConvertedState
from zeroengine.checkpoint.deepspeed.merged_slices import NOT_SPLIT, merge_slices
from zeroengine.checkpoint.deepspeed.optimizer_states import NOT_DEEPSPEED
from zeroengine.checkpoint.directory import TAG, CheckpointFolder
from zeroengine.checkpoint.entries import MODEL
from zeroengine.checkpoint.failures import as_checkpoint_errors, failure_reason
from zeroengine.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import progress


@dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        path: The new checkpoint.
        source: DeepSpeed's checkpoint.
        manifest: The manifest of the new one.
        tensors: The number of parameters and buffers, tied ones once.
        tied: The number of further names of tied tensors.
        notes: What was left out, a sentence each.
    """

    path: Path
    source: Path
    manifest: Manifest
    tensors: int
    tied: int
    notes: list[str]


def import_checkpoint(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, *, force: bool = False
) -> ImportResult:
    """Write `out/TAG`, from which an engine resumes at any stage and world size, of a ZeRO checkpoint.

    Args:
        directory: What DeepSpeed's `save_checkpoint` wrote at stage 1, 2 or 3, or one tag's folder in it.
        out: A folder that does not exist; with `force` also a folder of checkpoints, where the same tag is replaced.
        tag: The checkpoint's name; the newest where None.
        force: Add to the checkpoints in `out`.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged or of a kind that is not supported, or `out`
            exists. Nothing is left of what was begun.
    """
    source = find_checkpoint(directory, tag)
    files = files_of(source)
    # The output is checked before the files are read, which may take minutes.
    out = check_out(out, directory, force=force)
    with as_checkpoint_errors(f"{source} {NOT_DEEPSPEED}"):
        states = [ConvertedState(own, len(files)) for own in files]
        tensors, state = states[0].tensors, states[0]
        if len(states) > 1:
            with as_checkpoint_errors(f"{source} {NOT_SPLIT}", prefix=f"{source} "):
                tensors = merge_slices([own.tensors for own in states], state.split_info)
        about = state.about() | {"world_size": len(states) * state.about()["world_size"]}
        content = CheckpointContent(tensors, state.objects(), state.aliases, about)
    # DeepSpeed allows any text as a tag, and zeroengine only names of folders that are safe.
    tag = source.name if TAG.fullmatch(source.name) else f"step-{content.about['step']}"
    manifest = _write(content, out, tag)
    num_tensors = sum(name.startswith(MODEL) for name in tensors)
    return ImportResult(out / tag, source, manifest, num_tensors, len(content.aliases), state.notes)


def _write(content: CheckpointContent, out: Path, tag: str) -> Manifest:
    # `force` may replace a checkpoint of zeroengine, and never anything else of the user's.
    if (out / tag).exists() and not (out / tag / MANIFEST).is_file():
        raise CheckpointError(f"{out / tag} is there already, and no checkpoint of zeroengine: name another folder")
    # Whether the folder is new decides what an error may remove again.
    is_new, directory = not out.exists(), CheckpointFolder(out)
    writing: Path | None = None
    try:
        directory.open()
        writing = directory.begin(tag, content.nbytes)
        with progress(f"importing {tag}", content.nbytes) as report:
            files = save_files(writing, content.entries, content.objects, content.aliases, None, report)
        manifest = Manifest(format=FORMAT, tag=tag, files=files, **content.about)
        directory.commit(writing, manifest, None)
        return manifest
    except BaseException as error:
        # Nothing is left of an import that failed or was interrupted, but a folder that existed before stays.
        if is_new:
            shutil.rmtree(out, ignore_errors=True)
        elif writing is not None:
            directory.abandon(writing)
        # These errors have a message of their own, and an interrupt must stay one.
        if isinstance(error, (CheckpointError, KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(f"{out} was not written: {failure_reason(error)}") from error
    finally:
        directory.close()
