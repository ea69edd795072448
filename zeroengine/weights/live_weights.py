"""Save the weights of a live engine. No rank ever holds more than its own boxes of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.entries import StateEntries, StateEntry
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.comm.group import check_same
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box
from zeroengine.runtime.named_tensors import sorted_patterns
from zeroengine.utils.files import checked_path
from zeroengine.utils.formats import listed, parse_byte_size
from zeroengine.utils.progress import Report, progress
from zeroengine.weights.conversion import TensorConversion
from zeroengine.weights.huggingface_format import SafetensorsWriter, TensorSpec, plan_files
from zeroengine.weights.output_folder import OutputFolder, parse_dtype
from zeroengine.weights.postponed_errors import postponed
from zeroengine.weights.selection import Converted, Selection, SelectionOptions, StoredValue, select, values_of

log = logging.getLogger("zeroengine")

# The names that a warning shows.
NUM_SHOWN = 3
# So many elements are read or written at a time.
CHUNK = 1 << 22


def save(
    tensors: EngineTensors,
    directory: str | os.PathLike[str],
    dtype: Any,
    shard_size: str | int,
    names: str | Iterable[str] | None = None,
    merge: str | None = None,
    *,
    trainable_only: bool = False,
    ema: bool = False,
) -> None:
    """Write the weights as `zero-export` does. A collective: every rank writes the boxes that it owns.

    Args:
        tensors: The engine's tensors.
        directory: The folder to write, on a disk that all ranks share.
        dtype: The dtype that floating tensors are cast to; None keeps each tensor's own.
        shard_size: The bytes of values in a file at most, such as "5GB".
        names: The names to write, or patterns of names; None writes all.
        merge: "peft" writes the base model with the adapters merged.
        trainable_only: Whether to leave out buffers and frozen parameters.
        ema: Whether to write the moving averages in place of the masters.

    Raises:
        CheckpointError: On every rank; what was in `directory` is as it was.
        DivergenceError: On every rank; they pass different arguments.
    """
    group, call = tensors.group, "save_weights()"
    arguments: dict[str, object] = {"ema": ema}
    with group.collective_errors("to save weights", arguments) as all_arguments:
        max_bytes = parse_byte_size(shard_size, "shard size", CheckpointError)
        path = checked_path(directory, "save_weights(directory)", CheckpointError)
        options = SelectionOptions(
            sorted_patterns(names, call), trainable_only, merge=merge, as_files=True, dtype=parse_dtype(dtype)
        )
        arguments |= vars(options) | {"directory": os.path.abspath(path), "shard_size": max_bytes}
        saved_names = tensors.saved_names()
        # Each element is written by exactly one rank, although several may hold it.
        entries = tensors.model_entries(once=True) | (tensors.average_entries(once=True) if ema else {})
        entries |= tensors.computed_entries(saved_names)

        def spec_of(stored: StoredValue) -> TensorSpec:
            return TensorSpec(entries[stored.own_name].shape, entries[stored.own_name].dtype)

        selection = select(tensors, saved_names, options, spec_of, call)
    # Ranks with other arguments would compute other positions and overwrite each other's values.
    check_same(call, all_arguments)
    if selection.others and group.rank == 0:
        log.warning(
            "safetensors hold tensors alone, so save_weights() leaves out %s: full_state_dict() and save_checkpoint() "
            "keep such values",
            listed(list(selection.others), NUM_SHOWN),
        )
    with group.collective_errors("to save weights"):
        output = OutputFolder(directory)
        layout = plan_files({tensor.name: tensor.spec for tensor in selection.tensors}, selection.tied, max_bytes)
        writer = SafetensorsWriter(output.writing, layout)
        problem = f"{output.path} was not written"
    try:
        # Rank 0 makes the files before any rank writes into them, and renames the folder after all have.
        with group.collective_errors("to save weights"), as_checkpoint_errors(problem):
            if group.rank == 0:
                output.check(force=True)
                output.begin(layout.nbytes)
                writer.create()
        # The block above ends on all ranks before any of them opens a file that rank 0 makes.
        read = {value.own_name for tensor in selection.tensors for value in values_of(tensor.source, selection.stored)}
        total = sum(entries[name].nbytes for name in read)
        with group.collective_errors("to save weights"), as_checkpoint_errors(problem):
            # Each rank syncs its own writes before rank 0 renames, since a sync on one node does not cover another
            # node's writes on every file system.
            with writer.synced(), progress("saving", total, group.rank == 0) as report:
                # An error of one rank is raised after the exchanges in the first call, so that no rank waits in one.
                _write_converted(tensors, writer, entries, selection, report)
                for tensor in selection.tensors:
                    if not isinstance(tensor.source, Converted):
                        for box, values in entries[tensor.source.own_name].pieces:
                            _write_box(writer, tensor.name, box, values, report)
        with group.collective_errors("to save weights"), as_checkpoint_errors(problem):
            if group.rank == 0:
                output.commit()
    except BaseException:
        # An error in a block above is an error of every rank, so no rank writes any more when rank 0 removes
        # the folder.
        if group.rank == 0:
            output.abandon()
        raise


def _write_box(writer: SafetensorsWriter, name: str, box: Box, values: torch.Tensor, report: Report) -> None:
    for i, chunk in enumerate(values.reshape(-1).split(CHUNK)):
        # Reading a state on disk a chunk at a time bounds the memory, and a failing disk raises an error here.
        populate(chunk)
        writer.write(name, box.offsets, box.sizes, i * CHUNK, chunk.cpu())
        report(chunk.nbytes)


def _write_converted(
    tensors: EngineTensors, writer: SafetensorsWriter, entries: StateEntries, selection: Selection, report: Report
) -> None:
    """Write tensors that are computed from others. A collective.

    The ranks take turns: one receives what a part of a group is computed from, computes it and writes it.
    """
    new_names: dict[TensorConversion, dict[str, str]] = {}
    for tensor in selection.tensors:
        if isinstance(tensor.source, Converted):
            new_names.setdefault(tensor.source.group, {})[tensor.source.target] = tensor.name
    if not new_names:
        return
    sources = {name: entries[selection.stored[name].own_name] for group in new_names for name in group.sources}
    buffer = torch.empty(CHUNK * max(entry.dtype.itemsize for entry in sources.values()), dtype=torch.uint8)
    buffer = buffer.to(tensors.group.device)
    errors: list[Exception] = []
    turn = 0
    for group, names in new_names.items():
        for part in range(group.num_parts):
            writer_rank, turn = turn % tensors.group.world_size, turn + 1
            received = [
                _gather_box(tensors, sources[name], box, writer_rank, buffer, errors) for name, box in group.boxes(part)
            ]
            if tensors.group.rank == writer_rank and not errors:
                with postponed(errors):
                    for target, (box, values) in group.convert(part, received).items():
                        if target in names:
                            _write_box(writer, names[target], box, values, report)
    if errors:
        raise errors[0]


def _gather_box(
    tensors: EngineTensors, entry: StateEntry, box: Box, receiver: int, buffer: torch.Tensor, errors: list[Exception]
) -> torch.Tensor:
    """Give one rank all values of a box of a tensor. A collective.

    Args:
        tensors: The engine's tensors.
        entry: The tensor, each element on one rank.
        box: The box, whose elements are contiguous in the flattened tensor.
        receiver: The rank that returns the values.
        buffer: The memory that values travel through, of the bytes of a chunk.
        errors: Takes errors of this rank.

    Returns:
        The values, on the CPU; without elements on the other ranks.
    """
    is_receiver = tensors.group.rank == receiver
    gathered_values = torch.empty(box.numel if is_receiver else 0, dtype=entry.dtype, device="cpu")
    for first in range(box.start, box.start + box.numel, CHUNK):
        stop = min(first + CHUNK, box.start + box.numel)
        values = buffer[: (stop - first) * entry.dtype.itemsize].view(entry.dtype).zero_()
        with postponed(errors):
            entry.copy_run(values, first)
        # Each byte comes from one rank, and is 0 on the others.
        tensors.group.all_reduce(values.view(torch.uint8), "of weights")
        if is_receiver:
            gathered_values[first - box.start : stop - box.start].copy_(values)
    return gathered_values.view(box.sizes) if is_receiver else gathered_values
