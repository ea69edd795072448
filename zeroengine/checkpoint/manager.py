"""Save and load an engine's state, all ranks together."""

from __future__ import annotations

import logging
import os
import time
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.directory import CheckpointFolder, check_tag
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.checkpoint.load_plan import LoadOptions
from zeroengine.checkpoint.manifest import FORMAT, Manifest
from zeroengine.checkpoint.restore import HalfLoadedError, RestoreResult, loading_errors, restore
from zeroengine.checkpoint.search import CheckpointSearch
from zeroengine.checkpoint.snapshot import Snapshot, take_snapshot
from zeroengine.comm.group import check_same
from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import checked_path
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.process_groups import all_gather_objects, destroy_group
from zeroengine.utils.progress import Report, evicting, ignore_progress, progress

log = logging.getLogger("zeroengine")
CPU = torch.device("cpu")


@dataclass
class _Resources:
    """What must end before the interpreter does.

    Attributes:
        rank: This rank.
        gloo_group: All ranks. torch's checkpoints exchange what they need over it.
        future: Of the last save beside training: why it failed, or None.
        save: The tag and the folder of that save, until its outcome was raised.
    """

    rank: int
    gloo_group: dist.ProcessGroup | None = None
    future: Future[str | None] | None = None
    save: tuple[str, CheckpointFolder] | None = None

    def end(self) -> None:
        """End the group, after the save that uses it, and report an error of that save, which no call can raise."""
        if self.future is None:
            self._end_group()
        else:
            # The interpreter waits for the save before it exits. The garbage collector does not.
            self.future.add_done_callback(self._report_and_end)

    def _report_and_end(self, future: Future[str | None]) -> None:
        error = future.result()
        if error is not None and self.save is not None and self.rank == 0:
            log.error("%s", _failure(error, *self.save))
        self._end_group()

    def _end_group(self) -> None:
        group, self.gloo_group = self.gloo_group, None
        if group is not None:
            destroy_group(group)


