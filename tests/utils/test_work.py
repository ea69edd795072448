"""The combinator of works: what runs when."""

from __future__ import annotations

import pytest

from zeroengine.utils.work import Completed, Then


class ManualWork:
    """A work that is done when the test says so, and may fail."""

    def __init__(self) -> None:
        self.is_done, self.waits = False, 0
        self.error: BaseException | None = None

    def wait_stream(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error

    wait_host = wait_stream

    def done(self) -> bool:
        return self.is_done


def test_finish_runs_once_at_the_first_wait() -> None:
    work, calls = ManualWork(), []
    then = Then(work, lambda: calls.append(work.waits))
    assert not then.done() and not then.finished and not calls
    work.is_done = True
    assert then.done() and not then.finished, "finish may still have to run"
    then.wait_stream()
    then.wait_stream()
    then.wait_host()
    assert calls == [1] and then.finished and then.work is work


def test_a_wait_that_fails_leaves_finish_to_the_next_wait() -> None:
    work, calls = ManualWork(), []
    then = Then(work, lambda: calls.append("finished"))
    work.error = RuntimeError("interrupted")
    with pytest.raises(RuntimeError, match="interrupted"):
        then.wait_host()
    assert not calls
    work.error = None
    then.wait_host()
    assert calls == ["finished"]


def test_a_chain_finishes_from_the_inside_out() -> None:
    order: list[str] = []
    inner = Then(Completed(), lambda: order.append("inner"))
    outer = Then(inner, lambda: order.append("outer"))
    assert outer.done()
    outer.wait_stream()
    inner.wait_stream()
    assert order == ["inner", "outer"]


def test_a_wait_that_is_interrupted_in_the_second_operation_waits_for_it_again() -> None:
    second, started = ManualWork(), []
    then = Then(Completed(), lambda: started.append("second") or second, returns_work=True)
    second.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        then.wait_stream()
    assert not then.finished, "the result is not there"
    second.error = None
    then.wait_stream()
    assert then.finished and started == ["second"], "the second operation is a collective, which starts once"
