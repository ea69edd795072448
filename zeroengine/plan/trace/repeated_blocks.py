"""Trace equal blocks of a model once, and count the others without running them.

[Note: Which bytes omitted blocks hold]
Of a run of n equal blocks the first, the second and the last are traced. What the second one adds to the living bytes,
each omitted block adds too: n - 3 times as much counts from the forward of the last block until the backward of the
second one ends. The backward meets the omitted blocks after the last and before the second, when fewer bytes live than
at the beginning of the last one's, so the peak is that of all blocks. Operations of the second count n - 2 times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.plan.trace.operation_trace import OperationTrace
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import CHILDREN, buffers_of, parameters_of

# Shorter runs are traced as a whole.
MIN_BLOCKS = 5


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks that follow one another in a container.

    Attributes:
        container: What holds them; the omitted ones are no longer in it.
        second: The block that stands for the omitted ones.
        last: The last block.
        omitted: The blocks between these.
    """

    container: nn.Module
    second: nn.Module
    last: nn.Module
    omitted: tuple[nn.Module, ...]


def omit_equal_blocks(model: nn.Module) -> list[BlockRun]:
    """Take blocks out of ``model`` that equal their neighbors, and return the runs that they were in."""
    if any(_has_kinds_of_layers(module) for module in model.modules()):
        return []
    uses = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    runs: list[BlockRun] = []
    inside: set[nn.Module] = set()
    for container in list(model.modules()):
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or container in inside:
            continue
        blocks = list(container)
        start, stop = _longest_run(_signatures(blocks)) if len(blocks) >= MIN_BLOCKS else (0, 0)
        run = blocks[start:stop]
        shared = any(uses[param] > 1 for block in run for param in block.parameters())
        if len(run) < MIN_BLOCKS or shared or not any(True for _ in run[0].children()):
            continue
        inside.update(module for block in blocks for module in block.modules())
        kept = [*blocks[: start + 2], *blocks[stop - 1 :]]
        setattr(container, CHILDREN, {str(index): block for index, block in enumerate(kept)})
        runs.append(BlockRun(container, run[1], run[-1], tuple(run[2:-1])))
    return runs


def _has_kinds_of_layers(module: nn.Module) -> bool:
    # Models of transformers look up what a layer does by its number.
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds is not None and len(set(kinds)) > 1


def _signatures(blocks: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Return for each block what equal ones have in common: modules, parameters, buffers and plain attributes."""
    attributes = [
        {
            (name, key): value
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None)))
        }
        for block in blocks
    ]
    # A block's own number is no difference.
    numbers = {
        place for place in attributes[0] if all(other.get(place) == index for index, other in enumerate(attributes))
    }
    return [
        (
            [(place, value) for place, value in of_block.items() if place not in numbers],
            [_module_signature(name, module) for name, module in block.named_modules()],
        )
        for block, of_block in zip(blocks, attributes, strict=True)
    ]


def _module_signature(name: str, module: nn.Module) -> tuple[Any, ...]:
    tensors = (*parameters_of(module).items(), *buffers_of(module).items())
    facts = [(key, t.shape, t.dtype, t.requires_grad) for key, t in tensors if t is not None]
    return name, type(module), facts


def _longest_run(signatures: Sequence[object]) -> tuple[int, int]:
    """Return where the longest run of equal values begins and ends."""
    best = start = 0, 0
    for index, signature in enumerate(signatures):
        begin = start[0] if index and signature == signatures[index - 1] else index
        start = begin, index + 1
        best = max(best, start, key=lambda span: span[1] - span[0])
    return best


def count_omitted_blocks(run: BlockRun, trace: OperationTrace, undo: ExitStack) -> None:
    """Register hooks that make ``trace`` count the omitted blocks of ``run`` as well."""
    counts = {"before": 0, "omitted": 0}

    def enter_second(module: nn.Module, args: Any, kwargs: Any) -> None:
        counts["before"] = trace.live_bytes
        for tensor in first_differentiable((args, kwargs)):
            tensor.register_hook(leave_backward)
        trace.weight = len(run.omitted) + 1

    def leave_second(module: nn.Module, args: Any, output: Any) -> None:
        trace.weight = 1
        for tensor in first_differentiable(output):
            tensor.register_hook(enter_backward)

    def enter_last(module: nn.Module, args: Any) -> None:
        counts["omitted"] = len(run.omitted) * (trace.live_bytes - counts["before"])
        trace.add_bytes(counts["omitted"])

    def enter_backward(grad: torch.Tensor) -> None:
        trace.weight = len(run.omitted) + 1

    def leave_backward(grad: torch.Tensor) -> None:
        trace.weight = 1
        trace.add_bytes(-counts["omitted"])
        counts["omitted"] = 0

    undo.callback(run.second.register_forward_pre_hook(enter_second, with_kwargs=True).remove)
    undo.callback(run.second.register_forward_hook(leave_second).remove)
    undo.callback(run.last.register_forward_pre_hook(enter_last).remove)


def first_differentiable(values: Any) -> Iterator[torch.Tensor]:
    """Yield the first tensor with a gradient, if there is one: the residual stream of a block."""
    for tensor in tensors_in(values):
        if tensor.requires_grad:
            yield tensor
            return
