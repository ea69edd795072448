"""Load weights into a live engine. No rank ever holds more than its own boxes of them."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.entries import StateEntry, part_of_box
from zeroengine.comm.group import Group, check_same
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.offload.placement import Placement
from zeroengine.optim.master_weights import MasterWeights
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.partition.storages import is_quantized, storages_of
from zeroengine.utils.files import checked_path
from zeroengine.utils.formats import listed
from zeroengine.utils.progress import Report, evicting, progress
from zeroengine.weights import sources
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.own_code import match_weights
from zeroengine.weights.postponed_errors import postponed
from zeroengine.weights.sources import WeightSource, check_others
from zeroengine.weights.transformers_conversion import as_model_names

log = logging.getLogger("zeroengine")

# So many elements are read at a time.
CHUNK = 1 << 22
# The names that a warning lists.
NUM_SHOWN = 3

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
    from_rank_0 = not isinstance(weights, (str, os.PathLike))
    # Ranks other than the first need not have the state dict.
    arguments: dict[str, object] = {"strict": strict, "weights": "a state dict"}
    with group.collective_errors("to load weights", arguments) as all_arguments:
        source = _open_source(weights)
        entries = tensors.model_entries(once=False)
        names = tensors.saved_names()
        if source is not None:
            source = as_model_names(source, tensors.module, [*entries, *names.aliases])
        if isinstance(weights, (str, os.PathLike)):
            arguments["weights"] = os.path.abspath(os.path.expanduser(weights))
    check_same("load_weights()", all_arguments)
    digest = content = None
    errors: list[Exception] = []
    if source is not None:
        # Ranks exchange digests rather than names and shapes, which may take megabytes. Only rank 0 may have the state
        # dict, so the other ranks learn its names and shapes from it.
        digest = hashlib.sha256(repr(sorted(source.tensors.items())).encode()).hexdigest()
        content = (source.where, source.tensors, source.others) if group.rank == 0 else None
    digests, contents = zip(*group.all_gather_object((digest, content), "of names of weights"), strict=True)
    if digests[0] is None:
        raise CheckpointError("load_weights(): rank 0 has no weights. It is the one whose state dict is loaded.")
    for rank, other in enumerate(digests):
        if not from_rank_0 and other != digests[0]:
            raise CheckpointError(f"load_weights(): rank {rank} finds other tensors in its files than rank 0")
    if from_rank_0:
        source = _broadcast_source(group, source if group.rank == 0 else None, errors, *contents[0])
    assert source is not None
    with group.collective_errors("to load weights"):
        check_others(source.where, source.others, names.computed)
        matched = match_weights(tensors, entries, names, source)
    match = matched.match
    # The check is computed from the same facts on every rank, so all raise or none does.
    _check_quantized(tensors, match.stored_names, source.where)
    match.check(source.where, strict=strict)
    stored = matched.source.tensors
    tensors.warn_of_casts({own: stored[name].dtype for own, name in match.stored_names.items()}, source.where)
    with group.collective_errors("to load weights"):
        placement = master_weights.placement
        copied: list[str] = []
        in_place = {
            slot.name
            for unit in tensors.units
            if placement.in_place and unit.offloaded_shards is not None and not unit.trainable
            for slot in unit.layout.slots
        }
        total = sum(entries[name].nbytes for name in match.stored_names)
        with progress("loading", total, group.rank == 0) as report:
            # Values of frozen parameters go straight to a disk, if they are there, or are on it already.
            report = evicting(report, placement.evict)
            for name, stored_name in match.stored_names.items():
                entry = entries[name]
                if name in in_place and _refer_entry(entry, matched.source, stored_name, placement):
                    report(entry.nbytes)
                    continue
                _read_entry(entry, matched.source, stored_name, from_rank_0, report)
                if name in in_place:
                    copied.append(name)
        if copied and group.rank == 0:
            log.warning(
                '"in_place": %d frozen tensors are copied to nvme_path: %s. Only those stay where they are that lie as '
                "they are, and in the dtype of the parameters, in safetensors on the same disk.",
                len(copied),
                listed(copied, NUM_SHOWN),
            )
        placement.evict()
        if errors:
            raise errors[0]
    # The values were written into masters. Now all ranks take them over into the parameters that they compute with.
    master_weights.publish()
    tensors.restart_averages(match.stored_names)
    with group.collective_errors("to load weights"):
        tensors.load_by_own_code(names, matched.computed, source.where)
        if errors:
            raise errors[0]
    return LoadResult(match.missing, match.unexpected)


def _check_quantized(tensors: EngineTensors, present: Container[str], where: str) -> None:
    """Check that quantized parameters are there with all of their storages, or not at all.

    Raises:
        CheckpointError: Of one parameter some are there. Its values would be read by the scales of another one.
    """
    names = {id(tensor): name for name, tensor in tensors.own_tensors().items()}
    for param in filter(is_quantized, tensors.module.parameters()):
        own = [names[id(storage)] for _, storage in storages_of(param)]
        if missing := [name for name in own if name not in present]:
            if len(missing) < len(own):
                raise CheckpointError(
                    f"{where} holds a part of a quantized parameter: {missing[0]} is not there, which bitsandbytes "
                    "keeps outside of tensors. Give the model the quantized weights before initialize(), such as by "
                    "from_pretrained(); load_checkpoint() and an adapter's load_weights(strict=False) need none."
                )


def _open_source(weights: Weights) -> WeightSource | None:
    if weights is None or (isinstance(weights, Mapping) and not weights):
        return None
    if isinstance(weights, Mapping):
        return sources.of_state_dict(weights, "the state dict")
    if isinstance(weights, (str, os.PathLike)):
        return sources.of_path(Path(checked_path(weights, "load_weights(weights)", CheckpointError)))
    raise CheckpointError(f"load_weights() takes a file, a folder or a state dict, found {type(weights).__name__}")


def _broadcast_source(
    group: Group,
    own: WeightSource | None,
    errors: list[Exception],
    where: str,
    specs: dict[str, TensorSpec],
    others: dict[str, Any] | None,
) -> WeightSource:
    """Return rank 0's weights on every rank. Reading them is a collective.

    Args:
        group: The ranks.
        own: The weights, on rank 0.
        errors: Takes the errors of reads, which rank 0 may not raise while the others wait for the values.
        where: Where they come from, for messages.
        specs: Their shapes and dtypes.
        others: The other values.
    """
    # Separate buffers would be of many sizes, and the allocator keeps what they leave.
    nbytes = max((min(math.prod(spec.shape), CHUNK) * spec.dtype.itemsize for spec in specs.values()), default=0)
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device)

    def read(name: str, box: Box) -> torch.Tensor:
        """Return a box, which is valid until the next read."""
        dtype = specs[name].dtype
        nbytes = box.numel * dtype.itemsize
        memory = buffer if nbytes <= buffer.nbytes else torch.empty(nbytes, dtype=torch.uint8, device=group.device)
        values = memory[:nbytes].view(dtype).view(box.sizes)
        if own is not None:
            with postponed(errors):
                values.copy_(own.read(name, box))
        group.broadcast(values, "of weights")
        return values

    return WeightSource(where, specs, read, others)


def _refer_entry(entry: StateEntry, source: WeightSource, name: str, placement: Placement) -> bool:
    """Let this rank's boxes of a tensor, which only forwards use, be read from its file. Return whether they can be."""
    place = source.locate(name)
    if place is None or source.tensors[name].dtype is not entry.dtype or not entry.lies_in_runs:
        return False
    file, offset = place
    offsets = [offset + box.start * entry.dtype.itemsize for box, _ in entry.pieces]
    return placement.refer([tensor for _, tensor in entry.pieces], file, offsets)


def _read_entry(entry: StateEntry, source: WeightSource, name: str, from_rank_0: bool, report: Report) -> None:
    """Read this rank's boxes of a tensor."""
    numel = math.prod(entry.shape)
    for first in range(0, numel, CHUNK):
        stop = min(first + CHUNK, numel)
        boxes = [box for box, _ in entry.parts(first, stop)]
        # A collective read takes the same boxes on all ranks, and each rank keeps its part of them.
        if from_rank_0:
            boxes = list(boxes_of_run(entry.shape, first, stop))
        # Only contiguous elements can be read, so those of other boxes are read with what lies between them.
        elif boxes and not entry.lies_in_runs:
            start, stop = min(box.start for box in boxes), max(box.stop(entry.shape) for box in boxes)
            boxes = list(boxes_of_run(entry.shape, start, stop))
        for box in boxes:
            values = source.read(name, box)
            for part, target in entry.parts(box.start, box.start + box.numel):
                # The target may lie in a mapped file, which is brought into memory first so that a failing disk raises
                # an error.
                populate(target, write=True)
                target.copy_(part_of_box(values, box.offsets, part.offsets, part.sizes))
                report(target.nbytes)
