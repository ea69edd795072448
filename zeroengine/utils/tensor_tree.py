"""Walk over the tensors inside whatever a module takes or returns: tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def leaves_in(tree: Any) -> Iterator[Any]:
    """Yield every object in nested tuples, lists, mappings and dataclasses that is none of these itself."""
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

    Containers keep their type. A container in which nothing changes is returned itself, so that a module may still fill
    a list or dict of its caller's. The batch sizes of a ``PackedSequence``, which torch wants on the CPU, are left
    alone.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        # Returning the same object keeps its identity for modules that write into their argument.
        if all(items[key] is value for key, value in tree.items()):
            return tree
        # torch.compile cannot look into copy.copy, so the most common case goes without.
        if type(tree) is dict:
            return items
        mapped: Any = copy.copy(tree)
        # `update` is not used, since transformers' ModelOutput forbids it.
        for key, value in items.items():
            mapped[key] = value
        return mapped
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        values = map_tensors(function, fields)
        if values is fields:
            return tree
        mapped = copy.copy(tree)
        # `dataclasses.replace` is not used: a frozen dataclass may compute its fields when it is made.
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
    # A named tuple takes its fields one by one, and other sequences take one iterable.
    return type(tree)(*parts) if isinstance(tree, tuple) and hasattr(tree, "_fields") else type(tree)(parts)
