"""Match weights with a model by name or, where its own code takes part in a load, by its ``load_state_dict()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.entries import StateEntries, part_of_box
from zeroengine.checkpoint.name_mapping import NameMatch, match_names
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.partition.cut import plain_name
from zeroengine.runtime.state_dict_loads import StateDictLoad, changes_loads, stored_name, stored_stand_in
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.sources import WeightSource, is_extra_state

ReadWhole = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class MatchedWeights:
    """Which stored tensor each parameter and buffer takes, and what only the model's own code can take.

    Attributes:
        match: The names.
        specs: The shapes and dtypes of the stored tensors, and of those that the model's code computed from them.
        converted: The latter, by name.
        computed: The values of the state dict that are no parameters or buffers, by key.
    """

    match: NameMatch
    specs: dict[str, TensorSpec]
    converted: Mapping[str, torch.Tensor]
    computed: Mapping[str, Any]

    def source(self, source: WeightSource) -> WeightSource:
        """Return ``source`` with the tensors that were computed from it."""

        def read(name: str, box: Any) -> torch.Tensor:
            if name not in self.converted:
                return source.read(name, box)
            return part_of_box(self.converted[name], [0] * len(box.sizes), box.offsets, box.sizes)

        return WeightSource(source.where, self.specs, read)


def match_weights(
    tensors: EngineTensors,
    entries: StateEntries,
    names: SavedNames,
    specs: dict[str, TensorSpec],
    others: Mapping[str, Any] | None,
    where: str,
    read_whole: ReadWhole,
) -> MatchedWeights:
    """Return which stored tensors the model takes. A collective.

    Args:
        tensors: The engine's tensors.
        entries: Its parameters and buffers by their own names.
        names: The keys of its state dict.
        specs: The shapes and dtypes of the stored tensors.
        others: The other stored values; None where the files can hold tensors alone.
        where: Where they are stored, for messages.
        read_whole: Returns the values of a stored tensor, on every rank.

    Raises:
        CheckpointError: The model's code refuses the weights.
    """
    aliases = tensors.aliases() | names.own_names()
    stored_shapes, own_shapes = ({name: side[name].shape for name in side} for side in (specs, entries))
    match = match_names(stored_shapes, own_shapes, aliases)
    stored_of = {name.removeprefix(match.prefix): name for name in specs if name.startswith(match.prefix)}
    objects = {name.removeprefix(match.prefix): value for name, value in (others or {}).items()}
    computed = {key: objects[key] for key in names.computed if key in objects}
    extra = {key for key in names.computed if is_extra_state(key)}
    # Older files, and files of tensors alone, have no extra state.
    missing_extra = (
        [] if others is None else [key for key in names.computed if key in extra - objects.keys() - stored_of.keys()]
    )
    expected = {stored_of[key]: key for key in names.computed if key in stored_of}
    if not changes_loads(tensors.module):
        computed |= {key: read_whole(stored) for stored, key in expected.items()}
        unexpected = [name for name in match.unexpected if name not in expected]
        found = NameMatch(
            match.prefix, match.stored_names, match.missing + missing_extra, unexpected, match.shape_problems
        )
        return MatchedWeights(found, specs, {}, computed)
    state_keys = {plain_name(raw_key): raw_key for raw_key in names.state.values}
    state: dict[str, Any] = {}
    for key, stored in stored_of.items():
        # A tensor that is stored under a parameter's own name has that of the state dict for the model's code.
        known = key if key in state_keys else names.first(aliases.get(key, key))
        if known not in extra:
            spec = specs[stored]
            state[state_keys.get(known, known)] = stored_stand_in(
                stored, spec.shape, spec.dtype, partial(read_whole, stored)
            )
    own = tensors.own_tensors()
    load = StateDictLoad(tensors.module, tensors.units, tensors.gatherer, own.values())
    missing, unexpected = load.run(names.state.like(state), where)
    stored_names: dict[str, str] = {}
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        if tensor in load.assigned:
            value = load.assigned[tensor]
            stored_names[name] = stored_name(value) or f"{name} (computed)"
            if stored_name(value) is None:
                converted[stored_names[name]] = value.detach().cpu()
    # A tied parameter may have come under another of its names.
    own_missing = dict.fromkeys(aliases.get(plain_name(key), plain_name(key)) for key in missing)
    computed |= {key: read_whole(stored) for stored, key in expected.items()}
    return MatchedWeights(
        NameMatch(
            match.prefix,
            stored_names,
            [name for name in own_missing if name not in stored_names and not is_extra_state(name)] + missing_extra,
            [*map(plain_name, unexpected), *(name for name in specs if name not in stored_of.values())],
            [],
        ),
        specs | {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in converted.items()},
        converted,
        computed,
    )
