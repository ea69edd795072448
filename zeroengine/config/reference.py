"""Generate the JSON Schema from the models and from DeepSpeed's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroengine.config import deepspeed_keys
from zeroengine.config.model import Config

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
    values = {"enum": ["auto", *(value for value in row.off if not isinstance(value, list))]}
    switched_off = {"properties": {row.switch: {"enum": list(deepspeed_keys.SWITCHED_OFF)}}}
    block = {"type": "object", **(switched_off if row.switch else {"maxProperties": 0})}
    return {"description": f"Refused: {row.reason}.", "anyOf": [values, block]}
