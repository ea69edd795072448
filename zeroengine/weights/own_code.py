"""Match weights with a model by name or, where its own code takes part in a load, by its ``load_state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.entries import StateEntries
from zeroengine.checkpoint.name_mapping import NameMatch, match_names
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.partition.cut import plain_name
from zeroengine.runtime.state_dict_loads import StateDictLoad, changes_loads, stored_name, stored_stand_in
from zeroengine.weights.sources import WeightSource, is_extra_state, of_state_dict


@dataclass(frozen=True)
class MatchedWeights:
    """Which stored tensor each parameter and buffer takes, and what only the model's own code can take.

    Attributes:
        match: The names.
        source: The stored tensors, and those that the model's code computed from them.
        computed: The values of the state dict that are no parameters or buffers, by key.
    """

    match: NameMatch
    source: WeightSource
    computed: Mapping[str, Any]


def match_weights(
    tensors: EngineTensors, entries: StateEntries, names: SavedNames, source: WeightSource
) -> MatchedWeights:
    """Return which stored tensors the model takes. A collective.

    Args:
        tensors: The engine's tensors.
        entries: Its parameters and buffers by their own names.
        names: The keys of its state dict.
        source: The stored tensors, equal on all ranks.

    Raises:
        CheckpointError: The model's code refuses the weights.
    """
    specs, aliases = source.tensors, names.aliases
    stored_shapes, own_shapes = ({name: side[name].shape for name in side} for side in (specs, entries))
    match = match_names(stored_shapes, own_shapes, aliases)
    stored_of = {name.removeprefix(match.prefix): name for name in specs if name.startswith(match.prefix)}
    objects = {name.removeprefix(match.prefix): value for name, value in (source.others or {}).items()}
    computed = {key: objects[key] for key in names.computed if key in objects}
    computed |= {key: source.read_whole(stored_of[key]) for key in names.computed if key in stored_of}
    # Older files, and files of tensors alone, have no extra state.
    extra = {key for key in names.computed if is_extra_state(key)}
    missing_extra = [key for key in names.computed if key in extra - computed.keys() and source.others is not None]
    if not changes_loads(tensors.module):
        unexpected = [name for name in match.unexpected if name.removeprefix(match.prefix) not in names.computed]
        match = replace(match, missing=match.missing + missing_extra, unexpected=unexpected)
        return MatchedWeights(match, source, computed)
    state_keys = {plain_name(raw_key): raw_key for raw_key in names.state.values}
    state: dict[str, Any] = {}
    for key, stored in stored_of.items():
        # A tensor that is stored under a parameter's own name has that of the state dict for the model's code.
        known, spec = key if key in state_keys else names.first(aliases.get(key, key)), specs[stored]
        if known not in extra:
            stand_in = stored_stand_in(stored, spec.shape, spec.dtype, partial(source.read_whole, stored))
            state[state_keys.get(known, known)] = stand_in
    own = tensors.own_tensors()
    load = StateDictLoad(tensors.module, tensors.units, tensors.gatherer, own.values())
    missing, unexpected = load.run(names.state.like(state), source.where)
    stored_names: dict[str, str] = {}
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        if tensor in load.assigned:
            value = load.assigned[tensor]
            stored_names[name] = stored_name(value) or f"{name} (computed)"
            if stored_name(value) is None:
                # The model's code may draw numbers, and those of rank 0 count on every rank.
                shared = value.detach().to(tensors.group.device, copy=True).contiguous()
                tensors.group.broadcast(shared, "of converted weights")
                converted[stored_names[name]] = shared.cpu()
    # A tied parameter may have come under another of its names.
    own_missing = dict.fromkeys(aliases.get(plain_name(key), plain_name(key)) for key in missing)
    match = NameMatch(
        match.prefix,
        stored_names,
        [name for name in own_missing if name not in stored_names and not is_extra_state(name)] + missing_extra,
        [*map(plain_name, unexpected), *(name for name in specs if name not in stored_of.values())],
        [],
    )
    values = of_state_dict(converted, source.where)
    all_tensors = replace(
        source,
        tensors=specs | values.tensors,
        read=lambda name, box: (values if name in converted else source).read(name, box),
        locate=lambda name: None if name in converted else source.locate(name),
    )
    return MatchedWeights(match, all_tensors, computed)