class CheckpointManager:
    """The checkpoints of one engine. Every method is a collective.

    Args:
        parts: The states of the engine.
        on_saved: Called with the path, the bytes of all ranks and the seconds of each save that succeeded, by the
            thread that wrote.
    """

    def __init__(self, parts: CheckpointedParts, on_saved: Callable[[str, int, float], None]) -> None:
        self._parts, self._group, self._on_saved = parts, parts.group, on_saved
        self._resources = resources = _Resources(parts.group.rank)
        # An engine that is not closed ends these when it is deleted, or when the process exits.
        self._end = finalize(self, resources.end)
        self._directories: dict[Path, CheckpointFolder] = {}
        # Holds a copy of the states while they are written beside training. It is kept for the next save: fresh pages
        # would take longer than the copy.
        self._copy_memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._is_half_loaded = False
        # The states that were loaded for objects that are not registered yet, and whether the number of ranks is the
        # same as at the save.
        self._unclaimed_states: dict[str, tuple[Any, bool]] = {}

    def save(self, folder: str | os.PathLike[str], tag: str, client_state: Any, *, frozen: bool) -> None:
        """Write the engine's state as checkpoint `tag` of `folder`, beside training once it is copied.

        States on disk are never copied: they may be larger than memory.

        Raises:
            CheckpointError: On every rank; there is no such checkpoint then, and the ones before are as they were.
            DivergenceError: On every rank; they name different folders or tags.
        """
        # Only one save is under way at a time: both would use the same copy and the same process group.
        self.wait()
        # The dict is filled inside, because the checks may raise, and the exchange happens at the end of the block.
        arguments: dict[str, object] = {"frozen": frozen}
        with self._group.collective_errors("to save a checkpoint", arguments) as all_arguments:
            path = checked_path(folder, "save_checkpoint(directory)", CheckpointError)
            folder = path
            arguments |= {"directory": os.path.abspath(path), "tag": check_tag(tag)}
            self.check_not_half_loaded("save_checkpoint()")
            snapshot = take_snapshot(self._parts, client_state, frozen=frozen)
        # Ranks that name different folders would write parts of two checkpoints, and neither would be whole.
        check_same("save_checkpoint()", all_arguments)
        # Creating a group is a collective and takes a while, so it is made at the first save and kept.
        if self._resources.gloo_group is None:
            self._resources.gloo_group = self._group.new_group("gloo")
        directory = self._directories.setdefault(Path(folder).absolute(), CheckpointFolder(folder))
        nbytes = sum(self._group.all_gather_object(snapshot.nbytes))
        # One rank makes the directory, or the ranks would race for it. Its name has a random part, so the other ranks
        # learn it from rank 0.
        new_directories: list[Path] = []
        with self._group.collective_errors("to save a checkpoint", new_directories) as all_new_directories:
            if self._group.rank == 0:
                directory.open()
                new_directories.append(directory.begin(tag, nbytes))
        writing, settings = all_new_directories[0][0], self._parts.config.checkpoint
        write = partial(_write, self._resources.gloo_group, directory, tag, writing, settings.keep)
        began = time.monotonic()

        def report_saved(saving: Future[str | None] | None = None) -> None:
            # A save beside training may have failed, which the next call of this object raises.
            if saving is None or (saving.exception() is None and saving.result() is None):
                self._on_saved(f"{directory.path}/{tag}", nbytes, time.monotonic() - began)

        # States on disk may be larger than memory and cannot be copied, so training waits for their save.
        if settings.async_save and not self._parts.on_disk:
            # Growing replaces the memory, since the earlier save has ended above and nothing refers to the old one.
            if self._copy_memory.nbytes < snapshot.copy_bytes:
                self._copy_memory = aligned_zeros(snapshot.copy_bytes, torch.uint8)
            # From here on training may change the states: the thread reads only the copy. The interpreter does not exit
            # in the middle of a save, since it waits for the threads of an executor.
            executor = ThreadPoolExecutor(1, "zeroengine-save")
            future = executor.submit(write, snapshot.copied(self._copy_memory), ignore_progress)
            future.add_done_callback(report_saved)
            executor.shutdown(wait=False)
            self._resources.future, self._resources.save = future, (tag, directory)
        else:
            # Other ranks may write for long, and the usual timeout of a collective must not end the run meanwhile.
            with progress(f"saving {tag}", snapshot.nbytes, self._group.rank == 0) as report:
                with self._group.long_wait(f"save {tag}"):
                    error = write(snapshot, evicting(report, self._parts.evict))
            self._parts.evict()
            # Every rank asks, because a rank that wrote without error still has no checkpoint if another one failed.
            self._raise_if_failed(error, tag, directory)
            report_saved()

    @property
    def copy_bytes(self) -> int:
        """The CPU memory that the copy of the states takes, in bytes."""
        return self._copy_memory.nbytes

    def load(self, folder: str | os.PathLike[str], tag: str | None, options: LoadOptions) -> RestoreResult:
        """Put a checkpoint into the engine, and return the rest of it.

        Raises:
            CheckpointError: On every rank; nothing is changed.
            HalfLoadedError: On every rank; some states are the checkpoint's.
            DivergenceError: On every rank; they name different checkpoints, or ask for different parts of one.
        """
        arguments = {"tag": tag, **vars(options)}
        with self._group.collective_errors("to load a checkpoint", arguments) as all_arguments:
            folder = checked_path(folder, "load_checkpoint(directory)", CheckpointError)
            arguments["directory"] = os.path.abspath(folder)
            if tag is not None and not (isinstance(tag, str) and tag and "\0" not in tag):
                raise CheckpointError(f"load_checkpoint(tag): a tag is a folder's name; found {tag!r}")
        check_same("load_checkpoint()", all_arguments)
        # A save beside training may be replacing the very checkpoint that is asked for.
        self.wait()
        search = CheckpointSearch(self._group, Path(folder), tag, fallback=options.fallback)
        try:
            with search.open() as (checkpoint, manifest):
                if manifest is not None and manifest.tag != checkpoint.name and self._group.rank == 0:
                    log.warning(
                        "%s holds the checkpoint that was saved as %s, of step %d: its folder was renamed or copied",
                        checkpoint,
                        manifest.tag,
                        manifest.step,
                    )
                restored = restore(self._parts, checkpoint, manifest, options)
        except HalfLoadedError:
            # From here on the engine's states belong to no checkpoint, and saving them or training on is refused.
            self._is_half_loaded = True
            raise
        # The optimizer's states of a half loaded checkpoint are not replaced by weights alone.
        self._is_half_loaded = self._is_half_loaded and options.weights_only
        self._unclaimed_states = {name: (state, restored.same_world) for name, state in restored.stateful.items()}
        try:
            with loading_errors(self._group):
                for name in self._parts.stateful:
                    self.hand_over(name)
        # Objects of the user raise here, after the tensors were replaced. The engine is half loaded then.
        except CheckpointError as error:
            self._is_half_loaded = True
            raise HalfLoadedError(
                f"{error}. A registered object did not take its state, and the engine's has been loaded: load again, "
                "or another checkpoint, before training goes on."
            ) from error
        return restored

    def hand_over(self, name: str) -> None:
        """Give a registered object the state that was loaded for it, if there is one."""
        if name not in self._unclaimed_states:
            return
        # The state is given once. A second registration of the name is refused elsewhere.
        state, same_world = self._unclaimed_states.pop(name)
        stateful = self._parts.stateful[name]
        # A loader's position on one rank means nothing on another number of ranks, unless the object says otherwise.
        if same_world or getattr(stateful, "world_independent", False):
            stateful.load_state_dict(state)
        elif self._group.rank == 0:
            log.warning(
                "the state of %r was saved on another number of ranks, and each has its own: it is left as it is", name
            )

    def wait(self) -> None:
        """Return when no save is under way any more.

        Raises:
            CheckpointError: On every rank; the save beside training failed.
        """
        resources = self._resources
        if resources.save is not None and resources.future is not None:
            # The field is cleared first: an error must be raised once, and the next save may go on.
            (tag, directory), resources.save = resources.save, None
            with self._group.long_wait(f"save {tag}"):
                error = resources.future.result()
            self._raise_if_failed(error, tag, directory)

    def _raise_if_failed(self, error: str | None, tag: str, directory: CheckpointFolder) -> None:
        # The save's error lies on the rank where it happened. Every rank has to raise, or they would go separate ways.
        errors = list(filter(None, self._group.all_gather_object(error, "to save a checkpoint")))
        if errors:
            raise CheckpointError(_failure(errors[0], tag, directory))

    def check_not_half_loaded(self, call: str) -> None:
        """Check that the engine's states are of one checkpoint, or of none.

        Args:
            call: What the user called, for the message.

        Raises:
            CheckpointError: A load failed while the states were written, and none has succeeded since.
        """
        if self._is_half_loaded:
            raise CheckpointError(
                f"{call} after a load that failed half way: some states are the checkpoint's. Load a checkpoint that "
                "is whole first."
            )

    def close(self) -> None:
        """Finish, and end what only saves need."""
        try:
            self.finish()
        finally:
            self._end()

    def finish(self) -> None:
        """Wait for the save that is under way, and unlock the folders. The next save locks its folder again."""
        # The folders are unlocked even if the last save failed, so that the next job may use them.
        try:
            self.wait()
        finally:
            for directory in self._directories.values():
                directory.close()
            self._directories.clear()


