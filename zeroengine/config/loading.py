"""`load`: from a file, dict or environment to a checked `Config`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeroengine.config import deepspeed_keys
from zeroengine.config.fates import Fates, asleep
from zeroengine.config.keys import close
from zeroengine.config.messages import Problem, explain
from zeroengine.config.model import Config
from zeroengine.config.optimizers import OPTIMIZER_TYPES
from zeroengine.config.schedulers import SCHEDULER_TYPES
from zeroengine.config.source import KeyPath, Source, describe, override, printable, read_dict, read_file
from zeroengine.errors import ConfigError

CONFIG_VARIABLE = "ZEROENGINE_CONFIG"
OVERRIDES_VARIABLE = "ZEROENGINE_OVERRIDES"


MAX_PASSES = 5  # a value, its section, what the section is in, and the configuration as a whole
MAX_LISTED = 100  # problems in one error
TYPES = {"optimizer": OPTIMIZER_TYPES, "scheduler": SCHEDULER_TYPES}
DEEPSPEED_NEEDS = {"train_batch_size", "train_micro_batch_size_per_gpu"}  # one of them in every file of its own
# Keys that DeepSpeed does not have: a file with one was written for zeroengine.
OURS_ALONE = {
    "$schema",
    "checkpoint.async_save",
    "checkpoint.keep",
    "comm",
    "keep_fp32_modules",
    "optimizer_state_dtype",
    "units",
}


def load(config: str | Path | Mapping[str, Any] | Config | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load and check a configuration; raise ConfigError that lists everything wrong with it.

    `config` is a JSON or YAML file, a dict, or None for the file that ZEROENGINE_CONFIG names (zero-launch sets it).
    Overrides, "key.path=value", come from ZEROENGINE_OVERRIDES (a JSON list), then from `overrides`.
    """
    overrides = [*_environment_overrides(), *overrides]
    if isinstance(config, Config):
        if not overrides:
            return config
        config = config.to_dict()
    source = _read(config, bool(overrides))
    _canonical(source)
    for text in overrides:
        key, equals, value = text.partition("=")
        override(source, deepspeed_keys.ALIASES.get(key.strip(), key) + equals + value)
    _canonical(source)
    return _check(source)


def _environment_overrides() -> list[str]:
    text = os.environ.get(OVERRIDES_VARIABLE, "")
    if not text.strip():
        return []
    try:
        overrides = json.loads(text)
    except (ValueError, RecursionError):
        overrides = None
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError(
            f'{OVERRIDES_VARIABLE} is {printable(text)!r}; write a JSON list such as ["zero_optimization.stage=3"].'
        )
    return overrides


def _read(config: str | Path | Mapping[str, Any] | None, has_overrides: bool) -> Source:
    if config is None:
        named = os.environ.get(CONFIG_VARIABLE)
        if named:
            return read_file(Path(named))
        if has_overrides:
            return Source("the overrides", {})
        raise ConfigError(
            'no configuration was given. Pass config="ds.json" (a JSON or YAML file) or a dict such as '
            '{"zero_optimization": {"stage": 1}}, or start the script with zero-launch --config ds.json.'
        )
    if isinstance(config, Mapping):
        return read_dict(config)
    if isinstance(config, (str, os.PathLike)):
        if str(config).lstrip().startswith("{"):
            raise ConfigError("config is JSON text, not a file name. Pass a file or a dict: config=json.loads(text).")
        return read_file(Path(config))
    raise ConfigError(f"config is {describe(config)}; pass a JSON or YAML file, a dict, or None.")


def _canonical(source: Source) -> None:
    """Bring second spellings to ours: aliases, the case of type names, `"zero_optimization": true`."""
    tree = source.tree
    if isinstance(tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}
    for written, canonical in deepspeed_keys.ALIASES.items():
        old, new = tuple(written.split(".")), tuple(canonical.split("."))
        section, home = source.get(old[:-1]), source.get(new[:-1])
        if not isinstance(section, dict) or old[-1] not in section or not isinstance(home, dict):
            continue
        if new[-1] in home and home[new[-1]] != section[old[-1]]:
            raise ConfigError(f"{source.name}: {source.label(old)} and {source.label(new)} are one setting; keep one.")
        value = section.pop(old[-1])
        if home is not section and asleep(section, old[:-1]):
            continue
        home[new[-1]] = value
        source.spelling[new] = old
        for path in [path for path in source.places if path[: len(old)] == old]:
            source.places[new + path[len(old) :]] = source.places.pop(path)
    for name, types in TYPES.items():
        section = tree.get(name)
        if isinstance(section, dict) and isinstance(section.get("type"), str):
            section["type"] = next((t for t in types if t.lower() == section["type"].lower()), section["type"])


