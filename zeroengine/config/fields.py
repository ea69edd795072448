"""Building blocks of the models: strict numbers, `"auto"`, and dicts that a model checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, GroupedMetadata, Gt, Le, Len, Lt, MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from zeroengine.utils.files import in_home

ABSENT = object()


@dataclass(frozen=True)
class Auto:
    """Marks a field in which any of `words` stands for `value`.

    Attributes:
        value: What the words stand for; the field's default if absent.
        words: The accepted words. None is JSON's null.
        kept: Values of the field that stay, and that a framework may replace all the same.
    """

    value: Any = ABSENT
    words: tuple[str | None, ...] = ("auto", None)
    kept: tuple[str, ...] = ()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the field's JSON Schema, which accepts null and the words as well."""
        # Words and null are added to whatever the field accepts otherwise, so editors do not mark them as errors.
        plain = handler(schema)
        choices = plain.pop("anyOf", None) or [dict(plain)]
        if None in self.words and {"type": "null"} not in choices:
            choices.append({"type": "null"})
        return {"anyOf": [*choices, *({"const": word} for word in self.words if word is not None)]}


AUTO = Auto()
NULL = Auto(words=(None,))
# A value that `initialize` replaces by its choice, unless a framework fills in the key before.
CHOSEN = "auto"


class Section(BaseModel):
    """One object of the configuration file: frozen, strictly typed, without unknown keys."""

    # Strict types refuse "1" for 1: a quoted number is a mistake, and a silent conversion would hide it. A model is
    # built when it is first used, mostly as a part of another one. Docstrings of fields are read where they are shown
    # (`reference.field_docstrings`): pydantic would parse the source of every model whenever zeroengine is imported.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, data: Any) -> Any:
        # pydantic reports a value of another kind itself, with a better message.
        if not isinstance(data, dict):
            return data
        # The caller's dict must not change, since it may be used again.
        resolved = dict(data)
        for name, field in cls.model_fields.items():
            marker = next((item for item in field.metadata if isinstance(item, Auto)), None)
            if marker is None or name not in data or data[name] not in marker.words:
                continue
            # Without the key the field takes its default, as if nothing had been written.
            if marker.value is ABSENT:
                del resolved[name]
            else:
                resolved[name] = marker.value
        return resolved


@dataclass(frozen=True)
class CheckedBy:
    """Marks a dict that `model` checks and completes with its defaults. The value stays a dict."""

    model: type[Section]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a dict that is checked as `model`."""
        # The checked section goes back into a dict, because optimizers take keyword arguments.
        return core_schema.no_info_after_validator_function(
            BaseModel.model_dump,
            handler.generate_schema(self.model),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


def _to_integer(value: Any) -> Any:
    """Return a float with an integral value as an int: people write 500000000 as 5e8, which JSON reads as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_nul(path: str) -> str:
    # No file system can store this character, and C code would cut the path there.
    if "\0" in path:
        raise ValueError("a path holds no NUL character; write the path of a folder")
    try:
        # Surrogates from a JSON escape cannot be part of a file name.
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("not text that can be encoded; write the path of a folder") from None
    return path


# These bounds lie far beyond any use. They keep arithmetic with written values from overflowing or taking for ever.
MAX_COUNT = 2**63 - 1
# The largest number that fp32 holds is a little above this.
MAX_FLOAT = 3e38


@dataclass(frozen=True)
class Between(GroupedMetadata):
    """Marks an integer from `low` to `high`."""

    low: int
    high: int

    def __iter__(self) -> Iterator[object]:
        """Yield what pydantic checks."""
        return iter((Ge(self.low), Le(self.high), BeforeValidator(_to_integer)))


Count = Annotated[int, Between(0, MAX_COUNT)]
Positive = Annotated[int, Between(1, MAX_COUNT)]
NonNegative = Annotated[float, Ge(0), Le(MAX_FLOAT)]
AboveZero = Annotated[float, Gt(0), Le(MAX_FLOAT)]
Folder = Annotated[str, AfterValidator(_without_nul), AfterValidator(in_home)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
# A file has no tuples, so the strict type alone would refuse every pair.
Betas = Annotated[tuple[Decay, Decay], Strict(False)]
# The discriminator makes an error speak of a number or of a list, and not of both.
_by_kind = Discriminator(lambda value: "list" if isinstance(value, (list, tuple)) else "number")
# One number for all param groups, or a list with one for each.
NonNegatives = Annotated[
    Annotated[NonNegative, Tag("number")] | Annotated[list[NonNegative], Strict(False), MinLen(1), Tag("list")],
    _by_kind,
]
# A number, or a pair of them.
OneOrTwo = Annotated[
    Annotated[int, Tag("number")] | Annotated[list[int], Strict(False), Len(2, 2), Tag("list")], _by_kind
]
Decays = Annotated[
    Annotated[Decay, Tag("number")] | Annotated[list[Decay], Strict(False), MinLen(1), Tag("list")], _by_kind
]
