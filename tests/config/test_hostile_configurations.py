"""Whatever a file or a dict holds ends, soon, as a configuration or as a ConfigError."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroengine.config import load
from zeroengine.config.keys import known_paths
from zeroengine.errors import ConfigError

# CPU time of one check. The longest takes a twentieth of it: a busy machine may take several times as long.
SECONDS = 4.0
FILES = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "deepspeed_files").glob("*.json"))]


def outcome(config: Any, overrides: list[str] | None = None) -> str:
    """The error, or "" where there is none. Every value can be printed, and read back."""
    begin = time.process_time()
    try:
        loaded = load(config, overrides or [])
        resolved = loaded.resolve(world_size=3)
        resolved.describe().encode()
        load(resolved.to_dict())
        error = ""
    except ConfigError as caught:
        error = str(caught)
        error.encode()
        assert "\x1b" not in error, "nothing moves a terminal's cursor"
        assert len(error) < 50_000
    assert time.process_time() - begin < SECONDS
    return error


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"stage": 1}
    tree["zero_optimization"] = tree
    return tree


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("tree", "part"),
    [
        ({"train_batch_size": 2_000_000_011, "train_micro_batch_size_per_gpu": 7}, "train_batch_size to"),
        ({"train_batch_size": 10**5000}, "less than or equal to 2147483647"),
        ({"train_batch_size": 1e308}, "less than or equal to 2147483647"),
        ({"sequence_parallel_size": 10**5000}, "found an integer; it should be less than or equal to"),
        ({"train_micro_batch_size_per_gpu": 2**30, "gradient_accumulation_steps": 2**30}, "more than the 2147483647"),
        ({"gradient_clipping": 1e308}, "less than or equal to 3000"),
        ({"comm": {"timeout_seconds": 1e300}}, "less than or equal to"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"buffer_count": 10**9}}}, "less than or equal to 1024"),
        ({"zero_optimization": {"offload_optimizer": {"buffer_size": 1e15}}}, "less than or equal to 4294967296"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a\0b"}}}, "no NUL"),
        ({"aio": {"queue_depth": 2**40}}, "less than or equal to 4096"),
        ({f"key{i}": i for i in range(2000)}, "and 1900 more"),
        ({"x" * 1_000_000: 1}, "unknown key"),
        ({"\x1b[2J\ud800": 1}, "unicode string"),
        ({"units": ["x"] * 20_000}, "more than 10000 values"),
        ({"train_batch_size": Unprintable()}, "found Unprintable; it should be a valid integer"),
        ({"train_batch_size": {3: (4, [5])}}, "found an object; it should be a valid integer"),
        (cyclic(), "contains itself"),
    ],
)
def test_numbers_and_sizes_are_bounded(tree: dict[str, Any], part: str) -> None:
    assert part in outcome(tree)


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + above] * 9)}]\n" for above, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (ALIASES, "contains itself"),
        ("a: &a {b: *a}", "contains itself"),
        ("[" * 5000 + "]" * 5000, "contains itself"),
        ("train_batch_size: 010", 'found "010" (a string); it should be a valid integer'),
        ("train_batch_size: 0o10", 'found "0o10" (a string)'),
        ("train_batch_size: 1:30", 'found "1:30" (a string)'),
        ("gradient_clipping: 1:30.5", 'found "1:30.5" (a string)'),
        ("train_batch_size: 2026-01-31", 'found "2026-01-31" (a string)'),
        ("train_batch_size: !!int abc", "not YAML that a configuration can hold"),
        ("train_batch_size: !!timestamp abc", "not YAML that a configuration can hold"),
        ("train_batch_size: !!binary abc", "train_batch_size"),
        ("train_batch_size: !!python/object/apply:os.system [ls]", "constructor for the tag"),
        ("train_batch_size: " + "9" * 5000, "digits"),
        ("train_batch_size: \x01", "special characters are not allowed"),
        ("? {a: b}\n: 1", "unhashable"),
        ("x" * (2 << 20), "longer than 1048576 bytes"),
    ],
)
def test_yaml_that_says_much_in_few_bytes_or_something_else_in_each_version(
    tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert part in (message := outcome(tmp_path / "a.yaml"))
    assert "not the path" not in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"train_batch_size": ' + "9" * 5000 + "}", "more than 4300 digits"),
        ('{"a": ' * 500 + "1" + "}" * 500, "contains itself"),
        ("[" * 100_000, "contains itself"),
        ('{"\\ud800\\u001b[31m": 1}', "unicode string"),
        ('{"train_batch_size": "\\ud800"}', "train_batch_size"),
        ('{"train_batch_size": -' + "1" * 400 + "e400}", "train_batch_size"),
    ],
)
def test_json_that_python_cannot_hold(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert part in outcome(tmp_path / "a.json")


def test_what_is_no_file() -> None:
    for name, part in (
        ("a\0b", "not the path"),
        ("/dev/zero", "a device or a pipe"),
        ("x" * 5000, "be read"),
    ):
        assert part in (message := outcome(name))
        assert ("not the path" in message) == ("\0" in name)


@pytest.mark.parametrize(
    "text", ["x=" + "9" * 5000, "train_batch_size=" + "[" * 100_000, "a." * 2000 + "b=1", "=", "\0=1"]
)
def test_overrides_that_python_cannot_hold(text: str) -> None:
    assert outcome({}, [text])


# -- mutations ----------------------------------------------------------------------------------------

Path_ = tuple[Any, ...]
values = st.one_of(
    st.sampled_from(
        [
            "auto",
            "",
            "x",
            "nvme",
            "AdamW",
            "\0",
            "\ud800",
            "1e400",
            "010",
            None,
            True,
            False,
            0,
            -1,
            10**9,
            2**63,
            10**400,
        ]
    ),
    st.sampled_from([1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 0.1, 1e15]),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.builds(lambda n: [n] * 3, st.integers()),
    st.builds(lambda key: {key: {"type": key}}, st.text(max_size=4)),
)
keys = st.one_of(
    st.sampled_from([part for path in known_paths() for part in path.split(".")]), st.text(max_size=6), st.integers()
)


def places(tree: Any, above: Path_ = ()) -> list[Path_]:
    found = [above]
    if isinstance(tree, dict):
        found += [place for key, value in tree.items() for place in places(value, (*above, key))]
    return found


def mutate(data: st.DataObject, tree: dict[Any, Any]) -> dict[Any, Any]:
    """The tree with some values replaced, removed, added, or moved to another name."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 6))):
        *above, key = data.draw(st.sampled_from([place for place in places(tree) if place] or [("x",)]))
        section: Any = tree
        for part in above:
            section = section[part]
        what = data.draw(st.sampled_from(["replace", "remove", "add", "rename"]))
        if what == "replace":
            section[key] = data.draw(values)
        elif what == "add":
            section[data.draw(keys)] = data.draw(values)
        elif key in section:
            value = section.pop(key)
            if what == "rename":
                section[data.draw(keys)] = value
    return tree


def check_a_mutation(data: st.DataObject, folder: Path) -> None:
    tree = mutate(data, data.draw(st.sampled_from(FILES)))
    form = data.draw(st.sampled_from(["dict", "json", "yaml"]))
    try:
        text = {"json": json.dumps, "yaml": yaml.safe_dump}[form](tree) if form != "dict" else ""
        text.encode()
    except (TypeError, ValueError, yaml.YAMLError):
        form = "dict"  # it cannot be written
    if form == "dict":
        outcome(tree)
    else:
        path = folder / f"mutated.{form}"
        path.write_text(text)
        outcome(path)


relaxed = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=150, **relaxed)
@given(st.data())
def test_a_mutated_configuration_is_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    check_a_mutation(data, tmp_path)


@pytest.mark.slow
@settings(max_examples=3000, **relaxed)
@given(st.data())
def test_three_thousand_mutated_configurations_are_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    check_a_mutation(data, tmp_path)
