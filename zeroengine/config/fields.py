"""The vocabulary of the models: strict numbers, `"auto"`, and parameters checked by a model but kept as a dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

ABSENT = object()


@dataclass(frozen=True)
class Auto:
    """Marks a field in which `words` may stand for `value`, which is the field's default unless given."""

    value: Any = ABSENT
    words: tuple[str | None, ...] = ("auto", None)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        plain = handler(schema)
        choices = plain.pop("anyOf", None) or [dict(plain)]
        if {"type": "null"} not in choices:
            choices.append({"type": "null"})
        return {"anyOf": [*choices, *({"const": word} for word in self.words if word is not None)]}


AUTO = Auto()
NULL = Auto(words=(None,))


class Section(BaseModel):
    """One object of the configuration file: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        resolved = dict(data)
        for name, field in cls.model_fields.items():
            marker = next((item for item in field.metadata if isinstance(item, Auto)), None)
            if marker is None or name not in data or data[name] not in marker.words:
                continue
            if marker.value is ABSENT:
                del resolved[name]
            else:
                resolved[name] = marker.value
        return resolved


@dataclass(frozen=True)
class CheckedBy:
    """Marks a dict that `model` checks, completes with its defaults, and gives back as a dict."""

    model: type[Section]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        to_dict: Callable[[Any], dict[str, Any]] = lambda params: params.model_dump()  # noqa: E731
        return core_schema.no_info_after_validator_function(
            to_dict,
            handler.generate_schema(self.model),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


def _integral(value: Any) -> Any:
    """5e8 is how people write 500000000; JSON reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path holds no NUL character; write the path of a folder")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("not text that can be encoded; write the path of a folder") from None
    return path


# Bounds far beyond use, so that arithmetic on what is written neither overflows nor takes for ever.
MAX_COUNT = 2**63 - 1
MAX_FLOAT = 3e38  # what fp32 holds

WHOLE = BeforeValidator(_integral)
Count = Annotated[int, Ge(0), Le(MAX_COUNT), WHOLE]
Positive = Annotated[int, Ge(1), Le(MAX_COUNT), WHOLE]
NonNegative = Annotated[float, Ge(0), Le(MAX_FLOAT)]
AboveZero = Annotated[float, Gt(0), Le(MAX_FLOAT)]
Folder = Annotated[str, AfterValidator(_without_nul)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Betas = Annotated[tuple[Decay, Decay], BeforeValidator(_as_tuple)]
