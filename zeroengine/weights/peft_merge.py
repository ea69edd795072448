"""Merge the adapters of peft into the weights of their base, in copies: the trained values stay as they are."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.boxes import Box
from zeroengine.partition.cut import plain_name
from zeroengine.weights.conversion import BoxValues, ConversionPlan
from zeroengine.weights.huggingface_format import TensorSpec

# What peft adds to the names of the base model's tensors.
ADDED = re.compile(r"^base_model\.model\.|\.(base_layer|token_adapter|modules_to_save\.[^.]+)(?=\.)")


class MergedLayer:
    """The parameters of the base of a peft layer, with the active adapters merged by peft's own code.

    Args:
        layer: The layer of peft, such as one of LoRA. It may wrap another one.
        name: Its name in the model.
        specs: The shapes and dtypes of its tensors, by their names in the model.

    Attributes:
        sources, targets, num_parts: As of `TensorConversion`. The targets have the names of the base model.
    """

    num_parts = 1

    def __init__(self, layer: Any, name: str, specs: Mapping[str, TensorSpec]) -> None:
        self._layer, self._name, self._specs, self.sources = layer, name, specs, list(specs)
        base = {key: key.rpartition(".base_layer.")[2] for key in specs if ".base_layer." in key}
        self.targets = {base_name(key): specs[key] for key in base}
        # By target, the name of the tensor within the base layer.
        self._inner = {base_name(key): inner for key, inner in base.items()}

    def boxes(self, part: int) -> list[tuple[str, Box]]:
        """Return all tensors of the layer."""
        return [(key, Box.whole(spec.shape)) for key, spec in self._specs.items()]

    def parts_of(self, target: str, box: Box) -> range:
        """Return the only part."""
        return range(1)

    def convert(self, part: int, values: Iterable[torch.Tensor]) -> dict[str, BoxValues]:
        """Return the merged tensors. The values of the base are overwritten."""
        value_of = dict(zip(self.sources, values, strict=True))
        # The layer is copied with these values in place of its parameters: a copy takes what stands here for an object.
        copies: dict[int, Any] = {}
        for key, param in self._layer.named_parameters(remove_duplicate=False):
            if (value := value_of.get(f"{self._name}.{plain_name(key)}")) is not None:
                copies[id(param)] = nn.Parameter(value, requires_grad=False)
        layer = copy.deepcopy(self._layer, copies)
        with torch.no_grad():
            # The adapters of an inner layer come first, as in a forward.
            for inner in reversed([module for module in layer.modules() if hasattr(module, "merge")]):
                inner.merge()
        merged = layer.get_base_layer().state_dict()
        return {name: (Box.whole(merged[inner].shape), merged[inner]) for name, inner in self._inner.items()}


def base_name(key: str) -> str:
    """Return the name that a tensor of a peft model has in the base model."""
    return ADDED.sub("", key)


def plan_for_merge(module: nn.Module, specs: Mapping[str, TensorSpec]) -> ConversionPlan:
    """Return how the tensors of a peft model become those of its base, with the active adapters merged.

    Args:
        module: The model.
        specs: The shapes and dtypes of its tensors.

    Raises:
        ZeroEngineError: The model has no layers of peft.
    """
    layers: dict[str, Any] = {}
    copied: dict[str, str] = {}
    # Who has a peft model has imported peft, which takes seconds and is not imported for others.
    if (peft := sys.modules.get("peft")) is not None:
        for path, inner in module.named_modules():
            name = plain_name(path)
            if isinstance(inner, peft.tuners.tuners_utils.BaseTunerLayer) and _owner(name, layers) is None:
                layers[name] = inner
            elif isinstance(inner, peft.utils.ModulesToSaveWrapper):
                copied[name] = f"{name}.modules_to_save.{inner.active_adapters[0]}."
    if not layers and not copied:
        raise ZeroEngineError('merge="peft" of a model without adapters of peft: leave merge out')
    old_names: dict[str, str] = {}
    specs_of: dict[str, dict[str, TensorSpec]] = {name: {} for name in layers}
    for key, spec in specs.items():
        if (layer := _owner(key, layers)) is not None:
            specs_of[layer][key] = spec
        elif (wrapper := _owner(key, copied)) is None or key.startswith(copied[wrapper]):
            old_names[base_name(key)] = key
    groups = [MergedLayer(layer, name, specs_of[name]) for name, layer in layers.items() if specs_of[name]]
    return ConversionPlan(old_names, groups, base_name)


def _owner(key: str, modules: Container[str]) -> str | None:
    """Return the outermost of some modules, by their names, that holds a tensor or module; None if none does."""
    parts = key.split(".")
    return next((name for n in range(1, len(parts)) if (name := ".".join(parts[:n])) in modules), None)
