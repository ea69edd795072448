"""`checkpoint.on_signal`: all ranks save after the same step and end, whichever of them get the signal."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.checkpoint.models import engine_at
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine.checkpoint import agreement, on_signal
from zeroengine.comm.group import Group
from zeroengine.config import load
from zeroengine.errors import ConfigError

MORE = 4  # steps after going on


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"on_signal": "SIGUSR1", "directory": str(folder), **more}


def train_until_signalled(folder: Path, to: dict[int, int], background: bool, every: float) -> tuple[object, int]:
    """Returns the exit code, and the steps taken. `to` has the step at which each rank is signalled."""
    on_signal.INTERVAL_S = every
    engine = engine_at(2, checkpoint=settings(folder, async_save=background))
    try:
        for step in range(3 * agreement.MAX_STEPS):
            if to.get(engine.rank) == step:
                os.kill(os.getpid(), signal.SIGUSR1)
            take_steps(engine, range(step, step + 1))
    except SystemExit as end:
        return end.code, engine.global_steps
    raise AssertionError("trained to the end")


def go_on(folder: Path) -> tuple[int, list[float]]:
    engine = engine_at(2, seed=9, checkpoint=settings(folder))
    engine.load_checkpoint(folder)
    begin = engine.global_steps
    losses = take_steps(engine, range(begin, begin + MORE))
    engine.close()
    return begin, losses


def reference(steps: int) -> list[float]:
    return take_steps(engine_at(2), range(steps))


@pytest.mark.parametrize(
    ("world_size", "to", "background", "every", "most"),
    [
        # In the next one a rank hears it before the other, too.
        pytest.param(2, {1: 2}, False, 0, 2, marks=pytest.mark.slow),
        (2, {0: 2, 1: 3}, True, 0, 2),
        pytest.param(1, {0: 2}, False, 1, 1, marks=pytest.mark.slow),
        (2, {1: 20}, False, 0.1, 110),
    ],
    ids=["one rank hears it", "ranks hear it at different steps", "one rank alone", "short steps"],
)
def test_training_goes_on_where_a_signal_ended_it(
    tmp_path: Path, world_size: int, to: dict[int, int], background: bool, every: float, most: int
) -> None:
    """At most so many steps after the first of the ranks heard it."""
    ended = run_ranks(world_size, train_until_signalled, tmp_path / "runs/a", to, background, every)
    codes, steps = zip(*ended, strict=True)
    assert set(codes) == {75} and len(set(steps)) == 1 and steps[0] <= min(to.values()) + most
    expected = run_ranks(world_size, reference, steps[0] + MORE)
    for rank, (begin, losses) in enumerate(run_ranks(world_size, go_on, tmp_path / "runs/a")):
        assert begin == steps[0]
        assert losses == expected[rank][begin:]


def steps_until_agreed() -> int:
    """How many short steps go by from the one at which rank 1 asks to the one at which both ranks agree."""
    rank = start()
    agreed = agreement.StepAgreement(Group(None, torch.device("cpu")), "agree on a signal", interval_s=1000.0)
    for _ in range(3):
        assert not agreed.end_step(False)
    steps = 1
    while not agreed.end_step(rank == 1):
        steps += 1
    agreed.close()
    return steps


def test_the_steps_between_two_questions_do_not_grow_with_the_number_of_ranks() -> None:
    first, second = run_ranks(2, steps_until_agreed)
    # The question is asked at the end of the last of these steps, and answered at the end of the next one.
    assert first == second <= agreement.MAX_STEPS + 1


def listen_in_turn(folder: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    engine = engine_at(0, checkpoint=settings(folder))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard, "who listened before still hears it"
    with pytest.raises(zeroengine.ZeroEngineError, match="another engine of this process saves at a signal"):
        engine_at(0, checkpoint=settings(folder))
    engine.close()
    before = signal.getsignal(signal.SIGUSR1)
    dropped = engine_at(0, checkpoint=settings(folder))
    assert signal.getsignal(signal.SIGUSR1) != before
    del dropped
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) == before
    engine = engine_at(0, checkpoint=settings(folder))
    take_steps(engine, range(3))  # the signal was the first engine's
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    engine.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, "who began to listen later goes on"

    raised: list[Exception] = []

    def elsewhere() -> None:
        try:
            engine_at(0, checkpoint=settings(folder))
        except zeroengine.ZeroEngineError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
    (folder.parent / "file").touch()
    with pytest.raises(zeroengine.ZeroEngineError, match=r"checkpoint.directory .*: cannot be made a folder"):
        engine_at(0, checkpoint=settings(folder.parent / "file/runs"))


def test_one_engine_listens_beside_whoever_listened_before(tmp_path: Path) -> None:
    run_ranks(1, listen_in_turn, tmp_path / "runs")


def test_a_signal_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match='on_signal needs a folder to save in; write "directory": "runs/a"'):
        load({"checkpoint": {"on_signal": "SIGUSR1"}})
    with pytest.raises(ConfigError, match="SIGUSR2"):
        load({"checkpoint": {"on_signal": "SIGTERM", "directory": "a"}})
