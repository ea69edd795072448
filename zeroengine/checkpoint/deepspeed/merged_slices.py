"""Merge what the tensor-parallel ranks of a DeepSpeed checkpoint have of each tensor.

DeepSpeed's AutoTP writes how it has split each parameter, as views of the whole and of a rank's slice (the arguments of
`torch.as_strided`). With two ranks that have half of the columns of a 4 x 6 matrix, rank 1 has this piece:

    shape [4, 3]    source [3, [6, 1]]: from element 3 of the whole    dest [0, [3, 1]]: from element 0 of the slice
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntry
from zeroengine.errors import CheckpointError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.slices import Slice, SliceRun

# The end of a message about a checkpoint that does not say how it is split.
NOT_SPLIT = (
    "does not say how parameters are split over its ranks, as DeepSpeed 0.19.8 does. Load the weights of its "
    "save_16bit_model() by engine.load_weights"
)


def merge_slices(ranks: Sequence[Mapping[str, StateEntry]], info: Mapping[str, Any]) -> dict[str, StateEntry]:
    """Return the whole tensors.

    Args:
        ranks: What each tensor-parallel rank has of each tensor: its slice, or the whole.
        info: What DeepSpeed calls `universal_checkpoint_info`.

    Raises:
        CheckpointError: How a tensor is split is not known, or its slices are not those of one dimension.
    """
    # The name of a parameter is written as the pattern that matches it alone.
    layouts, reasons = (
        {plain_name(re.sub(r"\\(.)", r"\1", pattern[1:-1])): value for pattern, value in patterns.items()}
        for patterns in (info["affine_map"]["params"], info["autotp_unsupported_parameter_patterns"])
    )
    merged: dict[str, StateEntry] = {}
    for name, first in ranks[0].items():
        param = name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(OPTIMIZER).rpartition(".")[0]
        layout, entry = layouts.get(param, {}), first
        # A buffer and the number of steps are the same on each rank.
        if layout and first.shape:
            entry = StateEntry(tuple(layout["logical_shape"]), first.dtype)
            for rank, tensors in enumerate(ranks):
                part = _slice(entry.shape, layout["ranks"][rank])
                if part is not None and part.local_shape == tensors[name].shape and not (part.is_whole and rank):
                    for box, values in tensors[name].pieces:
                        entry.pieces += [(target, values[place]) for target, place in part.boxes(box)]
        if param in reasons or sum(box.numel for box, _ in entry.pieces) != math.prod(entry.shape):
            why = reasons.get(param, "its slices are not those of one dimension")
            raise CheckpointError(f"cannot be imported, because {param} is split over {len(ranks)} ranks, and {why}")
        merged[name] = entry
    return merged


def _slice(shape: tuple[int, ...], held: Mapping[str, Any]) -> Slice | None:
    """Return what a rank has of a parameter; None where it is no slice of one dimension."""
    local, pieces = tuple(held["shard_shape"]), held["pieces"]
    dim = next((dim for dim, size in enumerate(shape) if size != local[dim]), None)
    if dim is None:
        return Slice(shape, local) if len(pieces) == 1 and "scale" not in pieces[0] else None
    parameter, own_part = (torch.empty(sizes, device="meta") for sizes in (shape, local))
    runs = []
    for piece in pieces:
        sizes, source, dest = piece["shape"], piece["source"], piece["dest"]
        run = SliceRun(source[0] // parameter.stride(dim), dest[0] // own_part.stride(dim), sizes[dim])
        views = parameter.narrow(dim, run.start, run.size), own_part.narrow(dim, run.local_start, run.size)
        # A piece of another form is a part of several dimensions, and one with a scale has other values than the whole.
        expected = [list(views[0].shape), *([view.storage_offset(), list(view.stride())] for view in views)]
        if [sizes, source, dest] != expected or "scale" in piece:
            return None
        runs.append(run)
    return Slice(shape, local, dim, tuple(runs))
