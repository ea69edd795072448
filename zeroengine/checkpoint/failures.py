"""Say in one line why reading or writing a checkpoint failed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from zeroengine.errors import CheckpointError, ZeroEngineError


def failure_reason(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        # Both codes have one remedy, so the message uses the same words for a full disk and for an exceeded quota.
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        return f"{reason}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def as_checkpoint_errors(problem: str, prefix: str = "") -> Iterator[None]:
    """Raise any error within as a CheckpointError: `problem` and the reason.

    Args:
        problem: What is wrong then.
        prefix: What to put before the message of a CheckpointError within, which does not know the path.
    """
    try:
        yield
    except ZeroEngineError as error:
        # These errors have the right class and message already.
        if not prefix:
            raise
        raise CheckpointError(f"{prefix}{error}") from None
    except Exception as error:
        raise CheckpointError(f"{problem}: {failure_reason(error)}") from error
