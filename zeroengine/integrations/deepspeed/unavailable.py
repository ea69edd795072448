"""Names of DeepSpeed that zeroengine does not serve: importing one works, and using it says what to write instead."""

from __future__ import annotations

from typing import Any

from zeroengine.errors import ZeroEngineError
from zeroengine.migration.names import NOT_SERVED


class UnavailableClass:
    """The base of classes that are not served. Subclassing one works, and making an object of it raises."""

    _advice = ""

    def __init__(self, *args: object, **options: object) -> None:
        name = next(base.__name__ for base in type(self).__mro__ if "_advice" in vars(base))
        raise ZeroEngineError(f"deepspeed's {name} is not served by zeroengine: {self._advice}")


def _unavailable_class(name: str, advice: str) -> type[UnavailableClass]:
    return type(name, (UnavailableClass,), {"_advice": advice, "__doc__": f"Not served: {advice}."})


def _unavailable_function(name: str, advice: str) -> Any:
    def refuse(*args: object, **options: object) -> None:
        raise ZeroEngineError(f"deepspeed's {name}() is not served by zeroengine: {advice}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


NAMES: dict[str, Any] = {
    name: (_unavailable_class if name[0].isupper() else _unavailable_function)(name, row.clause)
    for name, row in NOT_SERVED.items()
}
