"""The block that random models repeat, and the containers in which it returns tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.distributed.random_models.bodies import BODIES
from tests.distributed.random_models.recipe import LENGTH, BlockSpec


@dataclass
class BlockOutput:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Cache:
    """An object that nobody can look into, such as a cache of keys and values."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda hidden, extra: (hidden, extra),
    "named tuple": Pair,
    "list": lambda hidden, extra: [hidden, extra],
    "dict": lambda hidden, extra: {"hidden": hidden, "extra": extra},
    "nested": lambda hidden, extra: {"hidden": hidden, "extra": ([{"extra": extra}], None)},
    "dataclass": BlockOutput,
    "opaque": lambda hidden, extra: (hidden, Cache(extra)),
    "opaque alone": lambda hidden, extra: Cache(hidden, extra),
    "views": lambda hidden, extra: (*hidden.split(2, -1), extra),
}


def unpack(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The hidden state and the extra tensor in whatever a block returned."""
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, BlockOutput):
        return output.hidden, output.extra
    if isinstance(output, Cache):
        return output.tensors[0], output.tensors[1]
    if isinstance(output, dict):
        extra = output["extra"]
        return output["hidden"], extra[0][0]["extra"] if isinstance(extra, tuple) else extra
    *parts, extra = output
    hidden = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return hidden, extra.tensors[0] if isinstance(extra, Cache) else extra


class Block(nn.Module):
    """A residual block; one class for every spec, so that a container of them is cut into one unit each."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.fault: BaseException | None = None  # raised in the midst of the forward
        self.fault_in_recompute = False  # raised only where a backward runs the forward again
        self.body = BODIES[spec.body](width)
        if spec.output != "tensor":
            self.probe = nn.Linear(width, 1)
        if spec.weight_output:
            self.codebook = nn.Parameter(torch.randn(3, width))
        if spec.unused:
            self.nobody = nn.Parameter(torch.randn(width))
        for param in list(self.parameters())[: {"no": 0, "part": 1, "all": None}[spec.frozen]]:
            param.requires_grad_(False)

    def forward(self, x: torch.Tensor, query: torch.Tensor | None = None) -> Any:
        hidden, extra = self.encode(x, query)
        if self.spec.output == "tensor":
            return hidden
        assert extra is not None
        if self.spec.output == "attribute":
            self.extra = extra
            return hidden
        return OUTPUTS[self.spec.output](hidden, extra)

    def encode(self, x: torch.Tensor, query: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The work of the forward, which may also be called from outside of it."""
        x = x if query is None else x * query.sigmoid() + query
        if self.fault is not None and self.fault_in_recompute and torch._C._current_graph_task_id() >= 0:
            raise self.fault  # at once: a checkpoint's second forward ends with the last tensor that is needed
        hidden = x * 0.5 + self.body(x)
        if self.fault is not None and not self.fault_in_recompute:
            raise self.fault
        if self.spec.output == "tensor":
            return hidden, None
        if self.spec.weight_output:
            return hidden + self.codebook.mean(0), self.codebook[:2]
        return hidden, self.probe(hidden).tanh()


class Positions(nn.Module):
    """Learned positions: returns a view of its own parameter, or the parameter itself."""

    def __init__(self, width: int, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.weight = nn.Parameter(torch.randn(LENGTH if whole else LENGTH + 2, width) / 4)

    def forward(self, length: int) -> torch.Tensor:
        return self.weight if self.whole else self.weight[:length]
