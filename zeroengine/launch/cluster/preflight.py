"""Looks at what the nodes said of themselves before anything is started, and says what is wrong where."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.node_connection import Link

CLOCKS = 60.0  # seconds between two clocks that deserve a warning

Problem = tuple[str, str]  # a host's label, and what is wrong there


def problems(link: Link, own: dict[str, str], nproc: str) -> list[Problem]:
    """Everything that keeps this node from taking part.

    Args:
        own: the launcher's `versions.installed()`.
        nproc: as `--nproc` was given.
    """
    label = link.host.label
    if link.hello is not None and _minor(link.hello["python"]) != _minor(own["Python"]):
        return [(label, f"Python {link.hello['python']}, and {own['Python']} here")]
    if link.lost is not None:
        return [(label, link.lost)]
    if link.facts is None:
        return [(label, "does not answer")]
    there = link.facts["versions"]
    found = [
        f"{name} {there[name]}, and {own[name]} here" for name in ("torch", "zeroengine") if there[name] != own[name]
    ]
    found += link.facts["missing"]
    gpus, slots = link.facts["gpus"], link.host.slots
    if gpus and slots is not None and slots > gpus:
        found.append(f"{slots} slots in the hostfile, but {gpus} GPUs")
    elif gpus and nproc != "auto" and int(nproc) > gpus:
        found.append(f"--nproc {nproc}, but {gpus} GPUs; --cpu uses none")
    return [(label, text) for text in found]


def clock_warning(link: Link) -> str | None:
    """A sentence where the node's clock is far from this one's."""
    if link.hello is None:
        return None
    ahead = link.hello["time"] - (time.time() - (time.monotonic() - link.hello["at"]))
    if abs(ahead) < CLOCKS:
        return None
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        f"the clock of {link.host.label} is {duration(abs(ahead))} {direction} this one: the run does not mind, but "
        f"the times of its files and logs are wrong. Synchronise it (chronyc makestep, or timedatectl set-ntp true)"
    )


def table(found: Sequence[Problem], nodes: int) -> LaunchError:
    """All problems in one message, a line each."""
    width = max(len(label) for label, _ in found)
    bad = len({label for label, _ in found})
    lines = [f"{bad} of {nodes} node{'s' * (nodes > 1)} cannot take part:"]
    before = ""
    for label, text in found:
        shown = "" if label == before else label
        lines.append(f"  {shown:<{width}}  {text}")
        before = label
    return LaunchError("\n".join(lines))


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds > 0.99 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
