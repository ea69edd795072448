"""Names that a package imports when they are first used, so that what needs no torch starts without it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def exports(
    package: str, explain: Callable[[str], str | None] | None = None, /, **modules: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``: each name comes from the module of the package that lists it.

    They stand in the branch that type checkers leave out, beside the imports that these follow instead::

        if TYPE_CHECKING:
            from .engine import Engine
        else:
            __getattr__, __dir__ = exports(__name__, engine=["Engine"])

    Args:
        explain: what to say of a name that the package has not, beside that; None where there is nothing.
        modules: the names in each.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            more = None if explain is None else explain(name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{f'. {more}' if more else ''}")
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})
