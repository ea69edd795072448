"""The number of files that the launcher may have open."""

from __future__ import annotations

import resource

from zeroengine.errors import LaunchError

# The descriptors that stay free for everything else in the launcher.
SPARE_DESCRIPTORS = 100


def allow_descriptors(count: int, purpose: str) -> None:
    """Raise this process's limit of open files, if necessary, to `count` more than it needs anyway.

    Args:
        count: The number of further files.
        purpose: What they are for, in words for the message.

    Raises:
        LaunchError: The system does not allow so many.
    """
    limit = count + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    hard_is_enough = hard == resource.RLIM_INFINITY or hard >= limit
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard if hard_is_enough else limit))
    except (OSError, ValueError):
        # Only root may raise the hard limit.
        raise LaunchError(
            f"{purpose} need {limit} open files, and {hard} are allowed here. Allow more (ulimit -n {limit}, or "
            "nofile in /etc/security/limits.conf), or start fewer"
        ) from None
