"""Messages for users of another library's name: they become part of the error that Python raises anyway."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from zeroengine.errors import ZeroEngineError
from zeroengine.migration.names import ARGUMENTS, DEEPSPEED, ENGINE, ENGINE_PREFIXES, MODULE

P = ParamSpec("P")
R = TypeVar("R")


def engine_attribute(name: str, engine: object) -> str:
    """Return the message of the AttributeError for ``engine.name``."""
    plain = f"'{type(engine).__name__}' object has no attribute {name!r}"
    if name.startswith("_"):
        return plain
    if name in ENGINE:
        return f"{plain}, which is a name of {ENGINE[name].origin}. {ENGINE[name].advice}"
    if (configured := _configured(name)) is not None:
        return f"{plain}. {configured}."
    for prefix, note in ENGINE_PREFIXES.items():
        if name.startswith(prefix):
            return f"{plain}, which is a name of {DEEPSPEED}. {note}."
    if hasattr(vars(engine).get("module"), name):
        return f"{plain}. The model has it: write engine.module.{name}."
    return plain


# Code that looks for an attribute of another library's engine may do so in every step, so the answer is cached.
@functools.cache
def _configured(name: str) -> str | None:
    """Return the configuration key for the method ``name`` of DeepSpeed's engine, or why there is none."""
    from zeroengine.config import deepspeed_keys
    from zeroengine.config.keys import honoured_paths

    for path in (name, name.replace("zero_", "zero_optimization.", 1)):
        if path in honoured_paths():
            return f"Write engine.config.{path}"
        if path in deepspeed_keys.TABLE:
            return f"Of {path} in the configuration: {deepspeed_keys.TABLE[path].reason}"
    return None


def module_attribute(name: str) -> str | None:
    """Return the sentences that follow the error for ``zeroengine.name``, or None where there are none."""
    row = MODULE.get(name)
    return None if row is None else f"It is a name of {row.origin}. {row.advice}"


def comm_attribute(name: str) -> str:
    """Return the message of the AttributeError for ``zeroengine.comm.name``, where DeepSpeed has collectives."""
    plain = f"module 'zeroengine.comm' has no attribute {name!r}"
    # The other functions of deepspeed.comm have the names of torch.distributed.
    if name == "init_distributed":
        return f"{plain}, which is a name of {DEEPSPEED}. {MODULE[name].advice}"
    if not name.startswith("_") and hasattr(sys.modules.get("torch.distributed"), name):
        return f"{plain}. Write torch.distributed.{name}."
    return plain


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function in ``ARGUMENTS`` so that another library's keyword argument says what to write instead.

    Other unknown arguments raise Python's own TypeError.
    """
    name = function.__name__
    table = ARGUMENTS[name]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        foreign = {argument: table[argument] for argument in kwargs if argument in table}
        if foreign:
            lines = (f"{argument}= is {row.origin}'s. {row.advice}" for argument, row in foreign.items())
            raise ZeroEngineError(f"{name}(): {' '.join(lines)}")
        return function(*args, **kwargs)

    return checked
