"""Compare what the nodes report about themselves before anything is started, and list what is wrong where."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.node_connection import NodeConnection

CLOCK_TOLERANCE_S = 60.0


def find_problems(node: NodeConnection, own: dict[str, str], nproc: str) -> list[str]:
    """Return everything that prevents this node from taking part, one sentence each.

    Args:
        node: The node.
        own: The launcher's `installed_versions()`.
        nproc: The value of `--nproc`.
    """
    # Another Python explains most other problems, so it is named alone.
    if node.hello is not None and _minor(node.hello["python"]) != _minor(own["Python"]):
        return [f"Python {node.hello['python']}, and {own['Python']} here"]
    if node.loss is not None:
        return [node.loss]
    if node.facts is None:
        return ["does not answer"]
    versions = node.facts["versions"]
    problems = [
        f"{name} {versions[name]}, and {own[name]} here"
        for name in ("torch", "zeroengine")
        if versions[name] != own[name]
    ]
    problems += node.facts["missing"]
    gpus, slots = node.facts["gpus"], node.host.slots
    if gpus and slots is not None and slots > gpus:
        problems.append(f"{slots} slots in the hostfile, but {gpus} GPUs")
    elif gpus and nproc != "auto" and int(nproc) > gpus:
        problems.append(f"--nproc {nproc}, but {gpus} GPUs; --cpu uses none")
    return problems


def clock_warning(node: NodeConnection) -> str | None:
    """Return a warning if the node's clock is far from this one's."""
    if node.hello is None:
        return None
    ahead = node.hello["time"] - (time.time() - (time.monotonic() - node.hello["at"]))
    if abs(ahead) < CLOCK_TOLERANCE_S:
        return None
    direction = "ahead of" if ahead > 0 else "behind"
    unit, unit_s = ("h", 3600.0) if abs(ahead) > 0.99 * 3600.0 else ("min", 60.0)
    return (
        f"the clock of {node.host.label} is {abs(ahead) / unit_s:.1f} {unit} {direction} this one: the run does not "
        f"mind, but the times of its files and logs are wrong. Synchronize it (chronyc makestep, or timedatectl "
        "set-ntp true)"
    )


def problem_table(problems: Mapping[str, Sequence[str]], num_nodes: int) -> LaunchError:
    """Return an error with the problems of each host, by its label, in one table, one line each."""
    width = max(map(len, problems))
    lines = [f"{len(problems)} of {num_nodes} node{'s' * (num_nodes > 1)} cannot take part:"]
    for label, texts in problems.items():
        lines += [f"  {name:<{width}}  {text}" for name, text in zip_longest([label], texts, fillvalue="")]
    return LaunchError("\n".join(lines))


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
