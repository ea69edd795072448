"""Tensors inside whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def leaves_in(tree: Any) -> Iterator[Any]:
    """Whatever is not a tuple, list, mapping or dataclass, in nested ones."""
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
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    return (leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor))


def may_hide_tensors(tree: Any) -> bool:
    """Whether ``tree`` holds an object of a class that nobody here can look into."""
    return any(not isinstance(leaf, (torch.Tensor, type(None), bool, int, float, str)) for leaf in leaves_in(tree))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with each tensor replaced; containers keep their type, other values stay as they are."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is dict:  # torch.compile cannot look into copy.copy
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, MutableMapping):
        mapped: Any = copy.copy(tree)
        for key, value in tree.items():  # not `update`: transformers' ModelOutput forbids it
            mapped[key] = map_tensors(function, value)
        return mapped
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        mapped = copy.copy(tree)
        for field in dataclasses.fields(tree):  # not `replace`: a frozen one may compute its fields
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(tree, field.name)))
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree
