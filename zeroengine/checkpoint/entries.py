"""The tensors of an engine as a checkpoint holds them: by name, each as the boxes that this rank owns.

Names are those that plain PyTorch gives a `{"model": ..., "optimizer": ...}` checkpoint:

    model.blocks.0.up.weight                       the fp32 master, or a frozen parameter or buffer as it is
    optimizer.state.blocks.0.up.weight.exp_avg     the optimizer's state
    optimizer.param_groups.0.lr                    its groups
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroengine.errors import CheckpointError
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.partition.cut import plain_name
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit

MODEL, OPTIMIZER = "model.", "optimizer.state."


@dataclass
class StateEntry:
    """One tensor of the model or the optimizer, and the boxes of it that this rank has.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        pieces: The boxes, each with a tensor of the box's sizes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of this rank's boxes in bytes."""
        return sum(tensor.nbytes for _, tensor in self.pieces)


StateEntries = dict[str, StateEntry]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls `name`, such as "float32".

    Raises:
        CheckpointError: This version of torch has no such dtype.
    """
    # The name may come from a file of another version of torch.
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has tensors of dtype {name}, which torch {torch.__version__} lacks")
    return dtype


class StateIndex:
    """The entries of one engine's model and optimizer.

    Its methods take `once`: True puts each element on exactly one rank, as a save needs it; False gives all elements
    that this rank holds, as a load needs them.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], optimizer: ShardedOptimizer, rank: int, world_size: int
    ) -> None:
        self._model, self._units, self._optimizer = model, units, optimizer
        self._rank, self._world_size = rank, world_size
        self._shards = {shard.unit: shard for shard in optimizer.shards}

    def aliases(self) -> dict[str, str]:
        """Return the further names of tied parameters and shared buffers, with the name that each is stored under."""
        # Tied parameters are one object with several names. Storing each name would double the largest tensors of many
        # models.
        first_names: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for named_tensors in (self._model.named_parameters, self._model.named_buffers):
            for name, tensor in named_tensors(remove_duplicate=False):
                name = plain_name(name)
                first = first_names.setdefault(id(tensor), name)
                if first != name:
                    aliases[name] = first
        return aliases

    def model(self, *, once: bool) -> StateEntries:
        """Return the masters, frozen parameters and persistent buffers."""
        entries: StateEntries = {}
        for unit in self._units:
            # A frozen unit has no master, so its own shard is stored. It may be cut by another degree than the masters.
            shard = self._shards.get(unit)
            values, degree = (
                (unit.shard, unit.degrees.parameters) if shard is None else (shard.master, unit.degrees.optimizer)
            )
            # Every rank lists all names, also those of which it has no part, so that all ranks match the same names.
            for slot in unit.layout.slots:
                entries[MODEL + slot.name] = StateEntry(slot.shape, values.dtype)
            for span in self._spans(unit, degree, once):
                slot = unit.layout.slots[span.param_index]
                entries[MODEL + slot.name].pieces += _boxes_of_span(slot.shape, span, values, span.shard_offset)
        for name, buffer in _persistent_buffers(self._model):
            # Every rank holds each buffer in full, so one rank saves it. On a load every rank reads it.
            entries[MODEL + name] = _replicated(buffer, on_this_rank=not once or self._rank == 0)
        return entries

    def optimizer(self, *, once: bool) -> StateEntries:
        """Return the optimizer's state of each parameter."""
        entries: StateEntries = {}
        for shard in self._optimizer.shards:
            for span in self._spans(shard.unit, shard.unit.degrees.optimizer, once):
                self._add_state(entries, shard, span, once)
        return entries

    def _add_state(self, entries: StateEntries, shard: OptimizerShard, span: ShardSpan, once: bool) -> None:
        slot = shard.unit.layout.slots[span.param_index]
        state = self._optimizer.shard_state.of(shard, span)
        for key, value in (state.numbers | state.elements).items():
            name = f"{OPTIMIZER}{slot.name}.{key}"
            if value.dim() == 0:
                # Every rank that has part of the parameter has its step. The rank with the first element saves it.
                if not once or span.param_offset == 0:
                    entries[name] = StateEntry((), value.dtype, [(Box((), (), 0), value)])
                continue
            entry = entries.setdefault(name, StateEntry(slot.shape, value.dtype))
            entry.pieces += _boxes_of_span(slot.shape, span, value, 0)

    def _spans(self, unit: Unit, degree: int, once: bool) -> Iterator[ShardSpan]:
        # Ranks that hold copies of one shard share the work of saving it.
        own_range = unit.layout.unreplicated_range(self._rank, degree, self._world_size) if once else None
        return unit.layout.spans(self._rank, degree, own_range)


def _boxes_of_span(
    shape: tuple[int, ...], span: ShardSpan, values: torch.Tensor, offset: int
) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a span as views of `values` (1-D), where the span's first element is at `offset`."""
    base = offset - span.param_offset
    boxes = boxes_of_run(shape, span.param_offset, span.param_offset + span.numel)
    # A span is a run of the flattened parameter, and DCP stores boxes. One run may need several boxes.
    return [(box, values[base + box.start : base + box.start + box.numel].view(box.sizes)) for box in boxes]


def _replicated(tensor: torch.Tensor, on_this_rank: bool) -> StateEntry:
    box = Box((0,) * tensor.dim(), tuple(tensor.shape), 0)
    return StateEntry(tuple(tensor.shape), tensor.dtype, [(box, tensor.detach())] if on_this_rank else [])


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict holds, each once."""
    yielded: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            # A buffer under several names is stored once, and the others are aliases.
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in yielded:
                yielded.add(id(buffer))
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer
