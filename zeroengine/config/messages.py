"""Turn errors of the models into messages for people: the key path, the value that was found, and what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pydantic import ValidationError

from zeroengine.config import keys
from zeroengine.config.optimizers import OPTIMIZER_TYPES, UNAVAILABLE_TYPES
from zeroengine.config.schedulers import NEEDED_PARAMS, SCHEDULER_TYPES
from zeroengine.config.source import KeyPath, describe

TYPES = {"optimizer": OPTIMIZER_TYPES, "scheduler": SCHEDULER_TYPES}
# pydantic speaks of values in Python.
_IN_JSON = {"tuple": "list", "a valid boolean": "true or false", "'": '"'}
# The types of values in Python that pydantic's errors ask for.
_WANTED = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}

# The number of unknown keys for which the nearest known key is searched, and the length of the longest such key.
# Both bound the time that a hostile file takes.
MAX_SUGGESTIONS = 20
MAX_KEY_LENGTH = 80


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: The key path.
        text: What is wrong and what to write, as the rest of a sentence that begins with the path.
    """

    path: KeyPath
    text: str


def unknown_key(path: KeyPath, kind: str | None = None) -> Problem:
    """Return the problem of an unknown key, with the nearest known key.

    Args:
        path: The key's path.
        kind: The type of the optimizer or scheduler whose section the key is in, if it is known.
    """
    # Suggestions depend on the type: a parameter of SGD is unknown to Adam.
    by_type = {} if kind is None else keys.siblings_by_type(path)
    siblings = keys.siblings(path) if kind is None else by_type[kind]
    # Comparing a very long key with every known one takes too long, and no such key is a spelling mistake.
    is_long = len(path[-1]) > MAX_KEY_LENGTH
    if kind is not None and not is_long:
        # Of a parameter that another type takes, a similar one of this type would be a wrong suggestion.
        meant = keys.most_similar(path[-1], chain(siblings, *by_type.values()), cutoff=0.75)
        if meant is not None and meant not in siblings:
            others = [other for other, names in by_type.items() if meant in names]
            misspelt = "" if meant == path[-1] else f"unknown key. If {meant} is meant: "
            verb, known = "does" if len(others) == 1 else "do", ", ".join(siblings)
            return Problem(
                path, f"{misspelt}{kind} does not take it; {' and '.join(others)} {verb}. {kind} takes {known}."
            )
    if not is_long and (near := keys.nearest(path, siblings)):
        return Problem(path, f"unknown key. Did you mean {near}?")
    where = f"In {'.'.join(path[:-1])}" if len(path) > 1 else "At the top level"
    return Problem(path, f"unknown key. {where} there are {', '.join(keys.alternatives(path, siblings))}.")


def unknown_keys(paths: Iterable[tuple[KeyPath, str | None]]) -> list[Problem]:
    """Return the problems of unknown keys, from the arguments of `unknown_key`.

    Only the first `MAX_SUGGESTIONS` of them name the nearest known key.
    """
    return [
        unknown_key(path, kind) if index < MAX_SUGGESTIONS else Problem(path, "unknown key.")
        for index, (path, kind) in enumerate(paths)
    ]


def explain(error: ValidationError, tree: dict[str, Any]) -> list[Problem]:
    """Return one problem for each error that pydantic found in `tree`."""
    unknown: list[tuple[KeyPath, str | None]] = []
    problems = []
    for item in error.errors(include_url=False):
        location = item["loc"]
        path, value = _locate(location, tree)
        if item["type"] == "extra_forbidden":
            # The location of a key in an optimizer's or scheduler's section is (section, type, ..., key).
            has_type = len(location) >= 3 and location[0] in TYPES
            unknown.append((path, str(location[1]) if has_type else None))
        else:
            problems.append(_problem(item, path, value))
    # A union reports one mistake for each of its members, so equal problems are dropped.
    return list(dict.fromkeys([*unknown_keys(unknown), *problems]))


def _locate(location: tuple[int | str, ...], tree: Any) -> tuple[KeyPath, Any]:
    """Return the key path and the value at a pydantic location, which also names members of unions."""
    path: list[str] = []
    node = tree
    for depth, part in enumerate(location):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, (list, tuple)) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif depth == len(location) - 1 and (isinstance(node, dict) or isinstance(part, int)):
            # The location ends in a missing key, or in the missing item of a pair.
            node = None
        else:
            # This part is the name of a union's member, which is no key.
            continue
        path.append(str(part))
    return tuple(path), node


def _problem(item: Any, path: KeyPath, value: Any) -> Problem:
    kind = item["type"]
    if kind == "invalid_key":
        return Problem(path, "keys are strings; put it in double quotes.")
    if kind == "missing":
        return Problem(path, f"missing; write {NEEDED_PARAMS.get(path[-1], 'a value')}.")
    if kind in ("union_tag_not_found", "union_tag_invalid") and isinstance(value, dict):
        # A misspelt "type" key makes the whole section unknown, so the message names the key and not the section.
        typo = None if "type" in value else keys.most_similar("type", [str(k) for k in value if k != "params"])
        if typo is not None:
            return Problem((*path, typo), f"unknown key. Did you mean {path[-1]}.type?")
        return Problem((*path, "type"), _unknown_type(path[-1], value.get("type")))
    if kind == "value_error":
        return Problem(path, f"{item['ctx']['error']}.")
    return Problem(path, f"found {describe(value)}; {_remedy(item, path, value)}.")


def _unknown_type(section: str, value: Any) -> str:
    names = TYPES[section]
    choices = f"one of {', '.join(names)}"
    if value is None:
        return f"missing; write {choices}."
    if section == "optimizer":
        choices += ", the import path of a class such as torch.optim.RAdam,"
    remedy = f"or pass your own to initialize({'optimizer' if section == 'optimizer' else 'lr_scheduler'}=...)"
    reason = next((why for name, why in UNAVAILABLE_TYPES.items() if name.lower() == str(value).lower()), None)
    # A type that exists in DeepSpeed is no spelling mistake, so no other name is suggested.
    nearest = keys.most_similar(str(value), names) if reason is None else None
    hint = f" It is not available: {reason}." if reason else f" Did you mean {nearest}?" if nearest else ""
    return f"found {describe(value)}; write {choices} {remedy}.{hint}"


def _remedy(item: Any, path: KeyPath, value: Any) -> str:
    kind = item["type"]
    if path == ("zero_optimization", "stage"):
        return 'write 0, 1, 2, 3 or "auto"'
    # A common mistake is to write the main value in the place of its section, such as "optimizer": "Adam".
    if kind in ("model_type", "dict_type", "model_attributes_type", "union_tag_not_found"):
        key = "type" if path[-1] in TYPES else "enabled"
        fits = isinstance(value, str if key == "type" else bool)
        return "write an object, {...}" + (f", such as {json.dumps({key: value})}" if fits else "")
    text = re.sub(r"^\w+ should", "it should", item["msg"])
    for in_python, in_json in _IN_JSON.items():
        text = text.replace(in_python, in_json)
    return f"{text}, without quotes" if isinstance(value, str) and _is_quoted(value, _WANTED.get(kind, ())) else text


def _is_quoted(text: str, types: tuple[type, ...]) -> bool:
    """Tell whether the text would be a value of one of the types if it stood without its quotes."""
    try:
        return type(json.loads(text)) in types
    except (ValueError, RecursionError):
        return False
