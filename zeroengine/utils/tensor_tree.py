"""Walk over the tensors in the inputs or outputs of a module: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def leaves_in(tree: Any) -> Iterator[Any]:
    """Yield every object in nested tuples, lists, mappings and dataclasses that is not one of these itself."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves_in(getattr(tree, field.name))
    else:
        yield tree


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses."""
    return (leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to each tensor.

    Containers keep their type. A container in which nothing changes is returned itself, so that a module can still fill
    a list or dict of its caller. The batch sizes of a ``PackedSequence``, which torch needs on the CPU, do not change.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        # Modules may write into their argument, so an unchanged one must be the same object.
        if all(items[key] is value for key, value in tree.items()):
            return tree
        # torch.compile cannot trace copy.copy, so the most common case avoids it.
        if type(tree) is dict:
            return items
        mapped: Any = copy.copy(tree)
        # transformers' ModelOutput forbids `update`.
        for key, value in items.items():
            mapped[key] = value
        return mapped
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        values = map_tensors(function, fields)
        if values is fields:
            return tree
        mapped = copy.copy(tree)
        # `dataclasses.replace` would call the constructor, which may compute fields.
        for name, value in values.items():
            object.__setattr__(mapped, name, value)
        return mapped
    if isinstance(tree, PackedSequence):
        data, batch_sizes, *indices = tree
        parts = [map_tensors(function, data), batch_sizes, *map_tensors(function, indices)]
    elif isinstance(tree, (tuple, list)):
        parts = [map_tensors(function, value) for value in tree]
    else:
        return tree
    if all(new is old for new, old in zip(parts, tree, strict=True)):
        return tree
    # The constructor of a named tuple takes its fields, that of other sequences takes one iterable.
    return type(tree)(*parts) if isinstance(tree, tuple) and hasattr(tree, "_fields") else type(tree)(parts)
