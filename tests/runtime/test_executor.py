"""What interrupts an event leaves the schedule and the units as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.runtime import forward
from zeroengine.runtime.reduce_launcher import ReduceLauncher
from zeroengine.runtime.unit import Unit


@contextmanager
def raising(owner: Any, name: str, at: int, error: type[BaseException]) -> Iterator[None]:
    """Let the call of a number raise, once."""
    function: Callable[..., Any] = getattr(owner, name)
    remaining = [at]

    def run(*args: Any, **options: Any) -> Any:
        remaining[0] -= 1
        if not remaining[0]:
            raise error
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, run)
        yield


def interrupted(at: int) -> list[float]:
    """Losses after a forward that Ctrl-C has ended between a backward and its step; 0: there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    zero = {"overlap_comm": False}
    engine = zeroengine.initialize(build(), None, config(3, zero_optimization=zero, comm={"transport": "gloo"}))
    take_steps(engine, range(1))
    engine.backward(engine(*batch(1, engine.rank)))
    if at:
        with raising(forward, "replace_saved_views", at, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            engine(*batch(2, engine.rank))
    engine.step()
    return take_steps(engine, range(3, 6))


def interruptions() -> list[list[float]]:
    return [interrupted(at) for at in range(4)]


def test_a_forward_that_is_interrupted_changes_no_loss() -> None:
    for losses in run_ranks(2, interruptions):
        assert losses[1:] == losses[:1] * 3


def pin_that_fails() -> list[float]:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(), None, config(3))
    take_steps(engine, range(1))
    with raising(Unit, "start_gather", 2, MemoryError), pytest.raises(MemoryError):
        with zeroengine.gathered(engine.module):
            raise AssertionError("this is not reached")
    return take_steps(engine, range(1, 3))


def test_training_goes_on_after_a_gathered_whose_gather_fails() -> None:
    assert all(len(losses) == 2 for losses in run_ranks(2, pin_that_fails))


def frozen_backward() -> int:
    """The reduces in the backward of another model's loss through a model that is frozen for a while."""
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    engine = zeroengine.initialize(model, None, config(3))
    model.requires_grad_(False)
    reduces = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceLauncher, "launch", lambda *_: reduces.__setitem__(0, reduces[0] + 1))
        made = torch.ones(2, 8, requires_grad=True)  # by a generator, say
        engine.backward(engine(made).sum())
    assert made.grad is not None
    return reduces[0]


def test_a_backward_of_a_frozen_model_reduces_nothing() -> None:
    assert run_ranks(2, frozen_backward) == [0, 0]
