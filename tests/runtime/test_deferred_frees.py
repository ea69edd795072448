"""The memory of a released unit that another tensor shares: freed as soon as that tensor is gone."""

from __future__ import annotations

import logging

import zeroengine
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, start


def drop_a_view_between_forwards() -> None:
    start()
    engine = make_engine(Task(), 3)
    engine.eval()
    engine(*batch(0, engine.rank))
    with zeroengine.gathered(engine.module):
        view = engine.module.blocks[1].up.weight.detach()
    assert engine.memory().gathered > 0, "the view has values"
    del view
    assert engine.memory().gathered == 0


def warnings_of_a_view_that_is_kept() -> tuple[list[str], int]:
    """The warnings before the first step and after the second, and the bytes of the view's unit."""
    start()
    engine = make_engine(Task(), 3)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    views = []
    for step in range(2):
        with zeroengine.gathered(engine.module):
            views.append(engine.module.blocks[1].up.weight.detach())
        engine.backward(engine(*batch(step, engine.rank)))
        messages.append("step")
        nbytes = engine.memory().gathered
        engine.step()
    return messages, nbytes


def test_a_view_that_is_kept_is_reported_once_at_a_step_with_the_size() -> None:
    for messages, nbytes in run_ranks(2, warnings_of_a_view_that_is_kept):
        assert len(messages) == 3 and messages[0] == messages[2] == "step"
        assert f"{nbytes / 1024:.1f} KiB of parameters are held at a step (blocks.1): a tensor shares" in messages[1]


def test_a_unit_is_freed_once_no_tensor_shares_its_memory() -> None:
    run_ranks(2, drop_a_view_between_forwards)
