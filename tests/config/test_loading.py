"""`load`: files, dicts, environment and overrides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.config import deepspeed_keys, load
from zeroengine.config.keys import known_paths
from zeroengine.errors import ConfigError, ZeroEngineError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROENGINE_CONFIG", raising=False)
    monkeypatch.delenv("ZEROENGINE_OVERRIDES", raising=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_dict_a_json_file_and_a_yaml_file_mean_the_same(tmp_path: Path) -> None:
    tree = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "train_batch_size": 8}
    as_json = write(tmp_path / "a.json", json.dumps(tree))
    as_yaml = write(tmp_path / "a.yaml", "zero_optimization: {stage: 2, reduce_bucket_size: 5e8}\ntrain_batch_size: 8")
    assert all(load(source).to_dict() == load(tree).to_dict() for source in (as_json, str(as_json), as_yaml))
    assert load(as_yaml).zero_optimization.reduce_bucket_size == 500_000_000


def test_the_callers_dict_is_left_alone() -> None:
    tree = {"optimizer": {"type": "adamw"}, "bfloat16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    before = json.dumps(tree)
    load(tree, ["zero_optimization.stage=3"])
    assert json.dumps(tree) == before


def test_without_a_config_the_file_that_the_launcher_names_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "ds.json", '{"zero_optimization": {"stage": 1}, "train_batch_size": 4}')
    monkeypatch.setenv("ZEROENGINE_CONFIG", str(path))
    monkeypatch.setenv("ZEROENGINE_OVERRIDES", '["zero_optimization.stage=2", "train_batch_size=16"]')
    config = load(overrides=["zero_optimization.stage=3"])
    assert (config.zero_optimization.stage, config.train_batch_size) == (3, 16)


def test_overrides_alone_are_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROENGINE_OVERRIDES", '["zero_optimization.stage=3"]')
    assert load().zero_optimization.stage == 3


def test_nothing_given_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r'config="ds.json".*zero-launch --config ds.json'):
        load()


@pytest.mark.parametrize("config", [None, '{"zero_optimization": {}}', 3])
def test_messages_name_the_argument_that_the_user_of_an_integration_writes(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"\bzero_config\b"):
        load(config, argument="zero_config")


def test_override_values_are_json_or_else_strings() -> None:
    config = load({}, ["dump_state=true", "comm.transport=gloo", 'units=["layers.*"]', "comm.timeout_seconds=1e1"])
    assert (config.dump_state, config.comm.transport, config.units) == (True, "gloo", ["layers.*"])
    assert config.comm.timeout_seconds == 10.0


def test_an_override_wins_over_the_other_spelling_in_the_file() -> None:
    names = ("prefetch_bucket_size", "stage3_prefetch_bucket_size")
    for in_file, in_override in (names, names[::-1]):
        config = load({"zero_optimization": {in_file: 7}}, [f"zero_optimization.{in_override}=9"])
        assert config.zero_optimization.prefetch_bucket_size == 9


def test_an_override_of_a_loaded_config() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}, "bf16": {"enabled": "auto"}})
    changed = load(config, ["zero_optimization.stage=2"])
    stage_2 = {**config.to_dict()["zero_optimization"], "stage": 2}
    assert changed.to_dict() == {**config.to_dict(), "zero_optimization": stage_2}
    assert load(config) is config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero_optimization.stage", "write KEY=VALUE, such as zero_optimization.stage=3"),
        ("a..b=1", "write KEY=VALUE"),
        ("train_batch_size.x=1", r"train_batch_size is 8 \(an integer\), so nothing can be set below it"),
        ("zero_optimization.stage=7", r"stage \(override zero_optimization.stage=7\): found 7.*write 0, 1, 2, 3 or"),
        ("zero_optimization.stge=1", r"\(override .*\): unknown key. Did you mean zero_optimization.stage\?"),
    ],
)
def test_a_wrong_override_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"train_batch_size": 8}, [text])


def test_a_wrong_value_below_an_overridden_key_is_said_to_be_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"zero_optimization":\n  {"stage": 1}}')
    text = 'zero_optimization={"stage": 7}'
    with pytest.raises(ConfigError, match=rf"zero_optimization.stage \(override {re.escape(text)}\): found 7"):
        load(path, [text])


@pytest.mark.parametrize("text", ["{}", "stage=3", "[1]"])
def test_malformed_overrides_in_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROENGINE_OVERRIDES", text)
    with pytest.raises(ConfigError, match=r"ZEROENGINE_OVERRIDES is .* write a JSON list"):
        load({})


def test_what_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JSON text, not a file name"):
        load('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match=r"config is 3 \(an integer\); pass"):
        load(3)  # type: ignore[arg-type]
    assert issubclass(ConfigError, ZeroEngineError)


def test_every_problem_is_listed_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "ds.json",
        """{
  "zero_optimization": {
    "stge": 1
  },
  "fp16": {"enabled": true}, "amp": {"enabled": true},
  "train_batch_size": "32",
  "optimizer": {"type": "AdamW", "params": {"lr": -1}}
}""",
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    reason = deepspeed_keys.TABLE["amp"].reason
    assert str(caught.value).splitlines() == [
        f"{path}: 4 problems",
        "  zero_optimization.stge (line 3): unknown key. Did you mean zero_optimization.stage?",
        f"  amp (line 5): refused; {reason}.",
        '  train_batch_size (line 6): found "32" (a string); it should be a valid integer, without quotes.',
        "  optimizer.params.lr (line 7): found -1 (an integer); it should be greater than or equal to 0.",
    ]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "AdamW", "WarmupLR", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "params", "enabled"]), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(items=st.dictionaries(st.sampled_from(known_paths()), anything, max_size=4), world_size=st.integers(1, 5))
def test_whatever_is_written_is_resolved_or_a_config_error(items: dict[str, Any], world_size: int) -> None:
    tree: dict[str, Any] = {}
    for path, value in items.items():
        *above, name = path.split(".")
        section = tree
        for key in above:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[name] = value
    try:
        config = load(tree).resolve(world_size=world_size)
    except ConfigError:
        return
    assert load(config.to_dict()).to_dict() == config.to_dict()
    assert config.describe()
