"""Where the backward of one call reaches the call's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

MAX_NODES = 5000  # of one call that are looked at


def last_nodes(inputs: Sequence[torch.Tensor | GradientEdge], outputs: Sequence[torch.Tensor]) -> list[set[Node]]:
    """For each of ``inputs`` the nodes, in a backward from ``outputs``, that add to its gradient.

    When they have run, so has every node of the call that leads to the input. None where the call does not read it,
    or where the call's graph is too large to look at.
    """
    found: dict[tuple[Node | None, int], set[Node]] = {_edge(tensor): set() for tensor in inputs}
    edges = [_edge(tensor) for tensor in outputs]
    seen: set[Node] = set()
    while edges:
        edge = edges.pop()
        node = edge[0]
        if node is None or node in seen or edge in found:
            continue
        seen.add(node)
        if len(seen) > MAX_NODES:
            return [set() for _ in inputs]
        for following in node.next_functions:
            if following in found:
                found[following].add(node)
            else:
                edges.append(following)
    return [found[_edge(tensor)] for tensor in inputs]


def _edge(of: torch.Tensor | GradientEdge) -> tuple[Node | None, int]:
    edge = get_gradient_edge(of) if isinstance(of, torch.Tensor) else of
    return edge.node, edge.output_nr
