"""What a gatherer says of the limits that hold it back."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.nccl_over_gloo import use_nccl_transport


def notices(max_live: int) -> list[str]:
    """What is said of ``max_live_parameters`` in three steps that gather ahead."""
    dist.init_process_group("gloo")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    logging.getLogger("zeroengine").setLevel(logging.INFO)
    zero = {"prefetch_bucket_size": 10**6, "max_live_parameters": max_live}
    with pytest.MonkeyPatch.context() as patch:
        use_nccl_transport(patch)
        engine = zeroengine.initialize(build(), None, config(3, zero_optimization=zero))
        for step in range(3):
            engine.backward(engine(*batch(step, engine.rank)))
            engine.step()
        engine.close()
    return [line for line in said if "max_live_parameters" in line]


def test_a_limit_that_alone_stops_gathers_is_named_once_with_what_it_should_be() -> None:
    (line,), others = run_ranks(2, notices, 5000)
    assert line.startswith("zero_optimization.max_live_parameters (5000) stops gathers that prefetch_bucket_size")
    needed = int(line.partition("write at least ")[2].split()[0])
    assert needed > 5000 and others == []
    # What it says is true.
    assert run_ranks(2, notices, 10 * needed) == [[], []]
