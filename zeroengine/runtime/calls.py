"""Forwards of holders, and the hooks by which autograd tells how far their backward is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .eager import eager

# Has a function called when the innermost backward in progress ends; not if it raises.
queue_callback: Callable[[Callable[[], None]], None]
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


@dataclass
class Call:
    """One forward of a holder that may see a backward, or several where its graph is retained."""

    num_inputs: int
    edges: list[GradientEdge] = field(default_factory=list)  # of the inputs, where other calls took some of them, too
    nodes: dict[int, int] = field(default_factory=dict)  # how many add to the gradient of an input that is shared
    inputs_left: set[int] = field(default_factory=set)  # whose gradient this call still adds to
    nodes_left: dict[int, int] = field(default_factory=dict)
    started: bool = False

    def start(self) -> None:
        self.started = True
        self.inputs_left, self.nodes_left = set(range(self.num_inputs)), dict(self.nodes)


class Hook:
    """A method for autograd to call, which does not keep its owner alive."""

    def __init__(self, owner: object, step: Callable[..., None], *args: Any) -> None:
        self._owner, self._step, self._args = weakref.ref(owner), step, args

    @eager
    def __call__(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._step(owner, *self._args)
