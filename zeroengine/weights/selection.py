"""Which tensors leave an engine, and under which names: in files, in state dicts and in streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.named_tensors import choose_names
from zeroengine.runtime.unit import Unit
from zeroengine.weights.conversion import ConversionPlan, TensorConversion
from zeroengine.weights.huggingface_format import TensorSpec, cast_spec
from zeroengine.weights.peft_merge import plan_for_merge
from zeroengine.weights.transformers_conversion import plan_for_files


class Slot(NamedTuple):
    """A parameter: its unit, and its index there."""

    unit: Unit
    param_index: int

    @property
    def own_name(self) -> str:
        """The parameter's own name."""
        return self.unit.layout.slots[self.param_index].name


class LocalValue(NamedTuple):
    """What every rank has: a buffer, or what the model's own code computed, under its own name or its key."""

    own_name: str
    value: Any


class Converted(NamedTuple):
    """A tensor that a group computes, and its name among the targets of the group."""

    group: TensorConversion
    target: str


StoredValue = Slot | LocalValue
Source = StoredValue | Converted


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor that leaves the engine, with its name, shape and dtype outside, and where its values are."""

    name: str
    spec: TensorSpec
    source: Source


@dataclass(frozen=True)
class Selection:
    """What leaves an engine.

    Attributes:
        tensors: Each tensor once: unit by unit, and then those that every rank has.
        tied: The further names of tied tensors, with the first name.
        others: The values that are no tensors, by name.
        stored: What groups compute tensors from, by the names that they know.
    """

    tensors: list[OutgoingTensor]
    tied: dict[str, str]
    others: dict[str, Any]
    stored: Mapping[str, StoredValue]


@dataclass(frozen=True)
class SelectionOptions:
    """Which tensors leave, and how.

    Attributes:
        names: Names or patterns of those that leave; None for all.
        trainable_only: Whether buffers and frozen parameters stay.
        buffers: Whether what is no parameter leaves as well.
        merge: "peft": the tensors of the base model leave, with the adapters merged. None: those of the model.
        as_files: Whether tensors of a transformers model get the names and the layout of its files.
        dtype: torch's name for the dtype that floating tensors are cast to; None for each tensor's own.
    """

    names: list[str] | None = None
    trainable_only: bool = False
    buffers: bool = True
    merge: str | None = None
    as_files: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.merge not in (None, "peft"):
            raise ZeroEngineError(f'merge is {self.merge!r}; write "peft", or leave it out')


def select(
    tensors: EngineTensors,
    saved: SavedNames,
    options: SelectionOptions,
    spec_of: Callable[[StoredValue], TensorSpec],
    call: str,
) -> Selection:
    """Return what leaves an engine.

    Args:
        tensors: The engine's tensors.
        saved: The names that they have in the model's state dict.
        options: Which tensors leave, and how.
        spec_of: Returns the shape and dtype of a stored tensor.
        call: The public call, for messages.

    Raises:
        ZeroEngineError: A pattern matches nothing, or the adapters cannot be merged.
        CheckpointError: Tensors do not go together.
    """
    stored = _stored_values(tensors, saved)
    trainable = {slot.name for unit in tensors.units if unit.trainable for slot in unit.layout.slots}

    def own_names(source: Source) -> set[str]:
        return {value.own_name for value in values_of(source, stored)}

    def specs(named: Mapping[str, Source]) -> dict[str, TensorSpec]:
        return {n: s.group.targets[s.target] if isinstance(s, Converted) else spec_of(s) for n, s in named.items()}

    others = {
        name: source.value
        for name, source in stored.items()
        if isinstance(source, LocalValue) and not isinstance(source.value, torch.Tensor)
    }
    named: dict[str, Source] = {name: source for name, source in stored.items() if name not in others}
    if options.merge is not None:
        named = _apply(plan_for_merge(tensors.module, specs(named)), named)
    if not options.buffers:
        named = {name: source for name, source in named.items() if not isinstance(source, LocalValue)}
    # What a hook computed under the name of a parameter counts as that parameter.
    candidates = {name: bool(trainable & own_names(source)) for name, source in named.items()}
    candidates |= {name: name in trainable for name in others}
    chosen = choose_names(candidates, options.names, trainable_only=options.trainable_only, call=call)
    first_names: dict[Source, str] = {}
    tied: dict[str, str] = {}
    for name, source in named.items():
        if name in chosen and (first := first_names.setdefault(source, name)) != name:
            tied[name] = first
    named = {name: source for source, name in first_names.items()}
    if options.as_files:
        stored |= {name: source for name, source in named.items() if not isinstance(source, Converted)}
        base = getattr(tensors.module, "get_base_model", lambda: tensors.module)
        plan = plan_for_files(base() if options.merge else tensors.module, specs(named))
        merged = {name for name, source in named.items() if isinstance(source, Converted)}
        if inner := merged & {name for group in plan.groups for name in group.sources}:
            raise ZeroEngineError(f"{call}: no adapter is merged into {min(inner)}, which files hold in another layout")
        new_names = {old: new for new, old in plan.old_names.items()}
        tied = {plan.rename(name): new_names[first] for name, first in tied.items() if first in new_names}
        named = _apply(plan, named)
    exact = tensors.exact_names()
    outgoing = []
    for name, spec in specs(named).items():
        is_exact = not isinstance(source := named[name], Converted) and source.own_name in exact
        outgoing.append(OutgoingTensor(name, spec if is_exact else cast_spec(spec, options.dtype), source))
    places = {slot.name: number for number, slot in enumerate(s for unit in tensors.units for s in unit.layout.slots)}
    # Each unit is read once. What is no parameter comes last, and a sort keeps the order of the targets of a group.
    outgoing.sort(key=lambda tensor: min(places.get(name, len(places)) for name in own_names(tensor.source)))
    return Selection(outgoing, tied, {name: value for name, value in others.items() if name in chosen}, stored)


def values_of(source: Source, stored: Mapping[str, StoredValue]) -> list[StoredValue]:
    """Return the stored value that a tensor is, or those that it is computed from.

    Args:
        source: The tensor.
        stored: What conversions take, by name.
    """
    return [stored[name] for name in source.group.sources] if isinstance(source, Converted) else [source]


def _stored_values(tensors: EngineTensors, saved: SavedNames) -> dict[str, StoredValue]:
    """Return where the values of the model's state dict are, by their keys."""
    own: dict[str, StoredValue] = {name: LocalValue(name, value) for name, value in tensors.own_tensors().items()}
    own |= {slot.name: Slot(unit, i) for unit in tensors.units for i, slot in enumerate(unit.layout.slots)}
    stored = {key: own[name] for name, keys in saved.keys.items() for key in keys}
    return stored | {key: LocalValue(key, value) for key, value in saved.computed.items()}


def _apply(plan: ConversionPlan, named: Mapping[str, Source]) -> dict[str, Source]:
    converted = {name: Converted(group, name) for group in plan.groups for name in group.targets}
    converted |= {alias: converted[name] for alias, name in plan.aliases.items()}
    return {new: named[old] for new, old in plan.old_names.items()} | converted
