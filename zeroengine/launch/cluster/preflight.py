"""Compare what the nodes report about themselves before anything is started, and list what is wrong where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.node_connection import NodeConnection
from zeroengine.utils.formats import counted


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
        problems.append(f"{counted(slots, 'slot')} in the hostfile, but {counted(gpus, 'GPU')}")
    elif gpus and nproc != "auto" and int(nproc) > gpus:
        problems.append(f"--nproc {nproc}, but {counted(gpus, 'GPU')}; --cpu uses none")
    return problems


def problem_table(problems: Mapping[str, Sequence[str]], num_nodes: int) -> LaunchError:
    """Return an error with the problems of each host, by its label, in one table, one line each."""
    width = max(map(len, problems))
    lines = [f"{len(problems)} of {counted(num_nodes, 'node')} cannot take part:"]
    for label, texts in problems.items():
        lines += [f"  {name:<{width}}  {text}" for name, text in zip_longest([label], texts, fillvalue="")]
    return LaunchError("\n".join(lines))


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
