"""Generate the JSON Schema and the tables of docs/configuration.md from the models and from DeepSpeed's table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from zeroengine.config import deepspeed_keys
from zeroengine.config.keys import checked_models
from zeroengine.config.model import Config
from zeroengine.config.optimizers import ImportedOptimizerConfig

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return a JSON Schema (draft 2020-12) of the file, with second spellings and DeepSpeed's other keys."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "zeroengine configuration"
    # The loader accepts second spellings, so an editor that uses the schema must not mark them.
    for written, canonical in deepspeed_keys.ALIASES.items():
        *path, name = canonical.split(".")
        *written_path, spelling = written.split(".")
        for canonical_section in _sections(schema, schema, path):
            for section in _sections(schema, schema, written_path):
                section["properties"][spelling] = canonical_section["properties"][name]
    for row in deepspeed_keys.TABLE.values():
        *path, name = row.path.split(".")
        for section in _sections(schema, schema, path):
            section["properties"][name] = _row_schema(row)
    # pydantic's titles repeat the names of the classes, which mean nothing to somebody who writes a file.
    for definition in schema["$defs"].values():
        definition.pop("title")
    for definition in (schema, *schema["$defs"].values()):
        for item in definition["properties"].values():
            item.pop("title", None)
            # Defaults of sections repeat those of their fields.
            if isinstance(item.get("default"), dict):
                del item["default"]
    return schema


def _sections(root: Schema, schema: Schema, path: list[str]) -> Iterator[Schema]:
    """Yield the schemas of the objects at `path`, of which `optimizer.params` has one for each type.

    A missing object is added. Objects that may hold any keys are left out.
    """
    if "$ref" in schema:
        yield from _sections(root, root["$defs"][schema["$ref"].rpartition("/")[2]], path)
    elif choices := schema.get("anyOf") or schema.get("oneOf"):
        for choice in choices:
            yield from _sections(root, choice, path)
    # Such an object takes any keys, so nothing can be added to it.
    elif schema.get("type") == "object" and "properties" not in schema:
        return
    elif schema.get("type") == "object" and not path:
        yield schema
    elif schema.get("type") == "object":
        block = {"type": "object", "properties": {}, "additionalProperties": False}
        yield from _sections(root, schema["properties"].setdefault(path[0], block), path[1:])


def _row_schema(row: deepspeed_keys.DeepSpeedKey) -> Schema:
    if row.status == "no effect":
        return {"description": f"No effect: {row.reason}."}
    if row.path.startswith(("bf16.", "fp16.")):
        # The loader ignores the key where that precision is off, so a schema cannot refuse its values.
        return {"description": f"Refused: {row.reason}."}
    # A refused key may still have a value that asks for nothing.
    accepted: list[Schema] = [{"enum": ["auto", *(value for value in row.off if not isinstance(value, list))]}]
    if row.switch:
        accepted.append({"type": "object", "properties": {row.switch: {"enum": list(deepspeed_keys.SWITCHED_OFF)}}})
    else:
        accepted.append({"type": "object", "maxProperties": 0})
    return {"description": f"Refused: {row.reason}.", "anyOf": accepted}


def honoured_table() -> str:
    """Return every key of the models, its default, and its docstring, as a Markdown table."""
    spellings: dict[str, list[str]] = {}
    for written, canonical in deepspeed_keys.ALIASES.items():
        same_section = written.rpartition(".")[0] == canonical.rpartition(".")[0]
        spellings.setdefault(canonical, []).append(written.rpartition(".")[2] if same_section else written)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for path, default, text in _honoured(Config, ""):
        also = "".join(f" (also `{name}`)" for name in spellings.get(path, []))
        rows.append(f"| `{path}`{also} | {default} | {text} |".replace("\n", " "))
    return "\n".join(rows)


def deepspeed_table() -> str:
    """Return DeepSpeed's other keys, and how each is treated here, as a Markdown table."""
    rows = ["| DeepSpeed key | here | why | silent where |", "|---|---|---|---|"]
    for row in deepspeed_keys.TABLE.values():
        off = ", ".join(f"`{json.dumps(value)}`" for value in row.off)
        rows.append(f"| `{row.path}` | {row.status} | {row.reason} | {off} |")
    return "\n".join(rows)


def _honoured(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the default and the description of every key of `model`, whose path begins with `prefix`."""
    for name, info in model.model_fields.items():
        path, inner = f"{prefix}{info.alias or name}", checked_models(info)
        if name in ("optimizer", "scheduler"):
            yield path, "`null`", info.description or ""
            for member in inner:
                kind = member.model_fields["type"]
                # A class named by its import path has no fixed name that could stand in the table.
                named = member is not ImportedOptimizerConfig
                type_name = get_args(kind.annotation)[0] if named else "package.Class"
                yield f'{path}.type = "{type_name}"', "", kind.description or ""
                for params in checked_models(member.model_fields["params"]):
                    yield from _honoured(params, f"{path}.params.")
                if not named:
                    yield f"{path}.params", "`{}`", member.model_fields["params"].description or ""
        elif inner:
            for section in inner:
                yield from _honoured(section, f"{path}.")
        else:
            default = "required" if info.is_required() else f"`{json.dumps(info.default)}`"
            yield path, default, info.description or ""
