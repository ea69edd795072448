"""Generate the JSON Schema from the models, the docstrings of their fields, and DeepSpeed's table."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from zeroengine.config import deepspeed_keys
from zeroengine.config.fields import Section
from zeroengine.config.keys import checked_models
from zeroengine.config.model import Config

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return a JSON Schema (draft 2020-12) of the file, with second spellings and DeepSpeed's other keys."""
    schema = Config.model_json_schema()
    for model in _models_below(Config):
        properties = (schema if model is Config else schema["$defs"][model.__name__])["properties"]
        for field, text in field_docstrings(model).items():
            item = properties[model.model_fields[field].alias or field]
            # pydantic sorts the keys, too.
            properties[model.model_fields[field].alias or field] = dict(sorted({**item, "description": text}.items()))
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


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the strings below the fields of a model and of the models that it inherits from, by the field's name."""
    texts = field_docstrings(base) if (base := model.__base__) and base not in (BaseModel, Section) else {}
    definition = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(definition, ast.ClassDef)
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                texts[field.target.id] = inspect.cleandoc(below.value.value)
    return {name: texts[name] for name in model.model_fields if name in texts}


def _models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        for inner in checked_models(info):
            yield from _models_below(inner)


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
