"""The key paths that a configuration may have, and the nearest of them to an unknown one."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeroengine.config import deepspeed_keys
from zeroengine.config.fields import CheckedBy
from zeroengine.config.model import Config
from zeroengine.config.source import KeyPath

# Names from other libraries, and the key that does the same here.
SYNONYMS = {
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
    "zero_stage": "zero_optimization.stage",
    "timeout": "comm.timeout_seconds",
    "precision": "bf16.enabled",
}


@cache
def known_paths() -> tuple[str, ...]:
    """Every key path that may be written: ours, second spellings, and DeepSpeed's others."""
    return tuple(dict.fromkeys([*honoured_paths(), *deepspeed_keys.ALIASES, *deepspeed_keys.TABLE]))


def honoured_paths() -> list[str]:
    """The key paths of our models."""
    return list(_fields(Config, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        yield path
        for inner in checked_models(info):
            yield from _fields(inner, f"{path}.")


def checked_models(info: FieldInfo) -> list[type[BaseModel]]:
    """The models that check a field's value."""
    return [*(item.model for item in info.metadata if isinstance(item, CheckedBy)), *_models(info.annotation)]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for inner in get_args(annotation):
            yield from _models(inner)


def siblings(path: KeyPath, kind: str | None) -> tuple[str, ...] | None:
    """The keys beside one in the section of an optimizer or scheduler whose type is `kind`; None where it is None."""
    if kind is None:
        return None
    return _children(".".join(path[1:-1]), _fields(_types(path[0])[kind], ""))


def types_that_take(path: KeyPath) -> list[str]:
    """The types of optimizer or scheduler that have this key."""
    inside = ".".join(path[1:])
    return [name for name, model in _types(path[0]).items() if inside in _fields(model, "")]


def _types(section: str) -> dict[str, type[BaseModel]]:
    return {model.__name__: model for model in _models(Config.model_fields[section].annotation)}


def nearest(path: KeyPath, siblings: tuple[str, ...] | None = None) -> str | None:
    """The known key path that an unknown one most likely means: beside it, by another name, or in another section."""
    parent, name = ".".join(path[:-1]), path[-1]
    near_by = {sibling: f"{parent}.{sibling}".lstrip(".") for sibling in siblings or _children(parent)}
    if near := close(name, near_by, cutoff=0.75):
        return near_by[near]
    if name in SYNONYMS:
        return SYNONYMS[name]
    elsewhere = _leaves()
    if name in elsewhere:
        return elsewhere[name]
    if near := close(name, near_by):
        return near_by[near]
    near = close(name, elsewhere, cutoff=0.8)
    return elsewhere[near] if near else None


@cache
def _leaves() -> dict[str, str]:
    """The first known path that ends in each name."""
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_paths())}
    return {leaf: known for leaf, known in leaves.items() if leaf not in ("enabled", "type", "params")}


def beside(path: KeyPath, siblings: tuple[str, ...] | None = None) -> list[str]:
    """The keys that could stand in an unknown one's place: ours, or else those of DeepSpeed's block."""
    parent = ".".join(path[:-1])
    names = siblings or _children(parent)
    others = {*deepspeed_keys.TABLE, *deepspeed_keys.ALIASES}
    return [name for name in names if f"{parent}.{name}".lstrip(".") not in others] or list(names)


def close(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names`, whatever the case."""
    by_lower = {known.lower(): known for known in names}
    return next((by_lower[near] for near in get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)), None)


def _children(parent: str, paths: Iterable[str] | None = None) -> tuple[str, ...]:
    if paths is None and (row := deepspeed_keys.TABLE.get(parent)) and row.keys:
        return tuple(row.keys.split())
    return tuple(path.rpartition(".")[2] for path in paths or known_paths() if path.rpartition(".")[0] == parent)
