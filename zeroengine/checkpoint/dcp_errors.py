"""Say in one line why reading or writing a checkpoint failed."""

from __future__ import annotations

import errno


def innermost_error(error: BaseException) -> BaseException:
    """Return the error that a rank raised, from the `CheckpointException` that DCP makes of it."""
    # DCP nests its exceptions, one for each level of calls, and keeps the errors of the ranks in `failures`.
    failures = getattr(error, "failures", None)
    return innermost_error(next(iter(failures.values()))[0]) if failures else error


def failure_reason(error: BaseException) -> str:
    """Return the reason of the innermost error in one line, with the rank that it came from."""
    failures = getattr(error, "failures", None)
    # Several ranks often fail for one reason, such as a full disk, so the first of them stands for all.
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {failure_reason(inner)}"
    if isinstance(error, OSError) and error.strerror:
        # Both codes have one remedy, so the message uses the same words for a full disk and for an exceeded quota.
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        return f"{reason}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
