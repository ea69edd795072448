"""Malformed and misplaced files: the message gives file, line, column, the line itself, and the remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.config import load
from zeroengine.config.source import read_file
from zeroengine.errors import ConfigError


def complaint(path: Path, text: str | bytes | None = None) -> str:
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


def test_malformed_json_shows_the_line_with_a_caret(tmp_path: Path) -> None:
    message = complaint(tmp_path / "a.json", '{\n  "train_batch_size": 8\n  "dump_state": true\n}')
    first, line, caret = message.splitlines()
    assert "line 3, column 3" in first
    assert "Expecting ',' delimiter" in first
    assert line == '      "dump_state": true'
    assert caret.index("^") == line.index('"')


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"a": 1,, "b": 2}', "Remove the comma before it"),
        ('{"a" 1}', "Expecting ':' delimiter"),
        ('{"a": x}', "strings and keys stand in double quotes"),
        ("{a: 1}", "strings and keys stand in double quotes"),
        ('{"a: 1}', "Unterminated string"),
        ('{"a": 1} x', "Extra data"),
        ('{"dump_state": true // on\n}', "name the file .hjson, which has them (pip install hjson)"),
        ("{'dump_state': true}", "double quotes"),
        ('{"dump_state": True}', "true, false and null"),
        ('{"zero_optimization": {"stage": 1}', "not closed"),
        ('{"dump_state": }', "line 1, column 16"),
    ],
)
def test_usual_slips_in_json_have_a_hint(tmp_path: Path, text: str, hint: str) -> None:
    assert hint in complaint(tmp_path / "a.json", text)


def test_a_trailing_comma_is_named(tmp_path: Path) -> None:
    assert "comma" in complaint(tmp_path / "a.json", '{"dump_state": true,}')


def test_a_key_written_twice(tmp_path: Path) -> None:
    for name, text in {
        "a.json": '{"zero_optimization": {"stage": 1,\n  "stage": 2}}',
        "a.yaml": "zero_optimization:\n  stage: 2\n  stage: 3",
    }.items():
        assert "zero_optimization.stage is written twice, first on line" in complaint(tmp_path / name, text)


def test_the_same_key_in_two_objects_is_no_repetition(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"bf16": {"enabled": true}, "fp16": {"enabled": false}, "units": ["a", "b"], "dump_state": true}')
    assert load(path).units == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("zero_optimization:\n\tstage: 1", "line 2, column 1"),
        ("zero_optimization:\n\tstage: 1", "indented with spaces"),
        ("units: [1", "line 1, column"),
        ("a: &x\n  b: *x", "contains itself"),
        ("- 1\n- 2", "the top level is [1, 2] (a list)"),
        ("just words", "the top level is"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, part: str) -> None:
    assert part in complaint(tmp_path / "a.yaml", text)


def test_numbers_in_yaml_are_those_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text("optimizer:\n  type: SGD\n  params: {lr: 1e-4, momentum: 9.0e-1}\ncomm: {timeout_seconds: 6E1}")
    config = load(path)
    assert config.optimizer is not None
    assert (config.optimizer.params["lr"], config.optimizer.params["momentum"]) == (1e-4, 0.9)
    assert config.comm.timeout_seconds == 60.0
    # What YAML 1.1 writes otherwise is a number all the same, and a tag says what a value is.
    texts = {"1.e-4": 1e-4, ".5": 0.5, "+1": 1, "1_000": 1000, "-1.": -1.0, "!!str 10": "10", "'10'": "10"}
    for text, value in texts.items():
        path.write_text(f"optimizer:\n  type: my.Optimizer\n  params: {{x: {text}}}")
        optimizer = load(path).optimizer
        assert optimizer is not None
        assert (type(optimizer.params["x"]), optimizer.params["x"]) == (type(value), value)


def test_a_file_without_a_known_suffix_is_read_by_its_first_character(tmp_path: Path) -> None:
    for text in ('{"dump_state": true}', "dump_state: true"):
        path = tmp_path / "config"
        path.write_text(text)
        assert load(path).dump_state


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert load(path).zero_optimization.stage == 0


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in complaint(tmp_path / "missing.json")
    assert "cannot be read: Is a directory" in complaint(tmp_path)
    assert "the file is empty" in complaint(tmp_path / "a.json", " \n")
    assert "UTF-8" in complaint(tmp_path / "b.json", b"\xff\xfe{")
    assert "the top level is [1] (a list); write an object" in complaint(tmp_path / "c.json", "[1]")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(tree=st.dictionaries(st.text(min_size=1), values, max_size=4), indent=st.sampled_from([None, 2, "\t"]))
def test_the_line_of_every_key_is_known(tree: dict[str, Any], indent: int | str | None) -> None:
    text = json.dumps(tree, indent=indent)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_text(text)
        source = read_file(path)
    assert source.tree == tree

    def check(node: Any, above: tuple[str, ...]) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            line = int(source.places[(*above, key)].removeprefix("line "))
            assert json.dumps(key) in text.splitlines()[line - 1]
            check(value, (*above, key))

    check(tree, ())


HJSON = """{
  # HJSON has comments,
  zero_optimization: {stage: 2}   // of both kinds,
  optimizer: {
    type: AdamW
    params: {lr: 1e-4, "betas": [0.9, 0.95]}
  }
  train_batch_size: auto
}"""


@pytest.mark.parametrize("text", [HJSON, HJSON.strip("{}")], ids=["with braces", "without braces"])
def test_hjson_means_what_the_same_json_means(tmp_path: Path, text: str) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "a.hjson"
    path.write_text(text)
    params = {"lr": 1e-4, "betas": [0.9, 0.95]}
    same = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}}
    assert load(path).to_dict() == load(same).to_dict()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{\n  dump_state: true\n  units: [a,\n", "line 4, column 1"),
        ("bf16: {enabled: true\n enabled: false}", "enabled is written twice in one object. Keep one."),
        ("train_batch_size: 1e999", "not HJSON that a configuration can hold"),
        ("train_batch_size: 8x", 'train_batch_size: found "8x" (a string); it should be a valid integer'),
        ("[1]", "the top level is [1] (a list)"),
        ("a: {" * 3000, "more than 10000 values"),
    ],
)
def test_malformed_hjson(tmp_path: Path, text: str, part: str) -> None:
    pytest.importorskip("hjson")
    assert part in (message := complaint(tmp_path / "a.hjson", text))
    assert message.count("a.hjson") <= 1


def test_hjson_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert "Write pip install hjson, or write the file as JSON or YAML." in complaint(tmp_path / "a.hjson", "{}")