def _check(source: Source) -> Config:
    fates = Fates(source)
    rest = fates.sort(source.tree)
    config, problems = _validate(rest)
    problems = [*fates.problems, *problems]
    if problems or config is None:
        raise ConfigError(_report(source, problems))
    config._source = source.name
    written = {".".join(path) for path in _paths(rest)}
    may_be_deepspeeds = bool(fates.notices) or (bool(DEEPSPEED_NEEDS & written) and not OURS_ALONE & written)
    config._notices = (*fates.comments, *fates.notices, *_default_notices(source, rest, config, may_be_deepspeeds))
    return config


def _validate(tree: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """The configuration, or everything wrong with it.

    What a section says as a whole is checked only once each of its values is right, and the configuration as a whole
    after that. So what is wrong is taken out, and the rest is checked again.
    """
    problems: list[Problem] = []
    tree = copy.deepcopy(tree)
    for _ in range(MAX_PASSES):
        try:
            config = Config.model_validate(tree)
        except ValidationError as error:
            found = explain(error, tree)
            problems += [new for new in found if not any(_follows(new, old) for old in problems)]
            if not all([_correct(tree, problem.path) for problem in found]):
                return None, problems
        else:
            return (None if problems else config), problems
    return None, problems


def _follows(new: Problem, old: Problem) -> bool:
    """Whether something may be wrong only because what was wrong there has been taken out."""
    depth = min(len(new.path), len(old.path))
    of_one_place = depth > 0 and new.path[:depth] == old.path[:depth]
    return new == old or (of_one_place and (new.missing or (new.of_section and len(new.path) < len(old.path))))


def _correct(tree: dict[str, Any], path: KeyPath) -> bool:
    """Take out what is wrong; in its place put the type that was probably meant. Return whether anything changed."""
    *above, name = path or ("",)
    section: Any = tree
    for key in above:
        if not isinstance(section, dict) or key not in section:
            return True  # it has been taken out with another
        section = section[key]
    if isinstance(section, list):
        section.clear()
        return True
    if not isinstance(section, dict) or name not in section:
        if not above:
            return False
        return _correct(tree, tuple(above))  # something is missing there
    if len(above) == 1 and above[0] in TYPES and "type" not in section and name != "params":
        section["type"] = section.pop(name)  # its name was misspelt
        return True
    meant = close(str(section[name]), TYPES[above[0]]) if above and name == "type" and above[0] in TYPES else None
    if meant is not None and meant != section[name]:
        section[name] = meant
    else:
        del section[name]
    return True


def _report(source: Source, problems: Sequence[Problem]) -> str:
    """Everything wrong, in the order of the file."""
    order = {path: index for index, path in enumerate(_paths(source.tree))}
    in_order = sorted(problems, key=lambda problem: order.get(problem.path, order.get(problem.path[:-1], 0)))
    lines = [f"{source.label(problem.path)}: {problem.text}" for problem in in_order]
    if len(lines) == 1:
        return f"{source.name}: {lines[0]}"
    more = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    shown = [*lines[:MAX_LISTED], *more]
    return "\n".join([f"{source.name}: {len(lines)} problems", *(f"  {line}" for line in shown)])


def _default_notices(source: Source, rest: dict[str, Any], config: Config, may_be_deepspeeds: bool) -> Iterator[str]:
    """What "auto" became, and defaults that people may expect to be others."""
    written, values = Source("", rest), Source("", config.to_dict())
    autos = [path for path in _paths(rest) if written.get(path) == "auto" and values.get(path) not in (None, "auto")]
    if autos:
        chosen = (f"{'.'.join(source.spelling.get(path, path))} = {json.dumps(values.get(path))}" for path in autos)
        yield f'"auto" stands for the default: {", ".join(chosen)}.'
    if may_be_deepspeeds and "gradient_clipping" not in rest:
        yield "gradient_clipping is not given: no clipping. DeepSpeed 0.19.8 clips at 1.0 there."
    if config.keep_fp32_modules and config.torch_autocast.enabled:
        yield "keep_fp32_modules has no effect under torch_autocast, which decides operation by operation."
    if written.get(("optimizer", "type")) == "AdamW" and written.get(("optimizer", "params", "weight_decay")) is None:
        yield "optimizer.params.weight_decay is not given and is 0.0, as in DeepSpeed; torch.optim.AdamW's own is 0.01."


def _paths(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in tree.items():
        yield (*above, str(key))
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, str(key)))
