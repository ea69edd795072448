"""Trace a micro-step of a deep model from its first blocks, because each further block adds the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from zeroengine.partition.cut import UnitPlan
from zeroengine.plan.activations import MicroStep, OperationCount
from zeroengine.plan.scaling import repeated_units

# Models of fewer blocks are traced whole.
LEAST_BLOCKS = 8
# The numbers of blocks that determine the line, and the one that it must go through as well. One or two blocks may
# differ, since they are the first and the last.
SHORT, LONGER, CHECKED = 3, 4, 5
# A trace may differ from the line by this share; otherwise the blocks are not all alike.
TOLERANCE = 1e-3
TOTALS = ("saved_bytes", "peak_bytes", "forward_flops", "backward_flops")


class BlockTracer:
    """Trace micro-steps of one model, from a few of its blocks if they are all alike.

    Args:
        model: The model. Its containers of blocks are shortened while it is traced.
        plans: Its units.
        trace: Traces the model as it is, for a micro-batch size and with or without checkpointing.
    """

    def __init__(self, model: nn.Module, plans: Sequence[UnitPlan], trace: Callable[[int, bool], MicroStep]) -> None:
        self._trace = trace
        blocks, _, self._num_blocks = repeated_units(plans)
        self._block_names = [plan.name for plan in blocks]
        self._containers = _containers(model, blocks, self._num_blocks)
        self._is_linear: bool | None = None if self._containers and self._num_blocks >= LEAST_BLOCKS else False

    def micro_step(self, size: int, checkpointing: bool) -> MicroStep:
        """Return the trace of a micro-step of `size` samples."""
        if self._is_linear is None:
            with shortened(self._containers, CHECKED):
                traced = self._trace(size, checkpointing)
            line = self._line(size, checkpointing, CHECKED)
            self._is_linear = all(
                abs(getattr(line, name) - getattr(traced, name)) <= TOLERANCE * getattr(traced, name) for name in TOTALS
            )
        if self._is_linear:
            return self._line(size, checkpointing, self._num_blocks)
        return self._trace(size, checkpointing)

    @functools.cache  # noqa: B019  the tracer lives as long as one plan is made
    def _short(self, size: int, checkpointing: bool, count: int) -> MicroStep:
        with shortened(self._containers, count):
            return self._trace(size, checkpointing)

    def _line(self, size: int, checkpointing: bool, blocks: int) -> MicroStep:
        """Return the micro-step of so many blocks on the line through those of `SHORT` and `LONGER` ones."""
        low, high = (self._short(size, checkpointing, count) for count in (SHORT, LONGER))
        more = blocks - LONGER

        def line(name: str) -> int:
            return int(getattr(high, name) + (getattr(high, name) - getattr(low, name)) * more)

        flops = dict(high.unit_flops)
        # A block in the middle stands for those that were left out.
        alike = {_kind(name): count for name, count in flops.items() if name in self._block_names}
        flops |= {name: alike.get(_kind(name), 0) for name in self._block_names if name not in flops}
        return replace(
            high,
            saved_bytes=line("saved_bytes"),
            peak_bytes=line("peak_bytes"),
            forward_flops=line("forward_flops"),
            backward_flops=line("backward_flops"),
            unit_flops=flops,
            forward=_repeated(low.forward, high.forward, more),
            backward=_repeated(low.backward, high.backward, more),
        )


@contextlib.contextmanager
def shortened(containers: Sequence[nn.Module], count: int) -> Iterator[None]:
    """Let each container have its first `count` modules alone, inside of the `with`."""
    saved = [dict(container._modules) for container in containers]
    try:
        for container, modules in zip(containers, saved, strict=True):
            for name in list(modules)[count:]:
                del container._modules[name]
        yield
    finally:
        for container, modules in zip(containers, saved, strict=True):
            container._modules.clear()
            container._modules.update(modules)


def _containers(model: nn.Module, blocks: Sequence[UnitPlan], count: int) -> list[nn.Module]:
    """Return the containers of the blocks, or none where they are no plain lists of `count` modules that look alike."""
    containers: list[nn.Module] = []
    for prefix in {plan.name.partition(" (")[0].rpartition(".")[0] for plan in blocks}:
        try:
            container = model.get_submodule(prefix)
        except AttributeError:
            return []
        alike = len({str(block) for block in container.children()}) == 1
        if not (isinstance(container, (nn.ModuleList, nn.Sequential)) and len(container) == count and alike):
            return []
        containers.append(container)
    return containers


def _kind(name: str) -> str:
    return name.partition(" (")[0].rpartition(".")[0] + name.partition(" (")[2]


def _repeated(low: Sequence[OperationCount], high: Sequence[OperationCount], more: int) -> list[OperationCount]:
    """Return operations with the counts of `more` further blocks."""
    before = {(op.flops, op.nbytes, op.dtype): op.count for op in low}
    return [
        replace(op, count=op.count + (op.count - before.get((op.flops, op.nbytes, op.dtype), 0)) * more) for op in high
    ]
