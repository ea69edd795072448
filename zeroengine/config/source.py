"""Where a configuration comes from: a JSON or YAML file, or a dict, and overrides on top.

Everything ends as a `Source`: a plain tree of bounded size, and for every key path the place where it was written.

A file may say in a few bytes what takes for ever to read (YAML's aliases), and a dict may hold anything. So each reader
counts what it reads, and whatever else goes wrong in a parser is a ConfigError, too.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ConfigError

KeyPath = tuple[str, ...]

MAX_FILE_BYTES = 1 << 20
MAX_VALUES = 10_000  # keys and items of lists in a whole configuration
MAX_DEPTH = 32  # objects and lists within one another
MAX_SHOWN = 60  # characters of a value in a message


@dataclass
class Source:
    """A tree of values, and where each key was written ("line 4", "override a.b=1")."""

    name: str
    tree: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    spelling: dict[KeyPath, KeyPath] = field(default_factory=dict)  # canonical path: as the user wrote it

    def label(self, path: KeyPath) -> str:
        """The path as the user wrote it, and its place."""
        written = printable(".".join(self.spelling.get(path, path)), 2 * MAX_SHOWN) or "the whole configuration"
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
        mode = path.stat().st_mode
        data = path.read_bytes() if stat.S_ISDIR(mode) else _first_bytes(path, mode)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked for {path.absolute()}). Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory. Give a JSON or YAML file in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except ConfigError:
        raise
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{printable(str(path))}: this is no path of a file ({error}).") from None
    if not text.strip():
        raise ConfigError(f'{path}: the file is empty. Write at least {{"zero_optimization": {{"stage": 1}}}}.')
    is_yaml = path.suffix in (".yaml", ".yml") or (path.suffix != ".json" and not text.lstrip().startswith("{"))
    tree, lines = _parse_yaml(text, str(path)) if is_yaml else _parse_json(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level is {describe(tree)}; write an object, {{...}}, of keys and values.")
    return Source(str(path), _copy(tree, str(path)), {key: f"line {line}" for key, line in lines.items()})


def _first_bytes(path: Path, mode: int) -> bytes:
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: this is a device or a pipe. Give a JSON or YAML file.")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes, so it is no configuration. Check the path.")
    return data


def read_dict(tree: Mapping[str, Any], name: str = "the config dict") -> Source:
    """Take a copy, so that the caller's dict is never changed."""
    return Source(name, _copy(tree, name))


def override(source: Source, text: str) -> None:
    """Set one "a.b=value"; the value is JSON where it parses, else a string."""
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(f"override {printable(text)!r}: write KEY=VALUE, such as zero_optimization.stage=3.")
    node = source.tree
    for depth, part in enumerate(path[:-1], start=1):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            here = ".".join(path[:depth])
            raise ConfigError(
                f"override {printable(text)!r}: {here} is {describe(node)}, so nothing can be set below it."
            )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = raw
    node[path[-1]] = _copy(value, f"override {printable(text)!r}")
    for below in [known for known in source.places if known[: len(path)] == path]:
        del source.places[below]
    source.places[path] = f"override {printable(text)}"


def describe(value: Any) -> str:
    """A value as an error shows it: what it is, and of which kind."""
    kinds = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list", tuple: "a list"}
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    kind = kinds.get(type(value), type(value).__name__)
    shown = as_json(value)
    return f"{shown} ({kind})" if shown else kind


def as_json(value: Any) -> str:
    """The value as JSON, shortened; "" where it has none, such as an integer of 5,000 digits."""
    try:
        return printable(json.dumps(value, default=repr))
    except Exception:  # whatever a foreign object's repr may raise
        return ""


def printable(text: str, limit: int = MAX_SHOWN) -> str:
    """The text for a message: shortened, and nothing in it that moves a terminal's cursor or cannot be encoded."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def _copy(tree: Any, name: str) -> Any:
    """A copy of nested objects and lists.

    Raises:
        ConfigError: they are more, or deeper, than a configuration has; an object that contains itself is.
    """
    count = 0

    def copied(value: Any, depth: int) -> Any:
        nonlocal count
        if not isinstance(value, (Mapping, list, tuple)):
            return value
        count += len(value)
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise too_large(name)
        if isinstance(value, Mapping):
            return {key: copied(item, depth + 1) for key, item in value.items()}
        return type(value)([copied(item, depth + 1) for item in value]) if type(value) in (list, tuple) else value

    return copied(tree, 1)


def too_large(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: more than {MAX_VALUES} values, or objects and lists more than {MAX_DEPTH} deep. No configuration is "
        "so large: remove what repeats or contains itself."
    )


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
        raise too_large(name) from None
    except ValueError:  # Python's own limit
        raise ConfigError(f"{name}: a number has more than 4300 digits.") from None
    _copy(tree, name)  # which bounds it
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
    line, counted = 1, 0  # the number of the line at this position of the text
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
            line, counted = line + text.count("\n", counted, start), start
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
        """YAML 1.1 as PyYAML reads it, except for scalars, which are what JSON would take them for.

        So 1e-4 is a number, and 010, 1:30 and 2026-01-31 are strings: YAML 1.1 has 8, 90 and a date.
        """

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [item for item in resolvers if item[0].rpartition(":")[2] not in ("int", "float", "timestamp")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    whole = r"(?:0|[1-9][0-9_]*)"
    for kind, pattern in (
        ("int", rf"[-+]?{whole}\Z"),
        ("float", rf"[-+]?(?:{whole}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list("-+0123456789."))
    lines: dict[KeyPath, int] = {}
    count = 0

    def walk(node: Any, path: KeyPath) -> None:
        nonlocal count
        count += 1
        if count > 2 * MAX_VALUES or len(path) > MAX_DEPTH:
            raise too_large(name)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, (*path, ""))
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            mark, where = key.start_mark, (*path, str(key.value))
            if "" in path:
                walk(value, where)
                continue
            if where in lines:
                what = f"{'.'.join(where)} is written twice, first on line {lines[where]}"
                raise _syntax_error(name, text, mark.line + 1, mark.column + 1, what, " Keep one.")
            lines[where] = mark.line + 1
            walk(value, where)

    loader: Any = None
    try:
        loader = Loader(text)
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
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {error}.") from None
    except RecursionError:
        raise too_large(name) from None
    except ConfigError:
        raise
    except Exception as error:  # of the constructors of tags, such as `!!int x`
        raise ConfigError(f"{name}: not YAML that a configuration can hold: {printable(str(error))}.") from None
    finally:
        if loader is not None:
            loader.dispose()
