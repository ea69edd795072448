"""What a checkpoint holds of an engine: whole tensors by name, each as the boxes that this rank owns.

Names are those that plain PyTorch gives a ``{"model": ..., "optimizer": ...}`` checkpoint:

    model.blocks.0.up.weight                       the fp32 master, or a frozen parameter or buffer as it is
    optimizer.state.blocks.0.up.weight.exp_avg     the optimizer's state
    optimizer.param_groups.0.lr                    its groups
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.partition.cut import plain_name
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit

MODEL, OPTIMIZER = "model.", "optimizer.state."


@dataclass
class StateEntry:
    """One whole tensor, and the boxes of it that are here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, torch.Tensor]] = field(default_factory=list)  # each tensor of its box's sizes

    @property
    def nbytes(self) -> int:
        """Of the pieces that are here."""
        return sum(piece.nbytes for _, piece in self.pieces)


StateEntries = dict[str, StateEntry]


class StateIndex:
    """The entries of one engine's model and optimizer.

    Args:
        once: each element on exactly one rank, as for a save; otherwise all that this rank owns, as for a load.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], optimizer: ShardedOptimizer, rank: int, world_size: int
    ) -> None:
        self._model, self._units, self._optimizer = model, units, optimizer
        self._rank, self._world_size = rank, world_size
        self._states = {states.unit: states for states in optimizer.units}

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and shared buffers, and the name that each is kept under."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for kind in (self._model.named_parameters, self._model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                name = plain_name(name)
                kept = first.setdefault(id(tensor), name)
                if kept != name:
                    found[name] = kept
        return found

    def model(self, *, once: bool) -> StateEntries:
        """Masters, frozen parameters, and persistent buffers."""
        entries: StateEntries = {}
        for unit in self._units:
            states = self._states.get(unit)
            values, degree = (
                (unit.shard, unit.degrees.parameters) if states is None else (states.master, unit.degrees.optimizer)
            )
            for slot in unit.layout.slots:
                entries[MODEL + slot.name] = StateEntry(slot.shape, values.dtype)
            for span in self._spans(unit, degree, once):
                slot = unit.layout.slots[span.param_index]
                entries[MODEL + slot.name].pieces += _boxed(slot.shape, span, values)
        for name, buffer in _persistent_buffers(self._model):
            entries[MODEL + name] = _replicated(buffer, held=not once or self._rank == 0)
        return entries

    def optimizer(self, *, once: bool) -> StateEntries:
        """What the optimizer keeps of each parameter."""
        entries: StateEntries = {}
        for states in self._optimizer.units:
            unit = states.unit
            for span in self._spans(unit, unit.degrees.optimizer, once):
                self._add_state(entries, states, span, once)
        return entries

    def _add_state(self, entries: StateEntries, states: OptimizerShard, span: ShardSpan, once: bool) -> None:
        slot = states.unit.layout.slots[span.param_index]
        state = self._optimizer.shard_state.of(states, span)
        for key, value in (state.numbers | state.elements).items():
            name = f"{OPTIMIZER}{slot.name}.{key}"
            if value.dim() == 0:
                if not once or span.param_offset == 0:
                    entries[name] = StateEntry((), value.dtype, [(Box((), (), 0), value)])
                continue
            entry = entries.setdefault(name, StateEntry(slot.shape, value.dtype))
            entry.pieces += _boxed(slot.shape, span, value, within=True)

    def _spans(self, unit: Unit, degree: int, once: bool) -> Iterator[ShardSpan]:
        share = unit.layout.unreplicated_range(self._rank, degree, self._world_size) if once else None
        return unit.layout.spans(self._rank, degree, share)


def _boxed(
    shape: tuple[int, ...], span: ShardSpan, values: torch.Tensor, within: bool = False
) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a span, as views of ``values``: the shard, or the span's own elements where ``within``."""
    base = (0 if within else span.shard_offset) - span.param_offset
    runs = boxes_of_run(shape, span.param_offset, span.param_offset + span.numel)
    return [(box, values[base + box.start : base + box.start + box.numel].view(box.sizes)) for box in runs]


def _replicated(tensor: torch.Tensor, held: bool) -> StateEntry:
    box = Box((0,) * tensor.dim(), tuple(tensor.shape), 0)
    return StateEntry(tuple(tensor.shape), tensor.dtype, [(box, tensor.detach())] if held else [])


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer
