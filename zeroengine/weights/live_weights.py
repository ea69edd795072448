"""Save the weights of a live engine, and load weights into it. No rank ever holds more than its own boxes of them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts
from zeroengine.checkpoint.entries import MODEL, StateEntries, StateEntry, part_of_box
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.comm.group import check_same
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.runtime.model_state import read_model_state
from zeroengine.runtime.named_tensors import choose_names, sorted_patterns
from zeroengine.utils.byte_size import parse_byte_size
from zeroengine.utils.listed import listed
from zeroengine.utils.paths import checked_path
from zeroengine.utils.progress import Report, progress
from zeroengine.weights import sources
from zeroengine.weights.huggingface_format import SafetensorsWriter, TensorSpec, plan_files
from zeroengine.weights.output_folder import OutputFolder, parse_dtype
from zeroengine.weights.own_code import match_weights
from zeroengine.weights.sources import WeightSource, check_others
from zeroengine.weights.transformers_conversion import TensorGroup, as_model_names, plan_for_files

log = logging.getLogger("zeroengine")

# The names that a warning shows.
NUM_SHOWN = 3
# So many elements are read or written at a time.
CHUNK = 1 << 22

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


class LoadResult(NamedTuple):
    """The names that only one side has, as `torch.nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# -- Saving ---------------------------------------------------------------------------------------


def save(
    parts: CheckpointedParts,
    directory: str | os.PathLike[str],
    dtype: Any,
    shard_size: str | int,
    names: str | Iterable[str] | None = None,
    trainable_only: bool = False,
) -> None:
    """Write the weights as `zero-export` does. A collective: every rank writes the boxes that it owns.

    Args:
        parts: The engine.
        directory: The folder to write, on a disk that all ranks share.
        dtype: The dtype that floating tensors are cast to; None keeps each tensor's own.
        shard_size: The bytes of values in a file at most, such as "5GB".
        names: The names to write, or patterns of names; None writes all.
        trainable_only: Whether to leave out buffers and frozen parameters.

    Raises:
        CheckpointError: On every rank; what was in `directory` is as it was.
        DivergenceError: On every rank; they pass different arguments.
    """
    group, call = parts.group, "save_weights()"
    arguments: dict[str, object] = {"trainable_only": trainable_only}
    with group.collective_errors("to save weights", arguments) as all_arguments:
        dtype_name, max_bytes = parse_dtype(dtype), parse_byte_size(shard_size, "shard size", CheckpointError)
        path = checked_path(directory, "save_weights(directory)", CheckpointError)
        arguments |= {"directory": os.path.abspath(path), "dtype": dtype_name, "shard_size": max_bytes}
        arguments["names"] = patterns = sorted_patterns(names, call)
        state = read_model_state(parts.module, parts.units, parts.gatherer)
        chosen = choose_names(state, parts.units, patterns, trainable_only=trainable_only, call=call)
        saved_names = parts.saved_names(state)
    # Ranks with other arguments would compute other positions and overwrite each other's values.
    check_same(call, all_arguments)
    with group.collective_errors("to save weights"):
        output = OutputFolder(directory)
        target_dtype = None if dtype_name is None else getattr(torch, dtype_name)
        # Each element is written by exactly one rank, although several may hold it.
        entries, own_tied = _chosen_entries(parts, saved_names, chosen)
        own_specs = {name: TensorSpec(entry.shape, entry.dtype) for name, entry in entries.items()}
        plan = plan_for_files(parts.module, own_specs)
        specs = {name: own_specs[own_name] for name, own_name in plan.old_names.items()}
        specs |= {name: spec for tensors in plan.groups for name, spec in tensors.targets.items()}
        stored_names = {own_name: name for name, own_name in plan.old_names.items()}
        tied = {plan.rename(alias): stored_names[name] for alias, name in own_tied.items() if name in stored_names}
        layout = plan_files({name: spec.cast(target_dtype) for name, spec in specs.items()}, tied, max_bytes)
        writer = SafetensorsWriter(output.writing, layout)
    try:
        # Rank 0 makes the files before any rank writes into them, and renames the folder after all have.
        with group.collective_errors("to save weights"), _naming_folder(output):
            if group.rank == 0:
                output.check(force=True)
                output.begin(layout.nbytes)
                writer.create()
        # The block above ends on all ranks before any of them opens a file that rank 0 makes.
        total = sum(entry.nbytes for entry in entries.values())
        with group.collective_errors("to save weights"), _naming_folder(output):
            # Each rank syncs its own writes before rank 0 renames, since a sync on one node does not cover another
            # node's writes on every file system.
            with writer.synced(), progress("saving", total, group.rank == 0) as report:
                # An error of one rank is raised after the exchanges in the first call, so that no rank waits in one.
                _write_groups(parts, writer, entries, plan.groups, report)
                _write_entries(writer, {name: entries[own] for name, own in plan.old_names.items()}, report)
        with group.collective_errors("to save weights"), _naming_folder(output):
            if group.rank == 0:
                output.commit()
    except BaseException:
        # An error in a block above is an error of every rank, so no rank writes any more when rank 0 removes
        # the folder.
        if group.rank == 0:
            output.abandon()
        raise


def _chosen_entries(
    parts: CheckpointedParts, names: SavedNames, chosen: Collection[str]
) -> tuple[StateEntries, dict[str, str]]:
    """Return the entries to write, each under the first of its names in `chosen`, and its further names."""
    stored = _without_prefix(parts.model_entries(once=True))
    entries: StateEntries = {}
    tied: dict[str, str] = {}
    for own, keys in names.keys.items():
        if wanted := [key for key in keys if key in chosen]:
            entries[wanted[0]] = stored[own]
            tied |= dict.fromkeys(wanted[1:], wanted[0])
    computed = _without_prefix(parts.computed_entries(names, once=True))
    entries |= {key: entry for key, entry in computed.items() if key in chosen}
    others = [key for key in names.computed if key in chosen and key not in computed]
    if others and parts.group.rank == 0:
        log.warning(
            "safetensors hold tensors alone, so save_weights() leaves out %s: full_state_dict() and save_checkpoint() "
            "keep such values",
            listed(others, NUM_SHOWN),
        )
    return entries, tied


def _write_entries(writer: SafetensorsWriter, entries: StateEntries, report: Report) -> None:
    for name, entry in entries.items():
        for box, tensor in entry.pieces:
            _write_box(writer, name, box, tensor, report)


def _write_box(writer: SafetensorsWriter, name: str, box: Box, values: torch.Tensor, report: Report) -> None:
    for i, chunk in enumerate(values.reshape(-1).split(CHUNK)):
        # Reading a state on disk a chunk at a time bounds the memory, and a failing disk raises an error here.
        populate(chunk)
        writer.write(name, box.offsets, box.sizes, i * CHUNK, chunk.cpu())
        report(chunk.nbytes)


def _write_groups(
    parts: CheckpointedParts,
    writer: SafetensorsWriter,
    entries: StateEntries,
    groups: Sequence[TensorGroup],
    report: Report,
) -> None:
    """Write tensors that are computed from others. A collective.

    The ranks take turns: one receives what a part of a group is computed from, computes it and writes it.
    """
    names = [name for group in groups for name in group.sources]
    if not names:
        return
    own_runs = {name: [(box.start, box.numel) for box, _ in entries[name].pieces] for name in names}
    runs_of_ranks = parts.group.all_gather_object(own_runs)
    buffer = torch.empty(CHUNK * max(entries[name].dtype.itemsize for name in names), dtype=torch.uint8)
    buffer = buffer.to(parts.group.device)
    errors: list[Exception] = []
    turn = 0
    for group in groups:
        for part in range(group.num_parts):
            boxes = group.boxes(part)
            writer_rank, turn = turn % parts.group.world_size, turn + 1
            received: list[torch.Tensor] = []
            for name, box in boxes:
                runs = [runs_of_rank[name] for runs_of_rank in runs_of_ranks]
                values = _receive_box(parts, entries[name], box, runs, writer_rank, buffer, errors)
                received += [] if values is None else [values]
            if parts.group.rank == writer_rank and not errors:
                with _postponed(errors):
                    for name, (box, values) in group.convert(part, received).items():
                        _write_box(writer, name, box, values, report)
    if errors:
        raise errors[0]


def _receive_box(
    parts: CheckpointedParts,
    entry: StateEntry,
    box: Box,
    runs_of_ranks: Sequence[Sequence[tuple[int, int]]],
    receiver: int,
    buffer: torch.Tensor,
    errors: list[Exception],
) -> torch.Tensor | None:
    """Give one rank all values of a box of a tensor. A collective.

    Args:
        parts: The engine.
        entry: The tensor, each element on one rank.
        box: The box, whose elements are contiguous in the flattened tensor.
        runs_of_ranks: Of each rank's boxes, the first element within the flattened tensor and the number of elements.
        receiver: The rank that returns the values.
        buffer: The memory that values travel through, of the bytes of a chunk.
        errors: Takes errors of this rank.

    Returns:
        The values, on the CPU; None on the other ranks.
    """
    rank = parts.group.rank
    whole = torch.empty(box.numel, dtype=entry.dtype, device="cpu") if rank == receiver else None
    for owner, runs in enumerate(runs_of_ranks):
        for index, (start, numel) in enumerate(runs):
            stop = min(start + numel, box.start + box.numel)
            for first in range(max(start, box.start), stop, CHUNK):
                last = min(first + CHUNK, stop)
                values = buffer[: (last - first) * entry.dtype.itemsize].view(entry.dtype)
                if rank == owner:
                    with _postponed(errors):
                        chunk = entry.pieces[index][1].reshape(-1)[first - start : last - start]
                        populate(chunk)
                        values.copy_(chunk)
                # Bytes are broadcast, because not every backend knows every dtype.
                parts.group.broadcast(values.view(torch.uint8), owner)
                if whole is not None:
                    whole[first - box.start : last - box.start].copy_(values)
    return None if whole is None else whole.view(box.sizes)


@contextlib.contextmanager
def _postponed(errors: list[Exception]) -> Iterator[None]:
    """Keep an error for later, since the other ranks would wait for this one in the next exchange."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def _without_prefix(entries: StateEntries) -> StateEntries:
    return {name.removeprefix(MODEL): entry for name, entry in entries.items()}


@contextlib.contextmanager
def _naming_folder(output: OutputFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{output.path} was not written: {error.strerror or error}") from error


# -- Loading --------------------------------------------------------------------------------------


def load(parts: CheckpointedParts, weights: Weights, strict: bool) -> LoadResult:
    """Put weights from files, or rank 0's state dict, into the shards. A collective.

    Args:
        parts: The engine.
        weights: A file or folder that all ranks read, or a state dict, which the other ranks need not pass.
        strict: Both sides must have the same names.

    Raises:
        CheckpointError: On every rank, before anything is changed; the weights do not fit.
        DivergenceError: On every rank; they name different files.
    """
    group = parts.group
    source: WeightSource | None = None
    arguments: dict[str, object] = {"strict": strict}
    with group.collective_errors("to load weights", arguments) as all_arguments:
        source = _open_source(weights)
        entries = _without_prefix(parts.model_entries(once=False))
        names = parts.saved_names()
        aliases = parts.aliases() | names.own_names()
        if source is not None:
            source = as_model_names(source, parts.module, [*entries, *aliases])
        if isinstance(weights, (str, os.PathLike)):
            arguments["weights"] = os.path.abspath(os.path.expanduser(weights))
    # Where not all ranks name files, only `strict` is compared: rank 0 has a state dict, or `_is_from_rank_0` reports
    # the mistake.
    all_name_files = all("weights" in other for other in all_arguments)
    check_same(
        "load_weights()", all_arguments if all_name_files else [{"strict": other["strict"]} for other in all_arguments]
    )
    # Ranks exchange digests rather than names and shapes, which may take megabytes.
    offers = group.all_gather_object(None if source is None else (isinstance(weights, Mapping), _digest(source)))
    from_rank_0 = _is_from_rank_0(offers)
    # Only rank 0 may have the state dict, so the other ranks learn its names and shapes from it.
    content = group.all_gather_object(
        (source.where, source.tensors, source.others) if source is not None and group.rank == 0 else None
    )[0]
    assert content is not None
    where, specs, others = content
    with group.collective_errors("to load weights"):
        check_others(where, others, names.computed)
        read_whole = partial(_read_whole, parts, specs, None if from_rank_0 and group.rank else source, from_rank_0)
        matched = match_weights(parts, entries, names, specs, others, where, read_whole)
    match = matched.match
    # The check is computed from the same facts on every rank, so all raise or none does.
    match.check(where, strict=strict)
    with group.collective_errors("to load weights"):
        source = None if source is None else matched.source(source)
        if from_rank_0:
            _receive_entries(parts, entries, matched.specs, match.stored_names, source)
        else:
            assert source is not None
            total = sum(entries[name].nbytes for name in match.stored_names)
            with progress("loading", total, group.rank == 0) as report:
                for name, stored_name in match.stored_names.items():
                    _read_entry(entries[name], source, stored_name, report)
    # The values were written into masters. Now all ranks take them over into the parameters that they compute with.
    parts.republish()
    with group.collective_errors("to load weights"):
        parts.load_by_own_code(names, matched.computed, where)
    return LoadResult(match.missing, match.unexpected)


def _open_source(weights: Weights) -> WeightSource | None:
    if weights is None or (isinstance(weights, Mapping) and not weights):
        return None
    if isinstance(weights, Mapping):
        return sources.of_state_dict(weights, "the state dict")
    if isinstance(weights, (str, os.PathLike)):
        return sources.of_path(Path(checked_path(weights, "load_weights(weights)", CheckpointError)))
    raise CheckpointError(f"load_weights() takes a file, a folder or a state dict, found {type(weights).__name__}")


def _digest(source: WeightSource) -> str:
    return hashlib.sha256(repr(sorted(source.tensors.items())).encode()).hexdigest()


def _is_from_rank_0(offers: list[tuple[bool, str] | None]) -> bool:
    """Return whether rank 0's state dict is loaded; otherwise each rank reads files.

    Args:
        offers: For each rank with weights, whether they are a state dict, and a digest of names, shapes and dtypes.

    Raises:
        CheckpointError: The ranks' weights do not go together.
    """
    first = offers[0]
    if first is None:
        raise CheckpointError("load_weights(): rank 0 has no weights. It is the one whose state dict is loaded.")
    for rank, offer in enumerate(offers):
        if first[0] and offer is not None and not offer[0]:
            raise CheckpointError(f"load_weights(): rank 0 has a state dict and rank {rank} a path: give all the same")
        if not first[0] and (offer is None or offer[0]):
            raise CheckpointError(f"load_weights(): rank 0 has a path and rank {rank} none: give all the same")
        if not first[0] and offer != first:
            raise CheckpointError(f"load_weights(): rank {rank} finds other tensors in its files than rank 0")
    return first[0]


def _read_whole(
    parts: CheckpointedParts,
    specs: Mapping[str, TensorSpec],
    source: WeightSource | None,
    from_rank_0: bool,
    name: str,
) -> torch.Tensor:
    """Return the values of a stored tensor on every rank."""
    spec = specs[name]
    box = Box((0,) * len(spec.shape), spec.shape, 0)
    if not from_rank_0:
        assert source is not None
        return source.read(name, box).clone()
    values = torch.empty(spec.shape, dtype=spec.dtype, device=parts.group.device)
    if source is not None:
        values.copy_(source.read(name, box))
    # Bytes are broadcast, because not every backend knows every dtype.
    parts.group.broadcast(values.reshape(-1).view(torch.uint8))
    return values.cpu()


def _read_entry(entry: StateEntry, source: WeightSource, name: str, report: Report) -> None:
    """Read this rank's boxes of a tensor from a file."""
    for first in range(0, math.prod(entry.shape), CHUNK):
        for part, target in _targets(entry, first, first + CHUNK):
            target.copy_(source.read(name, part))
            report(target.nbytes)


def _targets(entry: StateEntry, first: int, stop: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's boxes of a run of the flattened tensor, each with the memory that takes its values."""
    for box, tensor in entry.pieces:
        for part in boxes_of_run(entry.shape, max(first, box.start), min(stop, box.start + box.numel)):
            target = part_of_box(tensor, box.offsets, part.offsets, part.sizes)
            # The target may lie in a mapped file, which is brought into memory first so that a failing disk raises an
            # error.
            populate(target, write=True)
            yield part, target


def _receive_entries(
    parts: CheckpointedParts,
    entries: StateEntries,
    specs: Mapping[str, TensorSpec],
    stored_names: Mapping[str, str],
    source: WeightSource | None,
) -> None:
    """Receive all tensors from rank 0 by broadcasts through one buffer.

    Separate buffers would be of many sizes, and the allocator keeps what they leave.
    """
    # The size of the buffer follows from facts that all ranks share, so all of them run the same broadcasts.
    chunks = [(min(math.prod(specs[stored].shape), CHUNK), specs[stored].dtype) for stored in stored_names.values()]
    nbytes = max(numel * dtype.itemsize for numel, dtype in chunks)
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=parts.group.device)
    for name, stored in stored_names.items():
        entry, dtype = entries[name], specs[stored].dtype
        numel = math.prod(entry.shape)
        for first in range(0, numel, CHUNK):
            stop = min(first + CHUNK, numel)
            values = buffer[: (stop - first) * dtype.itemsize].view(dtype)
            # Only rank 0 has values. The other ranks receive into the same buffer and keep their own part.
            if parts.group.rank == 0:
                assert source is not None
                for part in boxes_of_run(entry.shape, first, stop):
                    values[part.start - first :][: part.numel].copy_(source.read(stored, part).reshape(-1))
            # Bytes are broadcast, because not every backend knows every dtype.
            parts.group.broadcast(values.view(torch.uint8))
            for part, target in _targets(entry, first, stop):
                target.copy_(values[part.start - first :][: part.numel].view(part.sizes))