def _failure(error: str, tag: str, directory: CheckpointFolder) -> str:
    return f"checkpoint {tag} in {directory.path} was not saved: {error}. The checkpoints before it are as they were."


def _write(
    group: dist.ProcessGroup,
    directory: CheckpointFolder,
    tag: str,
    writing: Path,
    keep: int | None,
    snapshot: Snapshot,
    report: Report,
) -> str | None:
    """Write this rank's files and, on rank 0, commit the checkpoint. A collective, beside training or within the save.

    Args:
        group: All ranks. No other thread uses it: collectives of training go on meanwhile, and the ranks would
            otherwise mix the two up.
        directory: The folder of checkpoints.
        tag: The checkpoint's name.
        writing: The directory to write into.
        keep: The number of checkpoints to keep; None keeps all.
        snapshot: What to write.
        report: Takes the number of bytes written since its last call.

    Returns:
        Why the save failed on any rank; None where it succeeded.
    """
    reason: str | None = None
    try:
        # A file that any rank failed to write is an error of all ranks.
        own_files = save_files(writing, snapshot.entries, snapshot.objects, snapshot.aliases, group, report)
        # This also ensures that every rank has closed and synced its files before rank 0 commits.
        all_files = all_gather_objects(group, own_files, CPU)
        if group.rank() == 0:
            try:
                manifest = Manifest(format=FORMAT, tag=tag, files=dict(ChainMap(*all_files)), **snapshot.about)
                directory.commit(writing, manifest, keep)
            # The other ranks wait in the exchange below, so no error may leave this block.
            except Exception as error:
                reason = failure_reason(error)
        # Only rank 0 knows the result of the commit. Every rank needs it to raise the same error.
        reason = all_gather_objects(group, reason, CPU)[0]
    # A CheckpointException of DCP derives from BaseException. An error that escaped the thread would be lost.
    except BaseException as error:
        # An interrupt of a save within `save_checkpoint` ends the program, as an interrupt anywhere does.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            if group.rank() == 0:
                directory.abandon(writing)
            raise
        reason = failure_reason(error)
    # Only rank 0 removes the directory, which all ranks share.
    if reason is not None and group.rank() == 0:
        directory.abandon(writing)
    return reason
