"""The key paths that a configuration may have, and the known path nearest to an unknown one."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeroengine.config import deepspeed_keys
from zeroengine.config.fields import CheckedBy
from zeroengine.config.model import Config
from zeroengine.config.optimizers import IMPORTED_TAG
from zeroengine.config.source import KeyPath

# Names from other libraries, and the keys that do the same here.
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
    """Return every key path that may be written: the models', second spellings, and DeepSpeed's other keys."""
    # dict.fromkeys drops duplicates and keeps the order, so suggestions do not depend on hashing.
    return tuple(dict.fromkeys([*honored_paths(), *deepspeed_keys.ALIASES, *deepspeed_keys.TABLE]))


def honored_paths() -> list[str]:
    """Return the key paths of the models."""
    return list(_fields(Config, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        yield path
        for inner in checked_models(info):
            yield from _fields(inner, f"{path}.")


def checked_models(info: FieldInfo) -> list[type[BaseModel]]:
    """Return the models that check a field's value."""
    # The models of optional and of union fields hide inside the annotation.
    return [*(item.model for item in info.metadata if isinstance(item, CheckedBy)), *_models(info.annotation)]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for inner in get_args(annotation):
            yield from _models(inner)


def siblings(path: KeyPath) -> tuple[str, ...]:
    """Return the keys that may stand beside a key."""
    # The entries of a list have the same keys, whatever their number.
    parent = ".".join(part for part in path[:-1] if not part.isdigit())
    return _names_in(parent, known_paths())


def siblings_by_type(path: KeyPath) -> dict[str, tuple[str, ...]]:
    """Return the keys that may stand beside a key of an optimizer's or scheduler's section, by the section's type."""
    return {kind: _names_in(".".join(path[1:-1]), _fields(model, "")) for kind, model in _types(path[0]).items()}


def _names_in(parent: str, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for above, _, name in (path.rpartition(".") for path in paths) if above == parent)


def _types(section: str) -> dict[str, type[BaseModel]]:
    """Return the models of the section, by type."""
    models = _models(Config.model_fields[section].annotation)
    return {(get_args(model.model_fields["type"].annotation) or (IMPORTED_TAG,))[0]: model for model in models}


def field_of(path: KeyPath, tree: Mapping[str, Any]) -> FieldInfo | None:
    """Return the field of the models that holds a key, or None if no model in use has it.

    Args:
        path: The key's path.
        tree: The configuration, whose `type` values choose among the models of a section.
    """
    model: type[BaseModel] = Config
    info = None
    for name in path:
        info = next((info for field, info in model.model_fields.items() if name == (info.alias or field)), None)
        if info is None:
            return None
        models = checked_models(info)
        if name in ("optimizer", "scheduler"):
            section = tree.get(name)
            kind = section.get("type") if isinstance(section, Mapping) else None
            models = [known for known_kind, known in _types(name).items() if known_kind == kind]
        # A value that is no section has no keys below it.
        model = models[0] if models else BaseModel
    return info


def nearest(path: KeyPath, siblings: Sequence[str]) -> str | None:
    """Return the known key path that an unknown one most likely means: a sibling, a synonym, or one elsewhere."""
    parent, name = ".".join(path[:-1]), path[-1]
    beside = {sibling: f"{parent}.{sibling}".lstrip(".") for sibling in siblings}
    # A very similar sibling is a spelling mistake, which is more likely than a name of another library.
    if near := most_similar(name, beside, cutoff=0.75):
        return beside[near]
    if name in SYNONYMS:
        return SYNONYMS[name]
    # The right key in the wrong place is another common mistake.
    elsewhere = _leaves()
    if name in elsewhere:
        return elsewhere[name]
    # Less similar siblings come after exact matches elsewhere, or they would hide these.
    if near := most_similar(name, beside):
        return beside[near]
    near = most_similar(name, elsewhere, cutoff=0.8)
    return elsewhere[near] if near else None


@cache
def _leaves() -> dict[str, str]:
    """Return the first known path that ends in each name."""
    # The paths are reversed, so that of several paths with one name the first one remains.
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_paths())}
    return {leaf: known for leaf, known in leaves.items() if leaf not in ("enabled", "type", "params")}


def alternatives(path: KeyPath, siblings: Sequence[str]) -> list[str]:
    """Return the keys that could replace an unknown one: honored keys, or else those of DeepSpeed's block."""
    parent = ".".join(path[:-1])
    others = {*deepspeed_keys.TABLE, *deepspeed_keys.ALIASES}
    # Keys that have no effect are no help to somebody who wants an effect.
    return [name for name in siblings if f"{parent}.{name}".lstrip(".") not in others] or list(siblings)


def most_similar(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of `names`, ignoring case, or None if the similarity of all is below `cutoff`."""
    by_lower = {known.lower(): known for known in names}
    return next((by_lower[near] for near in get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)), None)
