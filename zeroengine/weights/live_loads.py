"""Load weights into a live engine. No rank ever holds more than its own boxes of them."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.entries import StateEntries, StateEntry, part_of_box, without_prefix
from zeroengine.comm.group import check_same
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.optim.master_weights import MasterWeights
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.utils.paths import checked_path
from zeroengine.utils.progress import Report, progress
from zeroengine.weights import sources
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.own_code import match_weights
from zeroengine.weights.sources import WeightSource, check_others
from zeroengine.weights.transformers_conversion import as_model_names

# So many elements are read at a time.
CHUNK = 1 << 22

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


class LoadResult(NamedTuple):
    """The names that only one side has, as `torch.nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(tensors: EngineTensors, master_weights: MasterWeights, weights: Weights, strict: bool) -> LoadResult:
    """Put weights from files, or rank 0's state dict, into the shards. A collective.

    Args:
        tensors: The engine's tensors.
        master_weights: Take the values.
        weights: A file or folder that all ranks read, or a state dict, which the other ranks need not pass.
        strict: Both sides must have the same names.

    Raises:
        CheckpointError: On every rank, before anything is changed; the weights do not fit.
        DivergenceError: On every rank; they name different files.
    """
    group = tensors.group
    source: WeightSource | None = None
    arguments: dict[str, object] = {"strict": strict}
    with group.collective_errors("to load weights", arguments) as all_arguments:
        source = _open_source(weights)
        entries = without_prefix(tensors.model_entries(once=False))
        names = tensors.saved_names()
        aliases = tensors.aliases() | names.own_names()
        if source is not None:
            source = as_model_names(source, tensors.module, [*entries, *aliases])
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
        read_whole = partial(_read_whole, tensors, specs, None if from_rank_0 and group.rank else source, from_rank_0)
        matched = match_weights(tensors, entries, names, specs, others, where, read_whole)
    match = matched.match
    # The check is computed from the same facts on every rank, so all raise or none does.
    match.check(where, strict=strict)
    with group.collective_errors("to load weights"):
        source = None if source is None else matched.source(source)
        if from_rank_0:
            _receive_entries(tensors, entries, matched.specs, match.stored_names, source)
        else:
            assert source is not None
            total = sum(entries[name].nbytes for name in match.stored_names)
            with progress("loading", total, group.rank == 0) as report:
                for name, stored_name in match.stored_names.items():
                    _read_entry(entries[name], source, stored_name, report)
    # The values were written into masters. Now all ranks take them over into the parameters that they compute with.
    master_weights.publish()
    with group.collective_errors("to load weights"):
        tensors.load_by_own_code(names, matched.computed, where)
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
    tensors: EngineTensors,
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
    values = torch.empty(spec.shape, dtype=spec.dtype, device=tensors.group.device)
    if source is not None:
        values.copy_(source.read(name, box))
    # Bytes are broadcast, because not every backend knows every dtype.
    tensors.group.broadcast(values.reshape(-1).view(torch.uint8))
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
    tensors: EngineTensors,
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
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=tensors.group.device)
    for name, stored in stored_names.items():
        entry, dtype = entries[name], specs[stored].dtype
        numel = math.prod(entry.shape)
        for first in range(0, numel, CHUNK):
            stop = min(first + CHUNK, numel)
            values = buffer[: (stop - first) * dtype.itemsize].view(dtype)
            # Only rank 0 has values. The other ranks receive into the same buffer and keep their own part.
            if tensors.group.rank == 0:
                assert source is not None
                for part in boxes_of_run(entry.shape, first, stop):
                    values[part.start - first :][: part.numel].copy_(source.read(stored, part).reshape(-1))
            # Bytes are broadcast, because not every backend knows every dtype.
            tensors.group.broadcast(values.view(torch.uint8))
            for part, target in _targets(entry, first, stop):
                target.copy_(values[part.start - first :][: part.numel].view(part.sizes))
