"""Messages for users of another library's name: they become part of the error that Python raises anyway."""

from __future__ import annotations

import difflib
import dis
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.migration.names import ARGUMENTS, DEEPSPEED, ENGINE, ENGINE_PREFIXES, MODULE, UNPACKED_CLIENT_STATE

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
    nearest = _nearest_name(name, tuple(dir(type(engine))))
    return plain if nearest is None else f"{plain}. The nearest name is {nearest}."


# Python's own suggestion is on the terminal alone; logs and reports of a launcher have the message.
@functools.cache
def _nearest_name(name: str, attributes: tuple[str, ...]) -> str | None:
    """Return the public one of `attributes` that `name` may be a misspelling of, or None."""
    public = [attribute for attribute in attributes if not attribute.startswith("_")]
    return next(iter(difflib.get_close_matches(name, public, n=1, cutoff=0.8)), None)


# Code that looks for an attribute of another library's engine may do so in every step, so the answer is cached.
@functools.cache
def _configured(name: str) -> str | None:
    """Return the configuration key for the method ``name`` of DeepSpeed's engine, or why there is none."""
    from zeroengine.config import deepspeed_keys
    from zeroengine.config.keys import honored_paths

    for path in (name, name.replace("zero_", "zero_optimization.", 1)):
        if path in honored_paths():
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

    Other unknown arguments raise Python's own TypeError. The traceback of a ``ZeroEngineError`` ends in the caller's
    code, for the sentence is about that; with ``ZEROENGINE_FULL_TRACEBACK=1`` it goes on into the package.
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

    return ends_in_callers_code(checked)


def ends_in_callers_code(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the traceback of a ``ZeroEngineError`` ends in the caller's code."""

    @functools.wraps(function)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ZeroEngineError as error:
            end_traceback_in_callers_code(error)
            raise

    return shortened


def end_traceback_in_callers_code(error: ZeroEngineError) -> None:
    """Leave out what comes after the last frame of the caller's code, or of torch, in the traceback of ``error``.

    Where the ranks diverged, the last frames of torch are those of a hook or an exchange of zeroengine, and the message
    quotes the error of the exchange: these are left out as well.
    """
    if os.environ.get("ZEROENGINE_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    internal = {"zeroengine", "contextlib"}
    if isinstance(error, DivergenceError):
        internal.add("torch")
        error.__cause__, error.__suppress_context__ = None, True
    entry = last_of_caller = error.__traceback__
    # Frames of the model and of torch may follow this one, such as those of a forward. Only what comes after the last
    # of them is left out.
    while entry is not None:
        if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] not in internal:
            last_of_caller = entry
        entry = entry.tb_next
    if last_of_caller is not None:
        last_of_caller.tb_next = None


def refuses_unpacking(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``load_checkpoint``, which returns one value where DeepSpeed's returns two.

    A dict would be unpacked into its keys, without a word where there are two. A tuple may be unpacked.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        # Only a dict or None can be a mistake. The frame is inspected only then, because disassembling it takes time.
        if (result is None or isinstance(result, dict)) and unpacks_result(sys._getframe(1)):
            raise ZeroEngineError(UNPACKED_CLIENT_STATE)
        return result

    return checked


def unpacks_result(frame: FrameType) -> bool:
    """Return whether ``frame``, which waits for a call to return, unpacks the result into several names.

    The statement ``first, second = function()`` does so. CPython compiles it to an UNPACK instruction directly after
    that of the call. ``f_lasti`` is the instruction of the call or one of its inline cache entries, which ``dis``
    leaves out (CPython 3.10 to 3.14).

    Args:
        frame: The frame of the caller, such as ``sys._getframe(1)``.
    """
    # The first instruction after the call decides: Python unpacks directly after the call or not at all.
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    return next((i.opname.startswith("UNPACK_") for i in following), False)
