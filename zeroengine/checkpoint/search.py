"""Find a whole checkpoint to load, all ranks together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroengine.checkpoint.directory import CheckpointFolder, MissingCheckpointError
from zeroengine.checkpoint.inspect import is_plain
from zeroengine.checkpoint.manifest import MANIFEST, Manifest, find_damage
from zeroengine.checkpoint.restore import HalfLoadedError
from zeroengine.comm.group import Group
from zeroengine.errors import CheckpointError

log = logging.getLogger("zeroengine")

# Each search is a look at the whole folder, while another process removes the checkpoints in it.
MAX_SEARCHES = 10
# One message shows at most so many problems of a checkpoint.
MAX_PROBLEMS = 10


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded, and what the ranks found out about it together.

    Attributes:
        tag: Its name.
        identity: What tells it from another checkpoint of its tag; None where rank 0 could not lock it, so that
            somebody may remove it.
        path: Its directory.
        manifest: Its manifest; None where this rank cannot read it.
        problems: What any rank found wrong with its files.
        is_missing: Whether no rank sees anything of that name.
    """

    tag: str
    identity: tuple[int, int] | None
    path: Path | None
    manifest: Manifest | None
    problems: list[str]
    is_missing: bool


class CheckpointSearch:
    """A search for one checkpoint. Each method is a collective and gives the same answer on all ranks.

    [Note: Loading while another process saves]
    Rank 0 locks a candidate before any rank reads it, which is enough: whoever may remove it sees that lock. A
    candidate may still be gone, since a lock comes too late for a checkpoint that is being removed and some file
    systems have none. So rank 0 notes which checkpoint it was and compares again afterwards. Where a candidate has
    gone the search begins anew, since whoever removed it has saved a newer one.

    Args:
        group: The ranks that load.
        folder: A folder of checkpoints, or one checkpoint that plain PyTorch wrote.
        tag: The checkpoint's name; the newest where None.
        fallback: Where that one is damaged, take the newest of the others that is whole.
    """

    def __init__(self, group: Group, folder: Path, tag: str | None, *, fallback: bool) -> None:
        self._group, self._tag, self._fallback = group, tag, fallback
        self._directory = CheckpointFolder(folder)

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Path, Manifest | None]]:
        """Yield a checkpoint whose every file has its checksum, and which nobody removes meanwhile.

        Yields:
            Its directory and its manifest, which is None where plain PyTorch wrote it.

        Raises:
            CheckpointError: There is none.
            HalfLoadedError: The checkpoint was replaced while it was read.
        """
        # A checkpoint of plain PyTorch has no manifest that could be locked, so it is read as it is.
        plain = self._directory.path if self._tag is None else self._directory.path / self._tag
        if self._is_plain_on_all_ranks(plain):
            yield plain, None
            return
        # The lock is held until the caller has read everything.
        with contextlib.ExitStack() as lock:
            candidate = self._find(lock)
            assert candidate.path is not None
            yield candidate.path, candidate.manifest
            # The file system may have no locks, so the checkpoint is compared once more after it was read.
            if self._was_removed(candidate):
                raise HalfLoadedError(
                    f"checkpoint {candidate.tag} in {self._directory.path} was replaced while it was read: load it "
                    "again before training goes on"
                )

    def _is_plain_on_all_ranks(self, path: Path) -> bool:
        is_plain_here = False
        with self._group.collective_errors("to find a checkpoint"):
            # With `fallback` a damaged checkpoint is only the first candidate, and the search goes on.
            with contextlib.suppress(CheckpointError) if self._fallback else contextlib.nullcontext():
                is_plain_here = is_plain(path)
        # All ranks must agree, because they take different branches otherwise.
        return all(self._group.all_gather_object(is_plain_here, "of kinds of checkpoints"))

    def _find(self, lock: contextlib.ExitStack) -> Candidate:
        """Return the first candidate that is whole, with rank 0's lock of it entered into `lock`."""
        # The number is bounded, since a process that saves and removes without pause could make the search endless.
        for _ in range(MAX_SEARCHES):
            problems: list[str] = []
            for tag in self._tags_to_try(problems):
                candidate = self._examine(tag, lock)
                if not candidate.problems:
                    if problems and self._group.rank == 0:
                        log.warning("%s, the newest checkpoint that is whole, is loaded: %s", tag, "; ".join(problems))
                    return candidate
                # Ask before the lock is given back, as the checkpoint may be removed at any moment afterwards.
                was_removed = self._was_removed(candidate)
                lock.close()
                # The user who named a tag wants that one. Otherwise a newer checkpoint exists, and `latest` names it.
                if was_removed and self._tag is None:
                    problems = []
                    break
                problems += candidate.problems[:MAX_PROBLEMS]
            else:
                break
        # The advice is left out where the fallback has already been tried.
        advice = "" if self._fallback else " load_checkpoint(..., fallback=True) takes the newest whole one before it."
        reasons = "; ".join(problems)
        if not self._fallback and candidate.is_missing:
            # A tag that the user mistyped has nothing before it; one that `latest` names has.
            raise MissingCheckpointError(f"{reasons}.{advice if self._tag is None else ''}")
        subject = f"every checkpoint in {self._directory.path}" if self._fallback else f"checkpoint {candidate.tag}"
        raise CheckpointError(f"{subject} is damaged: {reasons}.{advice}")

    def _tags_to_try(self, problems: list[str]) -> Iterator[str]:
        """Yield the tags to try in turn; what is wrong with the folder itself is added to `problems`."""
        tags: list[str] = []
        with self._group.collective_errors("to find a checkpoint"):
            try:
                tags = [self._tag or self._directory.latest()]
            except CheckpointError as error:
                if not (self._fallback and self._tags_here()):
                    raise
                problems.append(str(error))
        # Ranks may see the folder in different states, such as with delayed NFS caches. The list of rank 0 counts.
        yield from (first := self._group.all_gather_object(tags, "of checkpoints to try")[0])
        # Reading every manifest takes long in a large folder, so it is done only where other candidates are needed.
        if self._fallback:
            all_tags = self._group.all_gather_object(self._tags_here(), "of other checkpoints to try")[0]
            yield from (tag for tag in all_tags if tag not in first)

    def _tags_here(self) -> list[str]:
        tags = self._directory.tags()[::-1]
        # A damaged manifest tells no order. Such a checkpoint comes first: it costs nothing, and the message names it.
        return sorted({path.parent.name for path in self._directory.path.glob(f"[!.]*/{MANIFEST}")} - {*tags}) + tags

    def _examine(self, tag: str, lock: contextlib.ExitStack) -> Candidate:
        """Return what the ranks find out about a checkpoint. Each reads its share of the files."""
        identity = None
        if self._group.rank == 0:
            # A missing checkpoint shows up below, on every rank and with a message.
            with contextlib.suppress(CheckpointError):
                lock.enter_context(self._directory.held(tag))
                # The identity is taken under the lock, so it is that of the checkpoint which nobody can remove now.
                identity = self._directory.identity(tag)
        path, manifest, is_missing = None, None, False
        try:
            # Every rank reads the manifest for itself, which shows whether it sees the shared folder at all.
            path, manifest = self._directory.checkpoint(tag), self._directory.manifest(tag)
            # The ranks share the work, and each file is read once.
            names = sorted(manifest.files)[self._group.rank :: self._group.world_size]
            problems = find_damage(path, manifest, names)
        except CheckpointError as error:
            problems, is_missing = [str(error)], isinstance(error, MissingCheckpointError)
        # A problem of one file is a problem for all ranks.
        findings = self._group.all_gather_object((problems, is_missing), "of damage to a checkpoint")
        all_problems = [problem for problems, _ in findings for problem in problems]
        is_missing_everywhere = all(is_missing for _, is_missing in findings)
        return Candidate(tag, identity, path, manifest, list(dict.fromkeys(all_problems)), is_missing_everywhere)

    def _was_removed(self, candidate: Candidate) -> bool:
        """Return whether another process has removed or replaced a checkpoint since rank 0 looked at it first."""
        # Rank 0's answer counts, since it alone holds the lock and noted the identity.
        return self._group.all_gather_object(self._differs_now(candidate), "to find a checkpoint again")[0]

    def _differs_now(self, candidate: Candidate) -> bool:
        identity = self._directory.identity(candidate.tag)
        # Where the candidate was being removed, another of its tag may have appeared since.
        if candidate.identity is not None or identity is not None:
            return identity != candidate.identity
        # If `latest` names another tag, a save has finished, and this candidate was among those that it removed.
        try:
            return self._directory.latest() != candidate.tag
        except CheckpointError:
            return False
