"""The states of a checkpoint that a run does not use: its own checkpoints hold them as well, or do not and say so.

[Note: States of frozen parameters]
A frozen parameter keeps its value, so its moments, its step and its average stay right, and a later run may train it
again. An optimizer of plain PyTorch keeps the state of a parameter without a gradient, too. So each rank holds a share
of these states in CPU memory from the load on, as they are stored, and every save writes them: by then the checkpoint
that was loaded may have been replaced or removed. They are not held where states are on disks, nor saved without frozen
parameters.

Any other state would be older than what it belongs to, such as the average of a parameter that is trained without one,
or an LR schedule that nothing steps. Checkpoints of this run do not hold it. The load and the first save name what they
do not hold. States of objects that are not registered are named by the save alone, since they may be registered later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from zeroengine.checkpoint.dcp_metadata import ZEROENGINE_PREFIX, StoredTensor, find_tied_names
from zeroengine.checkpoint.engine_state import EngineState
from zeroengine.checkpoint.entries import AVERAGE, StateEntries, StateEntry, momentum_name
from zeroengine.checkpoint.name_mapping import CheckpointNames, split_state_name, torch_dtype
from zeroengine.partition.boxes import Box
from zeroengine.utils.formats import listed

# The names that a warning shows of each kind of state.
NUM_SHOWN = 3


@dataclass(frozen=True)
class UnusedStates:
    """The states of a checkpoint that this run does not use.

    Attributes:
        source: The checkpoint; "" before a load.
        held: Those of frozen parameters, by their names in it, with this rank's share.
        lost: The names of the others.
    """

    source: str
    held: StateEntries
    lost: list[str]


def plan_unused(
    engine: EngineState, names: CheckpointNames, aliases: Mapping[str, str], read: Collection[str], *, optimizer: bool
) -> tuple[StateEntries, list[str]]:
    """Return memory for this rank's share of the states of frozen parameters, and the names of other unused states.

    Args:
        engine: The engine's state.
        names: What the checkpoint has.
        aliases: The own name of a parameter, by its other names.
        read: The names of what is read besides the optimizer's state.
        optimizer: Whether the optimizer's state is wanted.
    """
    tensors, stored_tensors = engine.tensors, names.metadata.tensors
    values, frozen = tensors.model_entries(once=True), {*tensors.frozen_names()}
    owners = {key: aliases.get(n, n) for n in (*frozen, *aliases) for key in (AVERAGE + n, momentum_name(n))}
    states = {stored: (split_state_name(name) or ("",))[0] for name, stored in names.state_names.items()}
    owners = {stored: own for stored, own in (owners | states if optimizer else owners).items() if own in frozen}
    # A tied parameter is stored under several names, of which one is read.
    first_names = find_tied_names(stored_tensors, stored_tensors)
    known = {first_names.get(name, name) for name in {*read, *states, *map(names.model.prefix.__add__, aliases)}}
    # A save has the values of frozen parameters in the model's precision.
    lost = [
        f"{stored} in {stored_tensors[stored].dtype}"
        for own, stored in names.model.stored_names.items()
        if own in frozen and torch_dtype(stored_tensors[stored].dtype).itemsize > values[own].dtype.itemsize
    ]
    held: StateEntries = {}
    for name, tensor in stored_tensors.items():
        # Where states are on disks they may be larger than memory.
        if name in owners and not engine.placement.disks:
            value = values[owners[name]]
            # A state of another shape belongs to the whole parameter, and rank 0 saves it.
            whole = [Box.whole(tensor.shape)] if tensors.group.rank == 0 else []
            held[name] = own_memory(tensor, [box for box, _ in value.pieces] if tensor.shape == value.shape else whole)
        elif name in owners or first_names.get(name, name) not in known:
            lost.append(name)
    # The others belong to a rank, are named by a save, or are read from the manifest.
    excluded = (f"{ZEROENGINE_PREFIX}rank.", f"{ZEROENGINE_PREFIX}stateful.")
    objects = [name for name in names.metadata.objects if name not in read and not name.startswith(excluded)]
    return held, lost + [name for name in objects if "param_groups." not in name]


def own_memory(stored: StoredTensor, boxes: Iterable[Box]) -> StateEntry:
    """Return CPU memory for boxes of a tensor, which is taken when it is read into."""
    dtype = torch_dtype(stored.dtype)
    return StateEntry(stored.shape, dtype, [(box, torch.empty(box.sizes, dtype=dtype, device="cpu")) for box in boxes])


def listed_by_kind(names: Iterable[str]) -> str:
    """Return the first names of each kind of state."""
    kinds = groupby(sorted(names), key=lambda name: name.partition(".")[0])
    return "; ".join(listed(list(of_kind), NUM_SHOWN) for _, of_kind in kinds)
