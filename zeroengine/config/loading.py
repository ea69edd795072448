"""Load a configuration: from a file, a dict or the environment to a checked `Config`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zeroengine.config.deepspeed_keys import ALIASES, UNSET_ALIASES, KeySorter, is_disabled_precision
from zeroengine.config.filling import changed_source, filled_source
from zeroengine.config.messages import TYPES, Problem, explain
from zeroengine.config.model import Config
from zeroengine.config.schedulers import default_rate, long_warmup
from zeroengine.config.source import ConfigSource, copy_tree, describe, override, printable, read_file, walk
from zeroengine.errors import ConfigError

CONFIG_VARIABLE = "ZEROENGINE_CONFIG"
OVERRIDES_VARIABLE = "ZEROENGINE_OVERRIDES"

# One error lists at most so many problems.
MAX_LISTED = 100
# DeepSpeed refuses a file without any of these keys.
DEEPSPEED_REQUIRES = {"train_batch_size", "train_micro_batch_size_per_gpu"}
# DeepSpeed does not have these keys, so a file with one of them was written for zeroengine.
ZEROENGINE_ONLY = {
    "$schema",
    "checkpoint.async_save",
    "checkpoint.keep",
    "comm",
    "ema",
    "keep_dtype",
    "keep_fp32_modules",
    "local_steps",
    "monitor",
    "optimizer_state_dtype",
    "tiling",
    "trace",
    "units",
    "zero_optimization.degrees",
}

# What ``load`` reads.
ConfigLike = str | Path | Mapping[str, Any] | Config


def load(
    config: ConfigLike | None = None,
    overrides: Sequence[str] = (),
    *,
    argument: str = "config",
    from_environment: bool = True,
) -> Config:
    """Load and check a configuration.

    Args:
        config: A JSON, YAML or HJSON file, a dict, or None for the file that ZEROENGINE_CONFIG names (zero-launch sets
            it).
        overrides: Values to set, as in "key.path=value". Those in ZEROENGINE_OVERRIDES (a JSON list) come before them.
        argument: What the caller's user passes `config` as, which messages name.
        from_environment: Whether the overrides of the environment apply.

    Returns:
        The checked configuration, which `Config.resolve` fits to a world size.

    Raises:
        ConfigError: Something is wrong with the configuration. The message lists everything that is.
    """
    overrides = [*(_environment_overrides() if from_environment else ()), *overrides]
    if isinstance(config, Config):
        # Without overrides nothing can have changed, so the checked object is returned as it is.
        if not overrides:
            return config
        config = config.to_dict()
    source = _read(config, bool(overrides), argument)
    # The file's second spellings are replaced first, so that an override finds the key that it replaces. An override
    # may bring in second spellings of its own, so this is repeated below.
    _canonicalize(source)
    for text in overrides:
        key, equals, value = text.partition("=")
        # An override by a second spelling replaces the value under the canonical one.
        override(source, ALIASES.get(key.strip(), key) + equals + value)
    _canonicalize(source)
    return _check(source)


def _environment_overrides() -> list[str]:
    text = os.environ.get(OVERRIDES_VARIABLE, "").strip()
    try:
        return TypeAdapter(list[str]).validate_json(text or "[]")
    except ValidationError:
        # zero-launch writes this variable as JSON, but a user may set it by hand and forget the brackets.
        raise ConfigError(
            f'{OVERRIDES_VARIABLE} is {printable(text)!r}; write a JSON list such as ["zero_optimization.stage=3"].'
        ) from None


def _read(config: str | Path | Mapping[str, Any] | None, has_overrides: bool, argument: str) -> ConfigSource:
    if config is None:
        if file := os.environ.get(CONFIG_VARIABLE):
            return read_file(Path(file))
        if has_overrides:
            return ConfigSource("the overrides", {})
        raise ConfigError(
            f'no configuration was given. Pass {argument}="ds.json" (a JSON, YAML or HJSON file) or a dict such as '
            '{"zero_optimization": {"stage": 1}}, or start the script with zero-launch --config ds.json.'
        )
    if isinstance(config, Mapping):
        return ConfigSource("the config dict", copy_tree(config, "the config dict"))
    if isinstance(config, (str, os.PathLike)):
        # Passing the text of a file is a common mistake. As a path it would only give a confusing message.
        if str(config).lstrip().startswith("{"):
            raise ConfigError(
                f"{argument} is JSON text, not a file name. Pass a file or a dict: {argument}=json.loads(text)."
            )
        return read_file(Path(config))
    raise ConfigError(f"{argument} is {describe(config)}; pass a JSON, YAML or HJSON file, a dict, or None.")


def _canonicalize(source: ConfigSource) -> None:
    """Replace second spellings: aliases, the case of type names, and `"zero_optimization": true`."""
    tree = source.tree
    # DeepSpeed's first versions wrote a boolean here.
    if isinstance(tree.get("zero_optimization"), bool):
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"])}
    for written, canonical in ALIASES.items():
        old, new = tuple(written.split(".")), tuple(canonical.split("."))
        section, new_section = source.get(old[:-1]), source.get(new[:-1])
        if not isinstance(section, dict) or old[-1] not in section:
            continue
        if section[old[-1]] in UNSET_ALIASES.get(written, ()):
            del section[old[-1]]
            continue
        # The section of the canonical spelling may be one that the file does not have.
        if new_section is None and new[:-2] == old[:-1]:
            new_section = section[new[-2]] = {}
        if not isinstance(new_section, dict):
            continue
        # The same value twice is harmless. Two different values have no order that could decide.
        if new[-1] in new_section and new_section[new[-1]] != section[old[-1]]:
            raise ConfigError(f"{source.name}: {source.label(old)} and {source.label(new)} are one setting; keep one.")
        value = section.pop(old[-1])
        # A key of a precision that is switched off must not change the setting of the whole run.
        if new_section is not section and is_disabled_precision(section, old[:-1]):
            continue
        new_section[new[-1]] = value
        source.spelling[new] = old
        # Messages show the line where the user wrote the key, so the places move along with the values.
        for path in [path for path in source.places if path[: len(old)] == old]:
            source.places[new + path[len(old) :]] = source.places.pop(path)
    for name, types in TYPES.items():
        section = tree.get(name)
        if isinstance(section, dict) and isinstance(section.get("type"), str):
            # The case of a type's name does not matter, and the models know only one spelling.
            section["type"] = next((t for t in types if t.lower() == section["type"].lower()), section["type"])


def _check(source: ConfigSource) -> Config:
    """Return the checked configuration, or raise a ConfigError that lists everything wrong with it."""
    sorter = KeySorter(source)
    tree = sorter.sort(source.tree)
    problems = [Problem(path, text) for path, text in sorter.refused.items()]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += explain(error, tree)
    if problems:
        # All problems are listed in one error, so that a file is corrected once and not once for each mistake.
        raise ConfigError(_report(source, problems))
    config._source, config._written, config._fill = source.name, source, _fill_auto
    written = {".".join(path) for path, _ in walk(tree)}
    # A file without any sign of DeepSpeed gets no notices about differences from it.
    may_be_deepspeeds = bool(sorter.notices) or (bool(DEEPSPEED_REQUIRES & written) and not ZEROENGINE_ONLY & written)
    config._notices = (*sorter.comments, *sorter.notices, *_default_notices(source, tree, config, may_be_deepspeeds))
    return config


def _fill_auto(
    config: Config, source: ConfigSource, values: Mapping[str, Any], framework: str, must_match: bool
) -> Config:
    """Return `config`, which was loaded from `source`, with the values of a framework; see `Config.fill_auto`."""
    source = changed_source(source, _check(source).to_dict(), config.to_dict())
    filled, problems = filled_source(source, values, framework, must_match)
    if problems:
        raise ConfigError(_report(filled, problems))
    return _check(filled)


def _report(source: ConfigSource, problems: Sequence[Problem]) -> str:
    """Return the message that lists all problems in the order of the file."""
    order = {path: index for index, path in enumerate(dict(walk(source.tree)))}
    # A missing key has no place in the file, so the problem takes that of the section around it.
    in_order = sorted(problems, key=lambda problem: order.get(problem.path, order.get(problem.path[:-1], 0)))
    # What contradicts itself over several sections belongs to none of them.
    lines = [f"{source.label(problem.path)}: {problem.text}" if problem.path else problem.text for problem in in_order]
    if len(lines) == 1:
        return f"{source.name}: {lines[0]}"
    more = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    shown = [*lines[:MAX_LISTED], *more]
    return "\n".join([f"{source.name}: {len(lines)} problems", *(f"  {line}" for line in shown)])


def _default_notices(
    source: ConfigSource, tree: dict[str, Any], config: Config, may_be_deepspeeds: bool
) -> Iterator[str]:
    """Yield notices of the values of "auto", and of defaults that people may not expect."""
    written, values = dict(walk(tree)), dict(walk(config.to_dict()))
    autos = [path for path, value in written.items() if value == "auto" and values.get(path) not in (None, "auto")]
    if autos:
        chosen = (f"{'.'.join(source.spelling.get(path, path))} = {json.dumps(values.get(path))}" for path in autos)
        yield f'"auto" stands for the default: {", ".join(chosen)}.'
    if config.scheduler is not None:
        if notice := long_warmup(config.scheduler, config.monitor.total_steps):
            yield notice
        rate = None if config.optimizer is None else config.optimizer.params.get("lr")
        if notice := default_rate(config.scheduler, tree["scheduler"].get("params") or {}, rate):
            yield notice
    if may_be_deepspeeds and "gradient_clipping" not in tree:
        yield "gradient_clipping is not given: no clipping. DeepSpeed 0.19.8 clips at 1.0 there."
    if config.keep_fp32_modules and config.torch_autocast.enabled:
        yield "keep_fp32_modules has no effect under torch_autocast, which decides operation by operation."
    place = config.zero_optimization.offload_param
    if place.in_place and place.device in ("none", "cpu"):
        yield (
            'zero_optimization.offload_param.in_place has no effect without "device": "nvme": parameters in memory are '
            "not read from files."
        )
    decay, is_torchs = (written.get(("optimizer", "params", name)) for name in ("weight_decay", "torch_adam"))
    if written.get(("optimizer", "type")) == "AdamW" and decay is None and is_torchs is not True:
        yield "optimizer.params.weight_decay is not given and is 0.0, as in DeepSpeed; torch.optim.AdamW's own is 0.01."
