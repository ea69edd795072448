"""Where a configuration comes from: a JSON or YAML file, or a dict, and overrides on top.

Everything ends as a `Source`: a plain tree, and for every key path the place where it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass
class Source:
    """A tree of values, and where each key was written ("line 4", "override a.b=1")."""

    name: str
    tree: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    spelling: dict[KeyPath, KeyPath] = field(default_factory=dict)  # canonical path: as the user wrote it

    def label(self, path: KeyPath) -> str:
        """The path as the user wrote it, and its place."""
        written = ".".join(self.spelling.get(path, path)) or "the whole configuration"
        place = next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), None)
        return f"{written} ({place})" if place else written

    def get(self, path: Iterable[str], default: Any = None) -> Any:
        node: Any = self.tree
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node


def read_file(path: Path) -> Source:
    """Read a JSON or YAML file; raise ConfigError with line and column where it is malformed."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked for {path.absolute()}). Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory. Give a JSON or YAML file in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise ConfigError(f'{path}: the file is empty. Write at least {{"zero_optimization": {{"stage": 1}}}}.')
    is_yaml = path.suffix in (".yaml", ".yml") or (path.suffix != ".json" and not text.lstrip().startswith("{"))
    tree, lines = _parse_yaml(text, str(path)) if is_yaml else _parse_json(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level is {describe(tree)}; write an object, {{...}}, of keys and values.")
    return Source(str(path), tree, {key: f"line {line}" for key, line in lines.items()})


def read_dict(tree: Mapping[str, Any], name: str = "the config dict") -> Source:
    """Take a copy, so that the caller's dict is never changed."""
    return Source(name, _copy(tree))


def override(source: Source, text: str) -> None:
    """Set one "a.b=value"; the value is JSON where it parses, else a string."""
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {text!r}: write KEY=VALUE, such as zero_optimization.stage=3.")
    node = source.tree
    for depth, part in enumerate(path[:-1], start=1):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            here = ".".join(path[:depth])
            raise ConfigError(f"override {text!r}: {here} is {describe(node)}, so nothing can be set below it.")
    try:
        node[path[-1]] = json.loads(raw)
    except json.JSONDecodeError:
        node[path[-1]] = raw
    for below in [known for known in source.places if known[: len(path)] == path]:
        del source.places[below]
    source.places[path] = f"override {text}"


def describe(value: Any) -> str:
    """A value as an error shows it: what it is, and of which kind."""
    kinds = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list", tuple: "a list"}
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    shown = json.dumps(value, default=repr)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _syntax_error(name: str, text: str, line: int, column: int, what: str, hint: str = "") -> ConfigError:
    """`line` and `column` count from 1."""
    rows = text.splitlines() or [""]
    row = rows[line - 1] if line <= len(rows) else ""
    pointer = "".join("\t" if char == "\t" else " " for char in row[: column - 1]) + "^"
    return ConfigError(f"{name}: line {line}, column {column}: {what}.{hint}\n    {row}\n    {pointer}")


def _parse_json(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        hint = _json_hint(text, error.pos)
        raise _syntax_error(name, text, error.lineno, error.colno, error.msg, hint) from None
    except RecursionError:
        raise ConfigError(f"{name}: objects are nested too deeply.") from None
    return tree, _json_lines(text, name)


def _json_hint(text: str, position: int) -> str:
    before, rest = text[:position].rstrip(), text[position:].lstrip()
    if rest.startswith(("//", "#", "/*")):
        return " JSON has no comments; remove it, or write the file as YAML."
    if rest.startswith("'"):
        return " JSON strings stand in double quotes."
    if before.endswith(",") and rest[:1] in ("}", "]", ""):
        return " Remove the comma before it."
    if rest.startswith('"') and before[-1:] not in ("{", "[", ",", ":"):
        return " A comma is missing before it."
    if re.match(r"(True|False|None)\b", rest):
        return " JSON writes true, false and null."
    return " A brace or bracket is not closed." if not rest else ""


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def _json_lines(text: str, name: str) -> dict[KeyPath, int]:
    """The line of every key of a valid JSON text. A key that an object has twice is an error."""
    lines: dict[KeyPath, int] = {}
    path: list[str] = []  # the open objects' and lists' keys; a list's key is ""
    kinds: list[str] = []  # their opening marks
    key, expects_key = "", False
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in "{[":
            if kinds:
                path.append(key if kinds[-1] == "{" else "")
            kinds.append(mark)
            expects_key = mark == "{"
        elif mark in "}]":
            kinds.pop()
            if path:
                path.pop()
            expects_key = False
        elif mark == ",":
            expects_key = kinds[-1] == "{"
        elif expects_key:
            key, expects_key = json.loads(mark), False
            where = (*path, key)
            start = token.start()
            line = text.count("\n", 0, start) + 1
            if where in lines and "" not in path:
                column = start - text.rfind("\n", 0, start)
                what = f"{'.'.join(where)} is written twice, first on line {lines[where]}"
                raise _syntax_error(name, text, line, column, what, " Keep one.")
            lines[where] = line
    return lines


def _parse_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{name}: YAML needs PyYAML: pip install pyyaml. Or write the file as JSON.") from None

    class Loader(yaml.SafeLoader):
        """YAML 1.1 as PyYAML reads it, but 1e-4 and 5e8 are numbers, as in JSON."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+0123456789.")
    )
    lines: dict[KeyPath, int] = {}

    def walk(node: Any, path: KeyPath) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            mark, where = key.start_mark, (*path, str(key.value))
            if where in lines:
                what = f"{'.'.join(where)} is written twice, first on line {lines[where]}"
                raise _syntax_error(name, text, mark.line + 1, mark.column + 1, what, " Keep one.")
            lines[where] = mark.line + 1
            walk(value, where)

    loader = Loader(text)
    try:
        root = loader.get_single_node()
        walk(root, ())
        return (loader.construct_document(root) if root is not None else None), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = (error.problem or error.context or "malformed YAML").capitalize()
        if mark is None:
            raise ConfigError(f"{name}: {what}.") from None
        hint = " YAML is indented with spaces." if "'\\t'" in what else ""
        raise _syntax_error(name, text, mark.line + 1, mark.column + 1, what, hint) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name}: {error or 'nested too deeply'}.") from None
    finally:
        loader.dispose()
