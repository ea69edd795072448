"""The JSON Schema and the tables of docs/configuration.md, both made from the models and from DeepSpeed's table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from zeroengine.config import deepspeed_keys
from zeroengine.config.keys import checked_models
from zeroengine.config.model import Config
from zeroengine.config.optimizers import ByImportPath

Schema = dict[str, Any]


def json_schema() -> Schema:
    """A JSON Schema (draft 2020-12) of the file, with second spellings and DeepSpeed's other keys."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "zeroengine configuration"
    for written, canonical in deepspeed_keys.ALIASES.items():
        *path, name = canonical.split(".")
        *beside, spelling = written.split(".")
        for home in _sections(schema, schema, path):
            for section in _sections(schema, schema, beside):
                section["properties"][spelling] = home["properties"][name]
    for row in deepspeed_keys.TABLE.values():
        *path, name = row.path.split(".")
        for section in _sections(schema, schema, path):
            section["properties"][name] = _row_schema(row)
    for definition in schema["$defs"].values():
        definition.pop("title")
    for definition in (schema, *schema["$defs"].values()):
        for item in definition["properties"].values():
            item.pop("title", None)
            if isinstance(item.get("default"), dict):
                del item["default"]
    return schema


def _sections(root: Schema, schema: Schema, path: list[str]) -> Iterator[Schema]:
    """The object schemas at a path; `optimizer.params` has one per type. Missing ones are made, free ones left out."""
    if "$ref" in schema:
        yield from _sections(root, root["$defs"][schema["$ref"].rpartition("/")[2]], path)
    elif choices := schema.get("anyOf") or schema.get("oneOf"):
        for choice in choices:
            yield from _sections(root, choice, path)
    elif schema.get("type") == "object" and "properties" not in schema:
        return
    elif schema.get("type") == "object" and not path:
        yield schema
    elif schema.get("type") == "object":
        block = {"type": "object", "properties": {}, "additionalProperties": False}
        yield from _sections(root, schema["properties"].setdefault(path[0], block), path[1:])


def _row_schema(row: deepspeed_keys.Row) -> Schema:
    if row.fate == deepspeed_keys.NO_EFFECT:
        return {"description": f"No effect: {row.why}."}
    if row.path.startswith(("bf16.", "fp16.")):
        return {"description": f"Refused: {row.why}."}  # but of no account where that precision is off
    silent: list[Schema] = [{"enum": ["auto", *(value for value in row.off if not isinstance(value, list))]}]
    if row.switch:
        silent.append({"type": "object", "properties": {row.switch: {"enum": list(deepspeed_keys.OFF)}}})
    else:
        silent.append({"type": "object", "maxProperties": 0})
    return {"description": f"Refused: {row.why}.", "anyOf": silent}


def honoured_table() -> str:
    """Markdown: every key of our models, its default, and its docstring."""
    second: dict[str, list[str]] = {}
    for written, canonical in deepspeed_keys.ALIASES.items():
        beside = written.rpartition(".")[0] == canonical.rpartition(".")[0]
        second.setdefault(canonical, []).append(written.rpartition(".")[2] if beside else written)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for path, default, text in _honoured(Config, ""):
        also = "".join(f" (also `{name}`)" for name in second.get(path, []))
        rows.append(f"| `{path}`{also} | {default} | {text} |".replace("\n", " "))
    return "\n".join(rows)


def fates_table() -> str:
    """Markdown: DeepSpeed's other keys, and what becomes of each."""
    rows = ["| DeepSpeed key | here | why | silent where |", "|---|---|---|---|"]
    for row in deepspeed_keys.TABLE.values():
        silent = ", ".join(f"`{json.dumps(value)}`" for value in row.off)
        rows.append(f"| `{row.path}` | {row.fate} | {row.why} | {silent} |")
    return "\n".join(rows)


def _honoured(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, info in model.model_fields.items():
        path, inner = f"{prefix}{info.alias or name}", checked_models(info)
        if name in ("optimizer", "scheduler"):
            yield path, "`null`", info.description or ""
            for member in inner:
                kind = member.model_fields["type"]
                named = member is not ByImportPath
                yield f'{path}.type = "{member.__name__ if named else "package.Class"}"', "", kind.description or ""
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
