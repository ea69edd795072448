"""Load moments that a checkpoint holds in 8 bits and the engine does not, or the other way round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from zeroengine import ops
from zeroengine.checkpoint.entries import OPTIMIZER, SCALES, StateEntries, StateEntry
from zeroengine.checkpoint.name_mapping import CheckpointNames, torch_dtype
from zeroengine.ops import MOMENT_BLOCK
from zeroengine.optim.backends.interface import ShardState, SpanState
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.boxes import pieces_of_run
from zeroengine.partition.layout import ShardSpan


@dataclass(frozen=True)
class ConvertedMoment:
    """A moment of one span, and CPU memory for what the checkpoint holds of it.

    Attributes:
        key: The name of the moment.
        state: The state of the span.
        first: The index of the span's first element among the values that are read.
        values: The memory, 1-D: values, or codes of 8 bits from the block on in which the span begins.
        scales: The memory for the scales of these blocks; empty where the checkpoint has values.
        buffers: Both as entries, by their names in the checkpoint.
    """

    key: str
    state: SpanState
    first: int
    values: torch.Tensor
    scales: torch.Tensor
    buffers: StateEntries

    @property
    def nbytes(self) -> int:
        """The size of the engine's values in bytes."""
        return self.state.elements[self.key].nbytes

    def write(self) -> None:
        """Write what was read into the engine's state, in its precision."""
        values = self.values
        if len(self.scales):
            values = ops.decode_moment(values, self.scales, is_signed=ops.MOMENT_SIGNS[self.key])
        self.state.write(self.key, values[self.first :][: self.state.elements[self.key].numel()])


def moments_to_convert(
    state: ShardState, shard: OptimizerShard, names: CheckpointNames, converted: Collection[str]
) -> list[ConvertedMoment]:
    """Return the moments of a shard that are converted, with memory to read them into.

    Args:
        state: The state of the shard.
        shard: The shard.
        names: What the checkpoint has.
        converted: The names of these moments, as in `EngineTensors.optimizer_entries`.
    """
    return [
        _with_memory(shard, span, state.of(shard, span), key, names.state_names[name], names)
        for span in state.spans(shard)
        for key in state.of(shard, span).elements
        if (name := f"{OPTIMIZER}{shard.unit.layout.slots[span.param_index].name}.{key}") in converted
    ]


def _with_memory(
    shard: OptimizerShard, span: ShardSpan, state: SpanState, key: str, stored: str, names: CheckpointNames
) -> ConvertedMoment:
    slot, tensors = shard.unit.layout.slots[span.param_index], names.metadata.tensors
    scales = torch.empty(0, device="cpu")
    first, stop = span.param_slice.start, span.param_slice.stop
    buffers: StateEntries = {}
    if stored + SCALES in tensors:
        # The span of another layout may begin within a block.
        blocks = range(first // MOMENT_BLOCK, -(-stop // MOMENT_BLOCK))
        first, stop = blocks.start * MOMENT_BLOCK, min(blocks.stop * MOMENT_BLOCK, slot.numel)
        scales = torch.empty(len(blocks), device="cpu")
        shape = tensors[stored + SCALES].shape
        buffers[stored + SCALES] = StateEntry(shape, scales.dtype, pieces_of_run(shape, blocks.start, scales))
    dtype = torch.uint8 if len(scales) else torch.promote_types(torch_dtype(tensors[stored].dtype), torch.float32)
    values = torch.empty(stop - first, dtype=dtype, device="cpu")
    buffers[stored] = StateEntry(slot.shape, dtype, pieces_of_run(slot.shape, first, values))
    return ConvertedMoment(key, state, span.param_offset - first, values, scales, buffers)
