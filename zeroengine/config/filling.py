"""Fill in the keys that a configuration leaves to a framework: `Config.fill_auto`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zeroengine.config.deepspeed_keys import ALIASES, TABLE
from zeroengine.config.fields import ABSENT, Auto
from zeroengine.config.keys import field_of, known_paths
from zeroengine.config.messages import TYPES, Problem, unknown_keys
from zeroengine.config.optimizers import is_import_path
from zeroengine.config.precision import SPELLINGS
from zeroengine.config.source import ConfigSource, KeyPath, as_json, copy_tree, describe
from zeroengine.errors import ConfigError

# The keys that switch a precision on. At most one of them is true.
PRECISION_KEYS = (("bf16", "enabled"), ("fp16", "enabled"), ("torch_autocast", "enabled"))


def filled_source(
    source: ConfigSource, values: Mapping[str, Any], framework: str, must_match: bool
) -> tuple[ConfigSource, list[Problem]]:
    """Fill in the keys that a file leaves open.

    Args:
        source: The keys as they were written, in their canonical spelling. It stays as it is.
        values: The framework's values by dotted key.
        framework: The framework's name in messages.
        must_match: Whether a value in the file that differs is a problem.

    Returns:
        A copy with the values, and the problems of unknown keys and of values that differ.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"fill_auto takes values by dotted key, such as {{'optimizer.params.lr': 3e-4}}; found {describe(values)}."
        )
    source = copy.deepcopy(source)
    problems: list[Problem] = []
    unknown: list[KeyPath] = []
    for key, value in values.items():
        path = _canonical_path(str(key))
        if not _is_known(path, source.tree):
            unknown.append(path)
        elif value is not None:
            problem = _fill_key(source, path, copy_tree(value, framework), framework, must_match)
            problems += [problem] if problem else []
    # All problems are listed in one error, so that the file is corrected once.
    return source, [*unknown_keys((path, None) for path in unknown), *problems]


def changed_source(source: ConfigSource, loaded: dict[str, Any], present: dict[str, Any]) -> ConfigSource:
    """Return the keys as if the file had the values that `model_copy` has changed since.

    Args:
        source: The keys as they were written, in their canonical spelling. It stays as it is.
        loaded: What `source` was loaded as: `Config.to_dict`.
        present: What the configuration is now.
    """
    source = copy.deepcopy(source)

    def write_changes(path: KeyPath, before: Any, after: Any) -> None:
        if before == after:
            return
        # Parameters of an optimizer may be absent in one of the two. Then all of them are written.
        if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
            for name, value in after.items():
                write_changes((*path, name), before[name], value)
        else:
            source.put(path, after, "from model_copy")

    for name, value in present.items():
        write_changes((name,), loaded[name], value)
    return source


def _canonical_path(key: str) -> KeyPath:
    for written, canonical in ALIASES.items():
        if key == written or key.startswith(f"{written}."):
            key = canonical + key.removeprefix(written)
    return tuple(key.split("."))


def _is_known(path: KeyPath, tree: dict[str, Any]) -> bool:
    # Keys within a block of DeepSpeed are no paths of their own, and an imported class may have any parameters.
    if ".".join(path) in known_paths() or ".".join(path[:-1]) in TABLE:
        return True
    optimizer = tree.get("optimizer")
    return path[:2] == ("optimizer", "params") and isinstance(optimizer, dict) and is_import_path(optimizer.get("type"))


def _fill_key(source: ConfigSource, path: KeyPath, value: Any, framework: str, must_match: bool) -> Problem | None:
    """Write `value` into `source` where the key is left open, or return the problem of a value that differs."""
    section = source.get(path[:-1])
    is_written = isinstance(section, dict) and path[-1] in section
    field = field_of(path, source.tree)
    marker = next((item for item in field.metadata if isinstance(item, Auto)), None) if field else None
    # Keys that no model has are DeepSpeed's, or parameters of an imported class: there only "auto" is left open.
    words = (*marker.words, *marker.kept) if marker else () if field else ("auto",)
    if is_written:
        current = source.get(path)
        is_open = any(current == word for word in words)
    elif path[0] in TYPES and (field is None or source.get(path[:1]) is None):
        # The file names no optimizer or schedule, or one that does not take this key.
        return None
    else:
        current = field.default if field else None
        # "auto" stands for the default, and so does the absence of the key.
        is_open = field is None or (marker is not None and marker.value in (ABSENT, field.default))
        # A file that names no precision leaves it to the framework, although absence means false without one.
        is_open = is_open or (path in PRECISION_KEYS and all(source.get(key) is None for key in PRECISION_KEYS))
    if is_open:
        source.put(path, value, f"from {framework}")
    elif must_match and _plain(current) != _plain(value):
        present = f"found {as_json(current)}" if is_written else f"absent, which means {as_json(current)}"
        choices = [*(['"auto"'] if "auto" in words else []), as_json(value)]
        remedy = f"write {' or '.join(choices)}, or give {framework} {as_json(current)}"
        return Problem(path, f"{present}, and {framework} has {as_json(value)}; {remedy}.")
    return None


def _plain(value: Any) -> Any:
    """Return the value in the one spelling by which values are compared."""
    if isinstance(value, str):
        return SPELLINGS.get(value, value)
    return list(value) if isinstance(value, tuple) else value
