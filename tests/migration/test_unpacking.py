"""Whether a caller unpacks what a function returns."""

from __future__ import annotations

import sys
from typing import Any

from zeroengine.migration.messages import unpacks_result


def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A dict of two keys, whose unpacking is no error of Python's, and whether it is about to be unpacked."""
    return {"unpacked": unpacks_result(sys._getframe(1)), "other": None}


class Holder:
    def method(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"unpacked": unpacks_result(sys._getframe(1)), "other": seen.append(unpacks_result(sys._getframe(1)))}


seen: list[bool] = []


def test_unpacking_is_told_from_every_other_use() -> None:
    seen.clear()
    holder, more = Holder(), {"key": 1}
    first, second = holder.method()
    first, second = holder.method("folder", tag=None)
    first, second = holder.method(*[1], **more)
    (first, *rest) = holder.method("folder")
    assert {key: value for key, value in [holder.method()]} == {"unpacked": "other"}  # the call is over by then
    assert (first, second, rest) == ("unpacked", "other", ["other"])
    assert seen == [True, True, True, True, False]

    whole = answer()
    with_arguments = answer("folder", tag=None)
    values = [answer(), dict(answer()), {**answer()}, dict(**answer()), answer() or None]
    assert len(answer()) == 2 and list(answer()) == ["unpacked", "other"]
    for key in answer():
        assert key in ("unpacked", "other")
    first, second = whole  # the call is over
    first, second = answer(), answer()
    first, second = answer()["unpacked"], answer().get("unpacked")
    assert not any(value["unpacked"] for value in (whole, with_arguments, *values)) and not first and not second
    assert [key for key in answer()] == [*answer()] and not (lambda: answer())()["unpacked"]


def test_it_is_told_while_a_debugger_traces() -> None:
    seen.clear()
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        first, second = Holder().method("folder")
        whole = Holder().method("folder")
    finally:
        sys.settrace(before)
    assert seen == [True, False] and (first, second) == ("unpacked", "other") and not whole["unpacked"]
