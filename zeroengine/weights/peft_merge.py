"""Merge the adapters of peft into the weights of their base, in copies: the trained values stay as they are.

[Note: Merged by peft itself]
peft merges a layer in place, and then takes its base out of it. So a layer is copied with gathered values in place of
its parameters, and peft does that to the copy. The model's tree with such bases, of copies without values, has the
names of the base model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.boxes import Box
from zeroengine.partition.cut import plain_name
from zeroengine.partition.storages import is_quantized
from zeroengine.utils.torch_internals import CHILDREN, children_of
from zeroengine.weights.conversion import BoxValues, ConversionPlan
from zeroengine.weights.huggingface_format import TensorSpec


@dataclass(eq=False)
class MergedLayers:
    """The parameters of the bases of some layers of peft, with the active adapters merged.

    Attributes:
        layers: The layers. Those whose bases share a parameter come together.
        places: By target, the number of the layer and the name in its base.
        placeholders: What stands for each parameter of the model without values, by its id.
        param_ids: The ids of the sources.
        sources, targets, num_parts: As of `TensorConversion`. The targets have the names of the base model.
    """

    layers: Sequence[Any]
    places: Mapping[str, tuple[int, str]]
    placeholders: dict[int, Any]
    param_ids: list[int]
    sources: list[str]
    targets: dict[str, TensorSpec]
    num_parts: int = 1

    @property
    def settings(self) -> str:
        """As of `TensorConversion`: which adapters are merged, and by which factors."""
        names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
        modules = [module for layer in self.layers for module in layer.modules()]
        return repr([getattr(module, name, None) for module in modules for name in names])

    def boxes(self, part: int) -> list[tuple[str, Box]]:
        """Return all parameters of the layers."""
        params = [self.placeholders[param_id] for param_id in self.param_ids]
        return [(key, Box.whole(param.shape)) for key, param in zip(self.sources, params, strict=True)]

    def parts_of(self, target: str, box: Box) -> range:
        """Return the only part."""
        return range(1)

    def convert(self, part: int, values: Iterable[torch.Tensor]) -> dict[str, BoxValues]:
        """Return the merged tensors. The values of the base are overwritten."""
        params = {i: nn.Parameter(value, False) for i, value in zip(self.param_ids, values, strict=True)}
        bases = _bases_of_copies(self.layers, self.placeholders | params, merge=True)
        merged = {target: bases[number].get_parameter(name).detach() for target, (number, name) in self.places.items()}
        return {target: (Box.whole(value.shape), value) for target, value in merged.items()}


def plan_for_merge(module: nn.Module, specs: Mapping[str, TensorSpec]) -> ConversionPlan:
    """Return how the tensors of a peft model become those of its base, with the active adapters merged.

    Args:
        module: The model.
        specs: The shapes and dtypes of its tensors.

    Raises:
        ZeroEngineError: The model has no adapters, or adapters that cannot be merged.
    """
    layers = _outermost_layers(module)
    ids = {key: id(tensor) for name, tensor in _named_tensors(module) if (key := plain_name(name)) in specs}
    keys = {tensor_id: key for key, tensor_id in reversed(ids.items())}
    placeholders: dict[int, Any] = {}
    for param in module.parameters():
        spec = specs.get(keys.get(id(param), ""), TensorSpec(tuple(param.shape), param.dtype))
        placeholders[id(param)] = nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), False)
    old_ids = {id(placeholder): param_id for param_id, placeholder in placeholders.items()}
    bases = _bases_of_copies(layers, placeholders | {id(buffer): buffer for buffer in module.buffers()}, merge=False)

    def old_id(tensor: torch.Tensor) -> int:
        return old_ids.get(id(tensor), id(tensor))

    # By layer, what is merged: parameters of its base, and their names there.
    merged = [
        {old_id(param): name for name, param in base.named_parameters()} if _is_merged(layer) else {}
        for layer, base in zip(layers, bases, strict=True)
    ]
    # Layers whose bases have one weight, by its id: each merge changes what the others see.
    groups_of: dict[int, list[int]] = {}
    for number, names in enumerate(merged):
        for param_id in list(names)[:1]:
            groups_of.setdefault(param_id, []).append(number)
    merged_ids = {param_id for names in merged for param_id in names}
    # What no module registers has no other name.
    old_names = {key: key for key in specs if key not in ids}
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    base_of_layer = {id(layer): base for layer, base in zip(layers, bases, strict=True)}
    for name, tensor in _named_tensors(_without_adapters(module, base_of_layer)):
        new, tensor_id = plain_name(name), old_id(tensor)
        if tensor_id in merged_ids:
            if (first := first_names.setdefault(tensor_id, new)) != new:
                aliases[new] = first
        elif tensor_id in keys:
            old_names[new] = keys[tensor_id]
    groups = []
    for group in groups_of.values():
        places = {first_names[i]: (n, name) for n, member in enumerate(group) for i, name in merged[member].items()}
        params = {new: bases[group[n]].get_parameter(name) for new, (n, name) in places.items()}
        targets = {new: TensorSpec(tuple(param.shape), param.dtype) for new, param in params.items()}
        members = [layers[n] for n in group]
        param_ids = list({id(param): None for layer in members for param in layer.parameters()})
        sources = [keys[param_id] for param_id in param_ids]
        groups.append(MergedLayers(members, places, placeholders, param_ids, sources, targets))
    return ConversionPlan(old_names, groups, lambda name: name, aliases)


def _outermost_layers(module: nn.Module) -> list[Any]:
    """Return the modules that peft has put in place of others.

    Raises:
        ZeroEngineError: There are none, or peft does not merge them, or their base is quantized.
    """
    layers: list[Any] = []
    inside = None
    # Who has a peft model has imported peft, which takes seconds and is not imported for others.
    if (peft := sys.modules.get("peft")) is not None:
        tuners = peft.tuners.tuners_utils
        for name, inner in module.named_modules():
            if isinstance(inner, tuners.BaseTuner):
                inner._check_merge_allowed()
            # What a module contains comes directly after it.
            is_layer = isinstance(inner, (tuners.BaseTunerLayer, tuners.AuxiliaryTrainingWrapper))
            if is_layer and (inside is None or not name.startswith(inside)):
                inside = f"{name}."
                layers.append(inner)
                if _is_merged(inner) and any(map(is_quantized, inner.parameters())):
                    raise ZeroEngineError(
                        f'merge="peft" of {name}, whose base is quantized: merge into a base that is not, or take the '
                        'adapter alone, such as names="*lora_*"'
                    )
    if not layers:
        raise ZeroEngineError('merge="peft" of a model without adapters of peft: leave merge out')
    return layers


def _is_merged(layer: Any) -> bool:
    """Return whether a layer changes values of its base. One of `modules_to_save` only takes the place of another."""
    copies = getattr(layer, "modules_to_save", None)
    return copies is None or any(hasattr(copies[name], "base_layer") for name in layer.active_adapters[:1])


def _bases_of_copies(layers: Sequence[Any], tensors: dict[int, Any], *, merge: bool) -> list[nn.Module]:
    """Return the bases of copies of some layers, as `merge_and_unload` of peft does.

    Args:
        layers: The layers.
        tensors: What takes the place of a tensor in the copies, by its id.
        merge: Whether the active adapters are merged.
    """
    bases: list[nn.Module] = []
    with torch.no_grad():
        # A copy takes what stands in the dict for an object.
        for layer in copy.deepcopy(layers, dict(tensors)):
            unload = getattr(layer, "unload_and_optionally_merge_module", None)
            if unload is None and merge:
                layer.merge()
            arguments = {"merge": merge, "safe_merge": False, "adapter_names": None}
            bases.append(layer.get_base_layer() if unload is None else unload(**arguments))
    return bases


def _without_adapters(module: Any, bases: Mapping[int, nn.Module]) -> nn.Module:
    """Return the tree of a model with the bases of its peft layers in their place. It shares all tensors."""
    peft = sys.modules["peft"]
    while isinstance(module, (peft.PeftModel, peft.tuners.tuners_utils.BaseTuner)):
        module = module.base_model if isinstance(module, peft.PeftModel) else module.model
    if id(module) in bases:
        return bases[id(module)]
    tree: nn.Module = copy.copy(module)
    children = children_of(module).items()
    copies = {name: child if child is None else _without_adapters(child, bases) for name, child in children}
    setattr(tree, CHILDREN, copies)
    return tree


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module under all their names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
