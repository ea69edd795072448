"""Read a configuration: a JSON, YAML or HJSON file or a dict, and overrides.

Every reader returns a `ConfigSource`: a plain tree of bounded size, and the place where each key was written.

A file of a few bytes may stand for values without end (YAML's aliases), and a dict may hold any object. So every reader
counts the values that it reads, and every failure of a parser becomes a ConfigError.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ConfigError

KeyPath = tuple[str, ...]

MAX_FILE_BYTES = 1 << 20
# Counted are the keys and list items of a whole configuration.
MAX_VALUES = 10_000
# Objects and lists within one another.
MAX_DEPTH = 32
# A message shows at most so many characters of a value.
MAX_SHOWN = 60


@dataclass
class ConfigSource:
    """A tree of values, and where each key was written.

    Attributes:
        name: The name of the file, or of what else the values come from.
        tree: The values.
        places: Where keys were written, such as "line 4" or "override a.b=1".
        spelling: The paths that the user wrote, by their canonical paths.
    """

    name: str
    tree: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    spelling: dict[KeyPath, KeyPath] = field(default_factory=dict)

    def label(self, path: KeyPath) -> str:
        """Return the path as the user wrote it, and its place."""
        written = printable(".".join(self.spelling.get(path, path)), 2 * MAX_SHOWN)
        # A value that was read as a whole, such as an override of a section, has only the place of the section.
        place = next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), None)
        return f"{written} ({place})" if place else written

    def put(self, path: KeyPath, value: Any, place: str) -> None:
        """Write a value, and make the sections around it where they are absent or null."""
        node = self.tree
        for name in path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[path[-1]] = value
        # Messages must not name the line of a value that is replaced.
        others = {known: self.places[known] for known in self.places if known[: len(path)] != path}
        self.places = {**others, path: place}

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`, or None where there is none."""
        node: Any = self.tree
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return None
            node = node[key]
        return node


