"""A rank that is killed at any instant, while training or saving, costs nothing but the steps since the last save."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import zeroengine
from tests.checkpoint.models import engine_at
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.manifest import find_damage

STEPS = 400


def train_until_killed(folder: Path, stage: int, victim: int, last: int, delay: float, background: bool) -> None:
    """Saves after every step, the last three kept. The victim ends after step ``last``, the other rank by an error."""
    engine = engine_at(stage, checkpoint={"keep": 3, "async_save": background}, comm={"timeout_seconds": 10})
    for step in range(STEPS):
        take_steps(engine, range(step, step + 1))
        engine.save_checkpoint(folder)
        if step == 0:
            engine.wait_for_checkpoint()
        if step == last and engine.rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    raise AssertionError("nobody was killed")


def outlive(*args: Any) -> str:
    try:
        train_until_killed(*args)
    except zeroengine.ZeroEngineError:
        os._exit(0)  # its connections are broken
    return ""


def go_on(folder: Path, stage: int, steps: int) -> tuple[int, list[float]]:
    engine = engine_at(stage, seed=9)
    engine.load_checkpoint(folder)
    at = engine.global_steps
    return at, take_steps(engine, range(at, at + steps))


def reference(stage: int, steps: int) -> list[float]:
    return take_steps(engine_at(stage), range(steps))


def check_kills(root: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    resumed: dict[int, list[tuple[int, list[float], Any]]] = {}
    for number in range(count):
        folder, stage = root / str(number), chance.choice((1, 3))
        victim, delay, background = chance.randrange(2), chance.uniform(0.0, 1.0), chance.random() < 0.5
        # On a slow machine the delay alone would be over in the first step each time.
        arguments = (folder, stage, victim, 2 * (number % 3), delay, background)
        run_ranks(2, outlive, *arguments, missing=(0, 1))
        tag = CheckpointFolder(folder).latest()
        directory = CheckpointFolder(folder)
        assert not find_damage(directory.checkpoint(tag), directory.manifest(tag)), arguments
        at, losses = run_ranks(2, go_on, folder, stage, 3)[0]
        assert tag == f"step-{at}"
        resumed.setdefault(stage, []).append((at, losses, arguments))
    assert len({at for runs in resumed.values() for at, *_ in runs}) > 1, "they were all killed at one place"
    for stage, runs in resumed.items():
        expected = run_ranks(2, reference, stage, 3 + max(at for at, *_ in runs))[0]
        for at, losses, arguments in runs:
            assert losses == expected[at : at + 3], arguments


def test_a_killed_rank_costs_only_the_steps_since_the_last_save(tmp_path: Path) -> None:
    check_kills(tmp_path, 3, seed=7)  # both stages, victims and kinds of saves


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 50, seed=1)
