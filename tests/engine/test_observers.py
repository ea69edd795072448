"""Observers get the moments of a step in one order, and their state travels in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.checkpointing import EngineCheckpoints
from zeroengine.engine.observers import build_observers
from zeroengine.monitor.observer import Observer, overriding

BEGAN, ENDED, LOSS, DROPPED, REDUCED = "forward_began", "forward_ended True", "loss_noted", "dropped", "reduced"
MICRO, MET = "micro_step_ended False", "micro_step_ended True"


class Recorder(Observer):
    """Keeps the moments."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def forward_began(self, args: Any, kwargs: Any) -> None:
        self.moments.append(BEGAN)

    def forward_ended(self, completed: bool) -> None:
        self.moments.append(f"forward_ended {completed}")

    def loss_noted(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        self.moments.append(LOSS)

    def gradients_dropped(self) -> None:
        self.moments.append(DROPPED)

    def gradients_reduced(self) -> None:
        self.moments.append(REDUCED)

    def micro_step_ended(self, ranks_meet: bool) -> None:
        self.moments.append(f"micro_step_ended {ranks_meet}")

    def step_ended(self, number: int) -> None:
        self.moments.append(f"step_ended {number}")

    def take(self) -> list[str]:
        """Return the moments since the last call."""
        moments, self.moments = self.moments, []
        return moments


class StepCounter(Observer):
    """Counts steps over all runs that go on from one another."""

    num_steps = 0

    def step_ended(self, number: int) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


def engine_with(added: Sequence[Observer], stage: int = 3, **settings: Any) -> zeroengine.Engine:
    """Return an engine with further observers, behind its own."""
    start()

    def build_all(parts: EngineParts, checkpoints: EngineCheckpoints) -> tuple[Observer, ...]:
        return *build_observers(parts, checkpoints), *added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroengine.engine.step_loop.build_observers", build_all)
        return zeroengine.initialize(build(), config=config(stage, **settings))


def run_micro_step(engine: zeroengine.Engine, number: int = 0, factor: float = 1.0) -> bool:
    engine.backward(engine(*batch(number, engine.rank)) * factor)
    return bool(engine.step())


def moments_of_steps() -> None:
    recorder = Recorder()
    engine = engine_with([recorder], gradient_accumulation_steps=2)
    assert not run_micro_step(engine)
    assert recorder.take() == [BEGAN, ENDED, LOSS, MICRO]
    assert run_micro_step(engine)
    assert recorder.take() == [BEGAN, ENDED, LOSS, REDUCED, MET, "step_ended 1"]
    # An evaluation is no forward of training, whichever sign of one it has.
    with torch.no_grad():
        engine(*batch(0, 0))
    engine.eval()
    engine(*batch(0, 0))
    engine.train()
    assert recorder.take() == []
    # A step starts again.
    run_micro_step(engine)
    recorder.take()
    engine.zero_grad()
    assert recorder.take() == [DROPPED]
    # A forward that raises ends as well.
    with pytest.raises(TypeError):
        engine(*batch(0, 0), nonsense=True)
    assert recorder.take() == [BEGAN, "forward_ended False"]
    engine.close()
    assert recorder.take() == []


def test_the_moments_of_a_step_come_in_their_order() -> None:
    run_ranks(1, moments_of_steps)


def moments_of_plain_steps() -> None:
    recorder = Recorder()
    engine = engine_with([recorder], gradient_accumulation_steps=2)
    for number in range(2):
        engine.module(*batch(number, 0)).backward()
    engine.optimizer.step()
    # ``optimizer.step()`` ends all micro-steps at once, and a plain backward does not show its loss.
    assert recorder.take() == [BEGAN, ENDED, BEGAN, ENDED, REDUCED, MET, "step_ended 1"]


def test_a_plain_loop_has_the_moments_that_it_shows() -> None:
    run_ranks(1, moments_of_plain_steps)


def moments_of_a_skipped_step() -> None:
    recorder = Recorder()
    engine = engine_with([recorder], fp16={"enabled": True, "initial_scale_power": 4})
    assert not run_micro_step(engine, factor=float("inf"))
    assert engine.skipped_steps == 1
    assert recorder.take() == [BEGAN, ENDED, LOSS, REDUCED, MET, "step_ended 1"]
    assert run_micro_step(engine)
    assert recorder.take()[-1] == "step_ended 2"


def test_a_skipped_step_has_the_moments_of_a_step() -> None:
    run_ranks(1, moments_of_a_skipped_step)


def moments_of_a_round() -> list[str]:
    recorder = Recorder()
    engine = engine_with([recorder], 0, local_steps={"steps": 2, "replica_ranks": 1})
    take_steps(engine, range(2))
    return [moment for moment in recorder.moments if moment.startswith("micro_step_ended")]


def test_ranks_of_replicas_meet_in_the_last_step_of_a_round() -> None:
    assert run_ranks(2, moments_of_a_round) == [[MICRO, MET]] * 2


def order_of_observers(folder: Path) -> list[str]:
    start()
    names: list[str] = []

    def build_and_name(parts: EngineParts, checkpoints: EngineCheckpoints) -> tuple[Observer, ...]:
        observers = build_observers(parts, checkpoints)
        names.extend(type(observer).__name__ for observer in observers)
        return observers

    settings: dict[str, Any] = {
        "monitor": {"folder": str(folder / "run")},
        "digests": {"every": 1},
        "replay": {"keep": 1},
        "checkpoint": {"on_signal": "SIGUSR1", "directory": str(folder)},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroengine.engine.step_loop.build_observers", build_and_name)
        zeroengine.initialize(build(), config=config(1, **settings)).close()
        zeroengine.initialize(build(), config=config(1)).close()
    return names


def test_observers_are_the_same_and_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    all_of_them = ["RankComparison", "StepRecords", "StepRecorder", "StateDigests", "Reports", "EngineCheckpoints"]
    # What nothing asks for does not observe.
    assert run_ranks(2, order_of_observers, tmp_path) == [[*all_of_them, "RankComparison"]] * 2


def save_counted(folder: Path) -> None:
    engine = engine_with([StepCounter()])
    take_steps(engine, range(3))
    engine.save_checkpoint(folder)
    engine.close()


def load_counted(folder: Path) -> int:
    counter = StepCounter()
    engine = engine_with([counter], stage=1)
    engine.load_checkpoint(folder)
    take_steps(engine, range(1))
    engine.close()
    return counter.num_steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_state_of_an_observer_travels_to_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    run_ranks(2, save_counted, tmp_path)
    assert run_ranks(ranks, load_counted, tmp_path) == [4] * ranks


def test_a_moment_is_called_on_those_that_override_it_alone() -> None:
    recorder, counter, silent = Recorder(), StepCounter(), Observer()
    observers = [counter, silent, recorder]
    assert overriding(observers, Observer.step_ended) == (counter, recorder)
    assert overriding(observers, Observer.forward_began) == (recorder,)
    assert overriding(observers, Observer.state_dict) == (counter,)
    assert overriding([silent], Observer.step_ended) == ()