def read_file(path: Path) -> ConfigSource:
    """Read a JSON, YAML or HJSON file.

    Raises:
        ConfigError: The file cannot be read or is malformed. The message says in which line and column.
    """
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
        # Opening a directory raises the right error. Everything else is checked first, since a pipe might block.
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{path}: this is a device or a pipe. Give a JSON, YAML or HJSON file.")
        with path.open("rb") as file:
            # One byte more than allowed tells a file that is too long from one that just fits.
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes, so it is no configuration. Check the path.")
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror} ({path.absolute()}). Give a JSON, YAML or HJSON file."
        ) from None
    # A ConfigError is a ValueError as well.
    except ConfigError:
        raise
    except ValueError as error:
        # The path holds a NUL character.
        raise ConfigError(f"{printable(str(path))}: this is not the path of a file ({error}).") from None
    if not text.strip():
        raise ConfigError(f'{path}: the file is empty. Write at least {{"zero_optimization": {{"stage": 1}}}}.')
    # A file without a known suffix is JSON where it begins like JSON.
    is_yaml = path.suffix in (".yaml", ".yml") or (path.suffix != ".json" and not text.lstrip().startswith("{"))
    parse = _parse_hjson if path.suffix == ".hjson" else _parse_yaml if is_yaml else _parse_json
    try:
        tree, lines = parse(text, str(path))
    except RecursionError:
        raise too_large(str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level is {describe(tree)}; write an object, {{...}}, of keys and values.")
    return ConfigSource(str(path), copy_tree(tree, str(path)), {key: f"line {line}" for key, line in lines.items()})


def override(source: ConfigSource, text: str) -> None:
    """Apply an override "a.b=value" to `source`. A value that is not JSON is a string."""
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(f"override {printable(text)!r}: write KEY=VALUE, such as zero_optimization.stage=3.")
    for depth in range(1, len(path)):
        # The override would have to replace a value by an object, which is hardly meant.
        if not isinstance(node := source.get(path[:depth]), dict | None):
            raise ConfigError(
                f"override {printable(text)!r}: {'.'.join(path[:depth])} is {describe(node)}, so nothing can be set "
                "below it."
            )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = raw
    source.put(path, copy_tree(value, f"override {printable(text)!r}"), f"override {printable(text)}")


def describe(value: Any) -> str:
    """Return a value as an error shows it: the value and its kind."""
    kinds = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list", tuple: "a list"}
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    kind = kinds.get(type(value), type(value).__name__)
    shown = as_json(value)
    return f"{shown} ({kind})" if shown else kind


def as_json(value: Any) -> str:
    """Return the value as shortened JSON, or "" where that is impossible, as for an integer of 5,000 digits."""
    try:
        return printable(json.dumps(value, default=repr))
    except Exception:
        # The repr of a foreign object may raise anything.
        return ""


def printable(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the text for a message: shortened, and with escapes for characters that a terminal cannot show."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def walk(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and the value of every key in `tree`, which stands at `above`."""
    for key, value in tree.items():
        path = (*above, str(key))
        yield path, value
        if isinstance(value, Mapping):
            yield from walk(value, path)


def copy_tree(tree: Any, name: str) -> Any:
    """Return a copy of nested objects and lists.

    Args:
        tree: An object, a list, or any other value.
        name: The name of the configuration, for the message.

    Raises:
        ConfigError: There are more of them than a configuration has, or they are nested deeper. An object that
            contains itself is nested too deeply.
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
        # Subclasses may be built from other arguments, so they are left for the model to refuse.
        return type(value)([copied(item, depth + 1) for item in value]) if type(value) in (list, tuple) else value

    return copied(tree, 1)


def too_large(name: str) -> ConfigError:
    """Return the error for a configuration with too many values or levels."""
    return ConfigError(
        f"{name}: more than {MAX_VALUES} values, or objects and lists more than {MAX_DEPTH} deep. No configuration is "
        "so large: remove what repeats or contains itself."
    )


def _syntax_error(name: str, text: str, line: int, column: int, problem: str, hint: str = "") -> ConfigError:
    """Return an error that shows the line. `line` and `column` count from 1."""
    rows = text.splitlines() or [""]
    row = rows[line - 1] if line <= len(rows) else ""
    pointer = "".join("\t" if char == "\t" else " " for char in row[: column - 1]) + "^"
    return ConfigError(f"{name}: line {line}, column {column}: {problem}.{hint}\n    {row}\n    {pointer}")


def _parse_json(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        hint = _json_hint(text, error.pos, error.msg)
        raise _syntax_error(name, text, error.lineno, error.colno, error.msg, hint) from None
    except ValueError:
        # Python limits the digits of an integer that it parses.
        raise ConfigError(f"{name}: a number has more than 4300 digits.") from None
    return tree, _json_lines(text, name)


def _json_hint(text: str, position: int, problem: str) -> str:
    """Return what to write where the parser's problem does not say it, after a space; empty if it is not known."""
    before, rest = text[:position].rstrip(), text[position:].lstrip()
    if re.match(r"//|#|/\*", rest):
        return " JSON has no comments; remove it, or name the file .hjson, which has them (pip install hjson)."
    if before.endswith(",") and rest[:1] in ("}", "]", "", ","):
        return " Remove the comma before it."
    if not rest:
        return " A brace or bracket is not closed."
    # The parser expects a key or a value here, and finds something else.
    if problem.startswith(("Expecting value", "Expecting property")):
        if re.match(r"(True|False|None|yes|no|on|off)\b", rest):
            return " JSON writes true, false and null."
        if re.match(r"[^\W\d]|['\u2018\u2019\u201c\u201d]", rest):
            return " JSON's strings and keys stand in double quotes."
    return ""


# A newline is a token of its own; strings hold none.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,\n]|[^\s{}\[\]:,"]+')


def _json_lines(text: str, name: str) -> dict[KeyPath, int]:
    """Return the line of every key of a valid JSON text.

    Raises:
        ConfigError: An object has a key twice.
    """
    lines: dict[KeyPath, int] = {}
    # The marks that opened the objects and lists around the token, and the last key of each, "" within a list.
    marks: list[str] = []
    path: list[str] = []
    expects_key = False
    line, line_start = 1, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark == "\n":
            line, line_start = line + 1, token.end()
        elif mark in "{[":
            marks.append(mark)
            path.append("")
            expects_key = mark == "{"
        elif mark in "}]":
            marks.pop()
            path.pop()
            expects_key = False
        elif mark == ",":
            expects_key = marks[-1] == "{"
        elif expects_key:
            path[-1], expects_key = json.loads(mark), False
            _note_line(lines, tuple(path), line, token.start() - line_start + 1, name, text)
    return lines


def _note_line(lines: dict[KeyPath, int], path: KeyPath, line: int, column: int, name: str, text: str) -> None:
    """Note the line of a key, and refuse a key that is written twice."""
    # Keys within lists may repeat, since every item of a list is an object of its own.
    if "" in path[:-1]:
        return
    if path in lines:
        problem = f"{'.'.join(path)} is written twice, first on line {lines[path]}"
        raise _syntax_error(name, text, line, column, problem, " Keep one.")
    lines[path] = line


def _parse_hjson(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        import hjson
    except ImportError:
        raise ConfigError(
            f"{name}: HJSON needs the package hjson. Write pip install hjson, or write the file as JSON or YAML."
        ) from None

    def object_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
            raise ConfigError(f"{name}: {printable(repeated)} is written twice in one object. Keep one.")
        return values

    try:
        # The parser does not tell where keys are, so messages about values have no lines.
        return hjson.loads(text, object_pairs_hook=object_without_repetition), {}
    except hjson.HjsonDecodeError as error:
        raise _syntax_error(name, text, error.lineno, error.colno, error.msg) from None
    # A ConfigError is a ValueError as well.
    except ConfigError:
        raise
    except (ValueError, ArithmeticError) as error:
        # Python limits the digits of an integer, and the parser cannot represent a number such as 1e999.
        raise ConfigError(f"{name}: not HJSON that a configuration can hold: {error}.") from None


# The numbers of JSON, and those of YAML that mean the same everywhere: +1, 1_000, .5 and 1.e-4.
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][\d_]*)")
_FLOAT = re.compile(rf"{_INTEGER.pattern}(?:\.\d*)?(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?")


def _parse_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    # Most configurations are JSON, and need not wait for this import.
    import yaml

    loader = yaml.SafeLoader("")
    lines: dict[KeyPath, int] = {}
    count = 0

    def note_lines(node: Any, path: KeyPath) -> None:
        """Note the line of every key below `node`, and choose what is a number, before any value is constructed.

        As in JSON 1e-4 is one, and 010, 1:30 and 2026-01-31 are strings; in YAML 1.1 they are 8, 90 and a date.
        """
        nonlocal count
        count += 1
        if count > 2 * MAX_VALUES or len(path) > MAX_DEPTH:
            raise too_large(name)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                note_lines(item, (*path, ""))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                mark, key_path = key.start_mark, (*path, str(key.value))
                _note_line(lines, key_path, mark.line + 1, mark.column + 1, name, text)
                note_lines(value, key_path)
        elif node.style is None and node.value and node.value[0] in "+-.0123456789":
            # Any other tag than the one that YAML 1.1 chooses is written in the file, and stays.
            if node.tag == loader.resolve(yaml.ScalarNode, node.value, (True, False)):  # type: ignore[no-untyped-call]
                is_number, is_integer = _FLOAT.fullmatch(node.value), _INTEGER.fullmatch(node.value)
                kind = "int" if is_integer else "float" if is_number else "str"
                node.tag = f"tag:yaml.org,2002:{kind}"

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is None:
            return None, lines
        note_lines(root, ())
        return loader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = (error.problem or error.context or "malformed YAML").capitalize()
        if mark is None:
            raise ConfigError(f"{name}: {problem}.") from None
        hint = " YAML is indented with spaces." if "'\\t'" in problem else ""
        raise _syntax_error(name, text, mark.line + 1, mark.column + 1, problem, hint) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {error}.") from None
    except (ConfigError, RecursionError):
        raise
    except Exception as error:
        # The constructors of tags, such as `!!int x`, raise errors of many kinds.
        raise ConfigError(f"{name}: not YAML that a configuration can hold: {printable(str(error))}.") from None
