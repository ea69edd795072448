"""Write checkpoints, all ranks together, beside training where their states can be copied."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zeroengine.checkpoint.content import CheckpointContent
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.checkpoint.manifest import FORMAT, Manifest
from zeroengine.comm.group import Group
from zeroengine.config.model import Checkpoint
from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.errors import CheckpointError, OffloadError
from zeroengine.offload.placement import Placement
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.process_groups import destroy_group
from zeroengine.utils.progress import Report, evicting, ignore_progress, progress

log = logging.getLogger("zeroengine")
CPU = torch.device("cpu")


@dataclass
class _Resources:
    """What must end before the interpreter does.

    Attributes:
        rank: This rank.
        gloo_group: All ranks. torch's checkpoints exchange what they need over it.
        future: Of the save beside training, until its outcome was raised: why it failed, or None.
    """

    rank: int
    gloo_group: dist.ProcessGroup | None = None
    future: Future[str | None] | None = None

    def end(self) -> None:
        """End the group, after the save that uses it, and report an error of that save, which no call can raise."""
        if self.future is None:
            self._end_group()
        else:
            # The interpreter waits for the save before it exits. The garbage collector does not.
            self.future.add_done_callback(self._report_and_end)

    def _report_and_end(self, future: Future[str | None]) -> None:
        error = future.result()
        if error is not None and self.rank == 0:
            log.error("%s", error)
        self._end_group()

    def _end_group(self) -> None:
        group, self.gloo_group = self.gloo_group, None
        if group is not None:
            destroy_group(group)


class BackgroundWriter:
    """Writes copies of states in a thread, one after the other, while training changes the states.

    Args:
        group: All ranks.
        name: The name of the thread.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self._resources = resources = _Resources(group.rank)
        # An engine that is not closed ends these when it is deleted, or when the process exits.
        self.close = finalize(self, resources.end)
        # Holds a copy of the states while they are written. It is kept for the next copy: fresh pages would take
        # longer than the copy.
        self._copy_memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def copy_bytes(self) -> int:
        """The CPU memory that the copy of the states takes, in bytes."""
        return self._copy_memory.nbytes

    @property
    def future(self) -> Future[str | None] | None:
        """The write under way, or whose outcome nobody has asked for yet: why it failed, or None."""
        return self._resources.future

    def gloo_group(self) -> dist.ProcessGroup:
        """Return the group over which the thread exchanges what it needs. The first call is a collective."""
        # Creating a group is a collective and takes a while, so it is made at the first save and kept.
        if self._resources.gloo_group is None:
            self._resources.gloo_group = self._group.new_group("gloo")
        return self._resources.gloo_group

    def start(self, write: Callable[[CheckpointContent], str | None], content: CheckpointContent) -> Future[str | None]:
        """Copy `content` and let the thread call `write` with the copy. Nothing may be under way.

        Args:
            write: Returns why it failed, or None.
            content: Views of states, which may change once this returns: the model's at once, the optimizer's after
                `CheckpointContent.note_read`.
        """
        # Growing replaces the memory, since the earlier save has ended and nothing refers to the old one.
        if self._copy_memory.nbytes < content.copy_bytes:
            self._copy_memory = _copy_memory(content)
        copied, works = content.copied(self._copy_memory)

        def write_copied() -> str | None:
            for work in works:
                work.wait_host()
            return write(copied)

        # From here on training may change the states: the thread reads only the copy. The interpreter does not exit in
        # the middle of a save, since it waits for the threads of an executor.
        executor = ThreadPoolExecutor(1, self._name)
        self._resources.future = future = executor.submit(write_copied)
        executor.shutdown(wait=False)
        return future

    def wait(self) -> str | None:
        """Return when nothing is under way any more, and why the last write failed, once."""
        if self._resources.future is None:
            return None
        with self._group.long_wait("save a checkpoint"):
            error = self._resources.future.result()
        self._resources.future = None
        return error


def _copy_memory(content: CheckpointContent) -> torch.Tensor:
    """Return memory for a copy, page-locked for a GPU where the system allows it: else the host waits for the copy."""
    if content.copies is not None:
        with contextlib.suppress(OffloadError):
            return content.copies.host_memory(content.copy_bytes, torch.uint8)
    return aligned_zeros(content.copy_bytes, torch.uint8)


