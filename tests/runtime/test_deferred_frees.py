"""The memory of a released unit that another tensor shares: freed as soon as that tensor is gone."""

from __future__ import annotations

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


def test_a_unit_is_freed_once_no_tensor_shares_its_memory() -> None:
    run_ranks(2, drop_a_view_between_forwards)
