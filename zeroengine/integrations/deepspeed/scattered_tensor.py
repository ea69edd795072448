"""Read a tensor whose elements lie in several of DeepSpeed's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroengine.checkpoint.entries import StateEntry
from zeroengine.disk.mapped_memory import populate_pages
from zeroengine.integrations.deepspeed.optimizer_states import ParameterSlice
from zeroengine.partition.boxes import Box, boxes_of_run

# At most so many bytes are in memory at a time.
PIECE = 1 << 27


@dataclass(frozen=True)
class ScatteredTensor:
    """A tensor, and the runs of its elements as they lie in the files.

    Attributes:
        runs: The index of each run's first element within the flattened tensor, and its elements (1-D), in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: list[tuple[int, torch.Tensor]]

    @classmethod
    def from_slices(
        cls, shape: tuple[int, ...], slices: Sequence[ParameterSlice], vectors: Sequence[torch.Tensor]
    ) -> ScatteredTensor:
        """Return the tensor whose elements are `slices` of `vectors`."""
        spans = [slice_.span for slice_ in slices]
        runs = [
            (span.param_offset, vector[span.shard_offset : span.shard_offset + span.numel])
            for span, vector in zip(spans, vectors, strict=True)
        ]
        return cls(shape, vectors[0].dtype, runs)

    @classmethod
    def from_tensor(cls, value: torch.Tensor) -> ScatteredTensor:
        """Return a tensor that lies in one file."""
        return cls(tuple(value.shape), value.dtype, [(0, value.detach().flatten())])

    def entry(self) -> StateEntry:
        """Return the entry without values, in pieces of `PIECE` bytes at most, and of whole rows where these fit."""
        numel, row, most = math.prod(self.shape), math.prod(self.shape[1:]), PIECE // self.dtype.itemsize
        # Pieces of whole rows give one box each. Other cuts would give up to three.
        step = most // row * row if 0 < row <= most else most
        starts = range(0, numel, step)
        boxes = [box for first in starts for box in boxes_of_run(self.shape, first, min(first + step, numel))]
        # Meta tensors stand for the values, which are read only when a piece is written.
        pieces = [(box, torch.empty(box.sizes, dtype=self.dtype, device="meta")) for box in boxes]
        return StateEntry(self.shape, self.dtype, pieces)

    def read(self, box: Box, into: torch.Tensor) -> None:
        """Copy a box of the tensor from the files."""
        start, stop = box.start, box.start + box.numel
        for first, run in self.runs:
            # Both bounds are relative to the run. A run outside of the box gives an empty part.
            part = run[max(start - first, 0) : max(stop - first, 0)]
            if part.numel():
                offset = max(first - start, 0)
                # The files are mapped, and reading a page that the disk cannot deliver would be SIGBUS.
                populate_pages(part)
                into.view(-1)[offset : offset + part.numel()] = part