class CheckpointWriter:
    """Writes the checkpoints of one engine, beside training where it can. Every method is a collective.

    Args:
        group: All ranks.
        settings: How to save, and how many checkpoints stay in a folder.
        placement: The states that live in CPU memory or on a disk.
        on_saved: Called with the path, the bytes of all ranks and the seconds of each save that succeeded, by the
            thread that wrote.
    """

    def __init__(
        self, group: Group, settings: Checkpoint, placement: Placement, on_saved: Callable[[str, int, float], None]
    ) -> None:
        self._group, self._settings, self._placement, self._on_saved = group, settings, placement, on_saved
        self._background = BackgroundWriter(group, "zeroengine-save")
        self._directories: dict[Path, CheckpointFolder] = {}

    @property
    def copy_bytes(self) -> int:
        """The CPU memory that the copy of the states takes, in bytes."""
        return self._background.copy_bytes

    def write(self, content: CheckpointContent, folder: str, tag: str) -> None:
        """Write checkpoint `tag` of `folder`, beside training once it is copied. No save may be under way.

        States on disk are never copied: they may be larger than memory.

        Raises:
            CheckpointError: On every rank; there is no such checkpoint then, and the ones before are as they were.
        """
        gloo_group = self._background.gloo_group()
        directory = self._directories.setdefault(Path(folder).absolute(), CheckpointFolder(folder))
        nbytes = sum(self._group.all_gather_object(content.nbytes, "of the bytes of a checkpoint"))
        # One rank makes the directory, or the ranks would race for it. Its name has a random part, so the other ranks
        # learn it from rank 0.
        new_directories: list[Path] = []
        with self._group.collective_errors("to save a checkpoint", new_directories) as all_new_directories:
            if self._group.rank == 0:
                directory.open()
                new_directories.append(directory.begin(tag, nbytes))
        writing = all_new_directories[0][0]
        write = partial(_write, gloo_group, directory, tag, writing, self._settings.keep)
        began = time.monotonic()

        def report_saved(saving: Future[str | None] | None = None) -> None:
            # A save beside training may have failed, which the next call of this object raises.
            if saving is None or (saving.exception() is None and saving.result() is None):
                self._on_saved(f"{directory.path}/{tag}", nbytes, time.monotonic() - began)

        # States on disk may be larger than memory and cannot be copied, so training waits for their save.
        if self._settings.async_save and not self._placement.disks:
            future = self._background.start(partial(write, report=ignore_progress), content)
            future.add_done_callback(report_saved)
        else:
            # Other ranks may write for long, and the usual timeout of a collective must not end the run meanwhile.
            with progress(f"saving {tag}", content.nbytes, self._group.rank == 0) as report:
                with self._group.long_wait(f"save {tag}"):
                    error = write(content, report=evicting(report, self._placement.evict))
            self._placement.evict()
            # Every rank asks, because a rank that wrote without error still has no checkpoint if another one failed.
            self._raise_if_failed(error)
            report_saved()

    def wait(self) -> None:
        """Return when no save is under way any more.

        Raises:
            CheckpointError: On every rank; the save beside training failed.
        """
        if self._background.future is not None:
            # An error must be raised once, and the next save may go on.
            self._raise_if_failed(self._background.wait())

    def _raise_if_failed(self, error: str | None) -> None:
        # The save's error lies on the rank where it happened. Every rank has to raise, or they would go separate ways.
        # After a divergence they have gone separate ways already.
        diverged = bool(self._group.divergence.message)
        all_errors = [error] if diverged else self._group.all_gather_object(error, "to save a checkpoint")
        errors = list(filter(None, all_errors))
        if errors:
            raise CheckpointError(errors[0])

    def close(self) -> None:
        """Finish, and end what only saves need."""
        try:
            self.finish()
        finally:
            self._background.close()

    def finish(self) -> None:
        """Wait for the save that is under way, and unlock the folders. The next save locks its folder again."""
        # The folders are unlocked even if the last save failed, so that the next job may use them.
        try:
            self.wait()
        finally:
            for directory in self._directories.values():
                directory.close()
            self._directories.clear()


def _write(
    group: dist.ProcessGroup,
    directory: CheckpointFolder,
    tag: str,
    writing: Path,
    keep: int | None,
    content: CheckpointContent,
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
        content: What to write.
        report: Takes the number of bytes written since its last call.

    Returns:
        The message of the error on any rank; None where the save succeeded.
    """
    reason: str | None = None
    # No other thread uses this group, so its exchanges are apart from those of training.
    exchanges = Group(group, CPU, range(group.size()))
    try:
        # A file that any rank failed to write is an error of all ranks.
        own_files = save_files(writing, content.entries, content.objects, content.aliases, group, report)
        # This also ensures that every rank has closed and synced its files before rank 0 commits.
        all_files = exchanges.all_gather_object(own_files, "of files")
        if group.rank() == 0:
            try:
                manifest = Manifest(format=FORMAT, tag=tag, files=dict(ChainMap(*all_files)), **content.about)
                directory.commit(writing, manifest, keep)
            # The other ranks wait in the exchange below, so no error may leave this block.
            except Exception as error:
                reason = failure_reason(error)
        # Only rank 0 knows the result of the commit. Every rank needs it to raise the same error.
        reason = exchanges.all_gather_object(reason, "to commit a checkpoint")[0]
    # An error that escaped the thread would be lost.
    except BaseException as error:
        # An interrupt of a save within `save_checkpoint` ends the program, as an interrupt anywhere does.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            if group.rank() == 0:
                directory.abandon(writing)
            raise
        reason = failure_reason(error)
    if reason is None:
        return None
    # Only rank 0 removes the directory, which all ranks share.
    if group.rank() == 0:
        directory.abandon(writing)
    return f"checkpoint {tag} in {directory.path} was not saved: {reason}. The checkpoints before it are as they were."
