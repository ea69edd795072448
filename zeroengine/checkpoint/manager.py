"""Saves and loads an engine's state, all ranks together."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.checkpoint import dcp_io
from zeroengine.checkpoint.directory import FORMAT, CheckpointDirectory, FileRecord, Manifest, check_tag
from zeroengine.checkpoint.inspect import is_plain
from zeroengine.checkpoint.restore import HalfLoadedError, Restored, as_checkpoint_errors, restore
from zeroengine.checkpoint.snapshot import SHOWN, EngineParts, Snapshot, snapshot
from zeroengine.comm.group import check_same
from zeroengine.disk.aligned_memory import aligned_empty
from zeroengine.errors import CheckpointError
from zeroengine.utils.paths import checked_path
from zeroengine.utils.progress import progress, releasing

log = logging.getLogger("zeroengine")

MAX_SEARCHES = 10  # for a checkpoint while another process removes those that are found


class CheckpointManager:
    """The checkpoints of one engine. Every method is a collective."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._group = parts, parts.group
        self._gloo: dist.ProcessGroup | None = None
        self._directories: dict[Path, CheckpointDirectory] = {}
        self._saving: _Saving | None = None
        self._copy = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the states, while the background writes them
        self._half_loaded = False
        self._waiting: dict[str, tuple[Any, bool]] = {}  # loaded for objects that are not registered yet

    def save(self, folder: str | os.PathLike[str], tag: str, client_state: Any) -> None:
        """Writes the engine's state as checkpoint ``tag`` of ``folder``; in the background once it is copied.

        States on disk are never copied: they may be larger than memory.

        Raises:
            CheckpointError: on every rank; there is no such checkpoint then, and the ones before are as they were.
            DivergenceError: on every rank; they name different folders or tags.
        """
        self.wait()
        arguments: dict[str, object] = {}
        with self._group.collective_errors("to save a checkpoint", arguments) as every:
            named = checked_path(folder, "save_checkpoint(directory)", CheckpointError)
            arguments |= {"directory": os.path.abspath(named), "tag": check_tag(tag)}
            self.check_not_half_loaded("save_checkpoint()")
            found = snapshot(self._parts, client_state)
        check_same("save_checkpoint()", every)
        if self._gloo is None:
            self._gloo = self._group.new_group("gloo")
        directory = self._directories.setdefault(Path(folder).absolute(), CheckpointDirectory(folder))
        total = sum(self._group.all_gather_object(found.nbytes))
        paths: list[Path] = []
        with self._group.collective_errors("to save a checkpoint"):
            if self._group.rank == 0:
                directory.open()
                paths.append(directory.begin(tag, total))
        writing = self._group.all_gather_object(paths[0] if paths else None)[0]
        assert writing is not None
        settings = self._parts.config.checkpoint
        saving = _Saving(self._group.rank, self._gloo, directory, tag, writing, found, settings.keep)
        if settings.async_save and not self._parts.on_disk:
            if self._copy.nbytes < found.copy_bytes:  # fresh pages would cost more than the copy, so it is kept
                self._copy = aligned_empty(found.copy_bytes, torch.uint8)
            saving.snapshot = found.copied(self._copy)
            saving.start()
            self._saving = saving
        else:
            with progress(f"saving {tag}", found.nbytes, self._group.rank == 0) as report:
                with self._group.long_wait(f"save {tag}"):
                    saving.run(releasing(report, self._parts.evict))
            self._parts.evict()
            self._conclude(saving)

    @property
    def copy_bytes(self) -> int:
        """Of CPU memory that a copy of the states takes."""
        return self._copy.nbytes

    def load(
        self, folder: str | os.PathLike[str], tag: str | None, *, weights_only: bool, strict: bool, fallback: bool
    ) -> Restored:
        """Puts a checkpoint into the engine, and gives the rest of it.

        Raises:
            CheckpointError: on every rank; nothing is changed.
            DivergenceError: on every rank; they name different checkpoints, or ask for different parts of one.
        """
        arguments: dict[str, object] = {"tag": tag}
        arguments |= {"weights_only": weights_only, "strict": strict, "fallback": fallback}
        with self._group.collective_errors("to load a checkpoint", arguments) as every:
            named = checked_path(folder, "load_checkpoint(directory)", CheckpointError)
            arguments["directory"] = os.path.abspath(named)
            if tag is not None and not (isinstance(tag, str) and tag):
                raise CheckpointError(f"load_checkpoint(tag): a tag is a folder's name; found {tag!r}")
        check_same("load_checkpoint()", every)
        try:
            with self._found(folder, tag, fallback=fallback) as (path, manifest):
                restored = restore(self._parts, path, manifest, weights_only=weights_only, strict=strict)
        except HalfLoadedError:
            self._half_loaded = True
            raise
        self._half_loaded = self._half_loaded and weights_only
        self._waiting = {name: (state, restored.same_world) for name, state in restored.stateful.items()}
        try:
            with self._group.collective_errors("to load a checkpoint"), as_checkpoint_errors():
                for name in self._parts.stateful:
                    self.hand_over(name)
        except CheckpointError as error:
            self._half_loaded = True
            raise HalfLoadedError(
                f"{error}. A registered object did not take its state, and the engine's has been loaded: load again, "
                "or another checkpoint, before training goes on."
            ) from error
        return restored

    def hand_over(self, name: str) -> None:
        """Gives a registered object the state that was loaded for it, if any."""
        if name not in self._waiting:
            return
        state, same_world = self._waiting.pop(name)
        stateful = self._parts.stateful[name]
        if same_world or getattr(stateful, "world_independent", False):
            stateful.load_state_dict(state)
        elif self._group.rank == 0:
            log.warning(
                "the state of %r was saved on another number of ranks, and each has its own: it is left as it is", name
            )

    def wait(self) -> None:
        """Returns when no save is under way any more.

        Raises:
            CheckpointError: on every rank, where the background save failed.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with self._group.long_wait(f"save {saving.tag}"):
                saving.join()
            self._conclude(saving)

    def _conclude(self, saving: _Saving) -> None:
        errors = [
            error for error in self._group.all_gather_object(saving.error, "to save a checkpoint") if error is not None
        ]
        if errors:
            raise CheckpointError(
                f"checkpoint {saving.tag} in {saving.directory.path} was not saved: {errors[0]}. The checkpoints "
                "before it are as they were."
            )

    def check_not_half_loaded(self, call: str) -> None:
        """
        Raises:
            CheckpointError: a load failed while the states were written, and none has succeeded since.
        """
        if self._half_loaded:
            raise CheckpointError(
                f"{call} after a load that failed half way: some states are the checkpoint's. Load a checkpoint that "
                "is whole first."
            )

    @contextlib.contextmanager
    def _found(
        self, folder: str | os.PathLike[str], tag: str | None, *, fallback: bool
    ) -> Iterator[tuple[Path, Manifest | None]]:
        """A whole checkpoint whose every file has its checksum, ``tag`` or the newest, which nobody removes meanwhile.

        Args:
            fallback: where it is damaged, take the newest of the others that is whole.

        Yields:
            Its directory, and what it says of itself: None where plain PyTorch wrote it.

        Raises:
            CheckpointError: there is none.
        """
        self.wait()
        directory, group = CheckpointDirectory(folder), self._group
        plain = Path(folder) if tag is None else Path(folder) / tag
        kinds: list[bool] = []
        with group.collective_errors("to find a checkpoint", kinds) as every:
            try:
                kinds.append(is_plain(plain))
            except CheckpointError:
                if not fallback:
                    raise
                kinds.append(False)
        if all(kind == [True] for kind in every):
            yield plain, None
            return
        problems: list[str] = []
        what = "checkpoint"
        for _ in range(MAX_SEARCHES):
            candidates = self._candidates(directory, tag, fallback, problems)
            what = f"checkpoint {candidates[0]}" if candidates else f"every checkpoint in {folder}"
            for candidate in candidates:
                with contextlib.ExitStack() as stack:
                    identities: list[tuple[int, int] | None] = []
                    if group.rank == 0:  # which is enough: a lock is seen by all that may remove something
                        with contextlib.suppress(CheckpointError):
                            stack.enter_context(directory.held(candidate))
                            identities.append(directory.identity(candidate))
                    identity = group.all_gather_object(identities)[0]
                    found = self._damage(directory, candidate)
                    if not found:
                        manifests: list[Manifest] = []
                        with group.collective_errors("to find a checkpoint"):
                            manifests.append(directory.manifest(candidate))
                        yield directory.checkpoint(candidate), manifests[0]
                        if group.all_gather_object(_was_removed(directory, candidate, identity))[0]:
                            raise HalfLoadedError(
                                f"checkpoint {candidate} in {folder} was replaced while it was read: load it again "
                                "before training goes on"
                            )
                        return
                    was_removed = group.all_gather_object(_was_removed(directory, candidate, identity))[0]
                if was_removed and tag is None:
                    problems = []
                    break  # by another process, which has saved a newer one
                problems += found
            else:
                break
        whole = "" if fallback else " load_checkpoint(..., fallback=True) takes the newest whole one before it."
        raise CheckpointError(f"{what} is damaged: {'; '.join(dict.fromkeys(problems[:SHOWN]))}.{whole}")

    def _candidates(
        self, directory: CheckpointDirectory, tag: str | None, fallback: bool, problems: list[str]
    ) -> list[str]:
        """The tags to try in turn, the same on every rank."""
        with self._group.collective_errors("to find a checkpoint"):
            first = [tag] if tag is not None else []
            if tag is None:
                try:
                    first = [directory.latest()]
                except CheckpointError as error:
                    if not fallback or not directory.tags():
                        raise
                    problems.append(str(error))
            others = [other for other in reversed(directory.tags()) if other not in first] if fallback else []
        return self._group.all_gather_object([*first, *others])[0]

    def _damage(self, directory: CheckpointDirectory, tag: str) -> list[str]:
        """What is wrong with a checkpoint. Each rank looks at its part of the files."""
        mine: list[str] = []
        try:
            names = sorted(directory.manifest(tag).files)[self._group.rank :: self._group.world_size]
            mine = directory.damage(tag, names)
        except CheckpointError as error:
            mine = [str(error)]
        return list(dict.fromkeys(problem for found in self._group.all_gather_object(mine) for problem in found))

    def close(self) -> None:
        try:
            self.wait()
        finally:
            for directory in self._directories.values():
                directory.close()


def _was_removed(directory: CheckpointDirectory, tag: str, identity: Sequence[tuple[int, int] | None]) -> bool:
    """Return whether another process has removed or replaced a checkpoint since it was found.

    Args:
        identity: what it was when it was held; empty if it could not be held.
    """
    if identity:
        return directory.identity(tag) != identity[0]
    if directory.identity(tag) is not None:
        return True  # it was being removed, and another of its tag has come
    try:
        return directory.latest() != tag
    except CheckpointError:
        return False


class _Saving(threading.Thread):
    """One save on one rank. Talks over a group of its own, so it may run beside training."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        directory: CheckpointDirectory,
        tag: str,
        writing: Path,
        snapshot: Snapshot,
        keep: int | None,
    ) -> None:
        super().__init__(name="zeroengine-save", daemon=False)
        self._rank, self._group, self._keep = rank, group, keep
        self.directory, self.tag, self.writing, self.snapshot = directory, tag, writing, snapshot
        self.error: str | None = None

    def run(self, report: dcp_io.Report = lambda n: None) -> None:
        try:
            self._write(report)
        except BaseException as error:
            self.error = dcp_io.cause(error)
            if self._rank == 0:
                self.directory.abandon(self.writing)
        finally:
            del self.snapshot

    def _write(self, report: dcp_io.Report) -> None:
        snapshot = self.snapshot
        written = dcp_io.save(self.writing, snapshot.entries, snapshot.objects, snapshot.aliases, self._group, report)
        mine: dict[str, FileRecord] | str
        try:
            mine = dcp_io.describe(self.writing, written)
        except Exception as caught:
            mine = f"rank {self._rank}: {dcp_io.cause(caught)}"
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, mine, group=self._group)
        error: str | None = next((answer for answer in everyone if isinstance(answer, str)), None)
        if self._rank == 0 and error is not None:
            self.directory.abandon(self.writing)
        elif self._rank == 0:
            try:
                together = {name: file for files in everyone for name, file in files.items()}
                manifest = Manifest(format=FORMAT, tag=self.tag, files=together, **snapshot.about)
                self.directory.commit(self.writing, manifest, self._keep)
            except Exception as caught:
                error = dcp_io.cause(caught)
                self.directory.abandon(self.writing)
        answer = [error]
        dist.broadcast_object_list(answer, group_src=0, group=self._group)
        self.error = answer[0]
