"""The tensors of an engine as a checkpoint holds them: by name, each as the boxes that this rank owns.

Names are those that plain PyTorch gives a `{"model": ..., "optimizer": ...}` checkpoint:

    model.blocks.0.up.weight                       the fp32 master, or a frozen parameter or buffer as it is
    optimizer.state.blocks.0.up.weight.exp_avg     the optimizer's state
    optimizer.state.blocks.0.up.weight.exp_avg.scales    of a moment of 8 bits, which is uint8: a value for each block
    optimizer.param_groups.0.lr                    its groups

A parameter has the key of the model's state dict that holds it. Only zeroengine reads the parameters that no key holds,
because a hook drops them or saves what it computed from them, the momentum of the outer step of `local_steps`, and the
moving averages of `ema`:

    zeroengine.parameters.blocks.0.up.weight
    local_steps.blocks.0.up.weight.momentum
    ema.blocks.0.up.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.partition.boxes import Box, boxes_of_run

MODEL, OPTIMIZER, UNSAVED = "model.", "optimizer.state.", "zeroengine.parameters."
OUTER = "local_steps."
AVERAGE = "ema."
# Ends the name of the scales of a moment of 8 bits, after the name of the moment.
SCALES = ".scales"


def momentum_name(parameter: str) -> str:
    """Return the name of a parameter's momentum in the outer step."""
    return f"{OUTER}{parameter}.momentum"


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

    def parts(self, start: int, stop: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield what this rank has of the elements [start, stop) of the flattened tensor: boxes, with their values."""
        for run in boxes_of_run(self.shape, start, stop):
            for box, tensor in self.pieces:
                offsets = tuple(map(max, run.offsets, box.offsets))
                ends = (
                    min(a + size, b + other)
                    for a, size, b, other in zip(run.offsets, run.sizes, box.offsets, box.sizes, strict=True)
                )
                sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
                if all(size > 0 for size in sizes):
                    yield Box.within(self.shape, offsets, sizes), part_of_box(tensor, box.offsets, offsets, sizes)

    def copy_run(self, values: torch.Tensor, start: int) -> None:
        """Copy what this rank has of a run of the flattened tensor, which begins at ``start``, into ``values``, 1-D."""
        strides = torch.empty(self.shape, device="meta").stride()
        for part, own_values in self.parts(start, start + values.numel()):
            populate(own_values)
            # Other elements lie between those of a slice.
            values.as_strided(part.sizes, strides, values.storage_offset() + part.start - start).copy_(own_values)

    @property
    def lies_in_runs(self) -> bool:
        """Whether the elements of each box are contiguous in the flattened tensor."""
        return all(box.is_run(self.shape) for box, _ in self.pieces)


StateEntries = dict[str, StateEntry]


def part_of_box(
    tensor: torch.Tensor, box_offsets: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a view of part of a box.

    Args:
        tensor: The box's values.
        box_offsets: The box's first element in each dimension of the whole tensor.
        offsets: The part's first element in each dimension of the whole tensor.
        sizes: The part's elements in each dimension.
    """
    for dim, (start, base, size) in enumerate(zip(offsets, box_offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start - base, size)
    return tensor
