"""Micro-steps add up on every transport, whichever of their reduces ends first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, settings, train_plainly
from tests.nccl_over_gloo import ReduceScatter, use_nccl_transport

TASK = Task(factory=functools.partial(TinyLM, blocks=5), steps=2, micro_steps=2)
# The degrees of parameters, gradients and optimizer that the stages have, and others.
DEGREES = [(1, 1, 1), (1, 1, 4), (1, 4, 4), (4, 4, 4), (1, 2, 4), (2, 2, 2), (2, 4, 4)]
# A sum that travels in another dtype than the one that it is added in.
NARROW = {"communication_data_type": "bf16"}
SUMS: list[dict[str, Any]] = [{}, NARROW]
micro_step = 0


class EarlyThenLate(ReduceScatter):
    """Reduces of a first micro-step are done when somebody asks, and those of later ones are not."""

    def __init__(self, target: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(target, full, group)
        is_early = micro_step % TASK.micro_steps == 0
        self.is_completed: Callable[[], bool] = lambda: is_early and bool(self._work.wait())


def losses_on(transport: str, chosen: list[tuple[int, int, int]]) -> list[list[float]]:
    """This rank's losses, for each of ``SUMS`` and of the chosen degrees."""
    global micro_step
    dist.init_process_group("gloo")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if transport == "nccl":
            use_nccl_transport(patch)
            patch.setattr("zeroengine.comm.transports.nccl._reduce_scatter", EarlyThenLate)
        if transport == "two-level":
            imagine_hosts(2)
        comm = {"transport": {"nccl": "auto", "two-level": "auto"}.get(transport, transport)}
        for more in SUMS:
            for triple in chosen:
                given = settings(TASK, 0, units=["blocks.*"], comm=comm, **more)
                degrees = dict(zip(("parameters", "gradients", "optimizer"), triple, strict=True))
                given["zero_optimization"] = {"degrees": degrees, "param_persistence_threshold": 0}
                model = build(TASK.factory)
                engine = zeroengine.initialize(model, TASK.optimizer(model), given)
                losses = []
                for micro_step in range(TASK.steps * TASK.micro_steps):
                    loss = engine(*batch(micro_step, engine.rank))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                engine.close()
                found.append(losses)
    return found


def assert_plain(transport: str, chosen: list[tuple[int, int, int]]) -> None:
    ranks = run_ranks(4, losses_on, transport, chosen)
    cases = [(more, triple) for more in SUMS for triple in chosen]
    for number, (more, triple) in enumerate(cases):
        means = [sum(losses) / 4 for losses in zip(*(found[number] for found in ranks), strict=True)]
        tolerance = 1e-3 if more else 1e-6
        assert means == pytest.approx(train_plainly(TASK, 4).losses, rel=tolerance), (more, triple)


def test_reduces_that_end_late_over_nccl_add_to_those_that_ended_early() -> None:
    assert_plain("nccl", [(1, 2, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "two-level", "nccl"])
def test_micro_steps_add_up_to_the_losses_of_plain_pytorch_at_all_degrees(transport: str) -> None:
    assert_plain(transport, DEGREES)
