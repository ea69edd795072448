"""Saving and loading by an engine: what resumes, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zeroengine
from tests.checkpoint.models import engine_at, momentum
from tests.distributed.models import TinyLM, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, adamw, make_engine, start, take_steps
from tests.parametrization import in_turn
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.manifest import MANIFEST
from zeroengine.errors import CheckpointError


def fingerprint(engine: zeroengine.Engine) -> Any:
    """Everything that a load could change."""
    states = engine._checkpoints.tensors
    entries = states.model_entries(once=False) | states.optimizer_entries(once=False)
    tensors = {(name, box): piece.clone().flatten().tolist() for name, e in entries.items() for box, piece in e.pieces}
    counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.loss_scale)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return tensors, counters, groups, engine.lr_scheduler and engine.lr_scheduler.state_dict()["last_epoch"]


# -- resuming -------------------------------------------------------------------------------------


def draw_from_all_generators() -> tuple[float, list[float], list[float]]:
    return random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist()


def resumes(root: Path, more: dict[str, Any]) -> None:
    for stage in (0, 3):
        engine = engine_at(stage, **more)
        take_steps(engine, range(3))
        random.seed(5 + engine.rank)
        torch.manual_seed(5 + engine.rank)
        numpy.random.seed(5 + engine.rank)
        engine.save_checkpoint(root / str(stage), client_state={"epoch": 2, "best": torch.ones(2)})
        drawn = draw_from_all_generators()
        expected, after = take_steps(engine, range(3, 6)), fingerprint(engine)
        engine.wait_for_checkpoint()
        other = engine_at(stage, seed=8, **more)
        client_state = other.load_checkpoint(root / str(stage))
        assert client_state["epoch"] == 2 and torch.equal(client_state["best"], torch.ones(2))
        assert draw_from_all_generators() == drawn, "each rank's own random numbers"
        assert take_steps(other, range(3, 6)) == expected
        assert fingerprint(other) == after
        engine.close()
        other.close()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the last one is in fp32
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
        {"optimizer": momentum},
        {"checkpoint": {"async_save": True}},
    ],
    ids=["fp32", "bf16", "fp16", "an optimizer on shards", "saved in the background"],
)
def test_training_goes_on_bit_for_bit(more: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, resumes, tmp_path, more)


def in_the_background(root: Path) -> None:
    engine = engine_at(2, checkpoint={"async_save": True})
    assert engine.memory().checkpoint == 0 and "checkpoint" not in str(engine.memory())
    states, copies = [], []
    for _ in range(3):
        take_steps(engine, range(1))
        engine.save_checkpoint(root)
        states.append(fingerprint(engine))
        take_steps(engine, range(1))  # while it is written
        memory = engine.memory()
        copies.append(memory.checkpoint + memory.cpu.get("checkpoint", 0))
    engine.wait_for_checkpoint()
    assert len(set(copies)) == 1 and copies[0] >= engine.memory().optimizer, "one copy serves all saves"
    memory = engine.memory()
    its = copies[0] if engine.device.type == "cpu" else 0  # beside a GPU it is not of the GPU's memory
    assert memory.total == replace(memory, checkpoint=0).total + its and "checkpoint" in str(memory)
    for number, state in enumerate(states):
        engine.load_checkpoint(root, f"step-{2 * number + 1}")
        assert fingerprint(engine) == state, "what was saved is what was there at the call"
    engine.close()


def test_the_background_writes_a_copy_that_is_kept_and_counted(tmp_path: Path) -> None:
    run_ranks(2, in_the_background, tmp_path)


class Gained(TinyLM):
    """With a 0-d parameter, whose state has the shape of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels) * self.gain


def scalar_resumes(root: Path, optimizer: Any, stage: int) -> None:
    task = Task(factory=Gained, optimizer=optimizer)
    engine = make_engine(task, stage)
    take_steps(engine, range(3))
    engine.save_checkpoint(root)
    other = make_engine(task, stage)
    take_steps(other, range(1))
    other.load_checkpoint(root)
    assert take_steps(other, range(3, 6)) == take_steps(engine, range(3, 6))
    engine.close()
    other.close()


@in_turn(("stage", "optimizer"), [pytest.param(0, id="0", marks=pytest.mark.slow), 3], [adamw, momentum])
def test_a_parameter_without_dimensions_too(stage: int, optimizer: Any, tmp_path: Path) -> None:
    run_ranks(2, scalar_resumes, tmp_path, optimizer, stage)


def accumulates(root: Path) -> None:
    for before, after in ((1, 3), (3, 1)):
        engine = engine_at(2, gradient_accumulation_steps=before)
        take_steps(engine, range(3 * before))
        engine.save_checkpoint(root / str(before))
        other = engine_at(1, gradient_accumulation_steps=after)
        other.load_checkpoint(root / str(before))
        assert (other.global_steps, other.is_gradient_accumulation_boundary()) == (3, after == 1)
        take_steps(other, range(after))
        assert other.global_steps == 4
        other.close()
        engine.close()


def test_another_accumulation_may_follow(tmp_path: Path) -> None:
    run_ranks(2, accumulates, tmp_path)


def loads_inside_a_step(root: Path, stages: tuple[int, ...], more: dict[str, Any]) -> None:
    settings = {"gradient_accumulation_steps": 4} | more
    for stage in stages:
        engine, other = (zeroengine.initialize(build(TinyLM), config=config(stage, **settings)) for _ in range(2))
        take_steps(engine, range(8))
        engine.save_checkpoint(root / str(stage))
        other.load_checkpoint(root / str(stage))
        expected = take_steps(other, range(8, 12)), other.grad_norm, fingerprint(other)
        # A step of which nothing may be left, and half of another one.
        take_steps(engine, range(20, 26))
        # Weights alone leave the step in progress.
        engine.load_checkpoint(root / str(stage), weights_only=True)
        assert (engine.backwards_in_step, engine.micro_steps, engine.grad_norm is None) == (2, 14, False)
        assert engine.resume(root / str(stage))
        assert (engine.backwards_in_step, engine.micro_steps, engine.global_steps, engine.grad_norm) == (0, 8, 2, None)
        assert (take_steps(engine, range(8, 12)), engine.grad_norm, fingerprint(engine)) == expected
        engine.close()
        other.close()


def loads_on_ranks(*arguments: Any) -> None:
    start()
    loads_inside_a_step(*arguments)


def test_a_load_inside_a_step_says_so_and_leaves_nothing_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loads_inside_a_step(tmp_path, (3,), {})
    assert caplog.text.count("a load drops the gradients of 2 micro-steps: begin the step again") == 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "more", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}]
)
def test_a_load_inside_a_step_leaves_nothing_of_it_on_any_rank(
    world_size: int, more: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(world_size, loads_on_ranks, tmp_path, (0, 1, 2, 3), more)


class CountingSGD(torch.optim.SGD):
    """Counts its steps in tensors of one element."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    count = self.state[param].setdefault("count", torch.zeros(1))
                    # A load keeps the dimension, without which an optimizer could not index its state.
                    assert count.shape == (1,)
                    count += 1
                    param.data.sub_(group["lr"] * param.grad / count)
        return None


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return CountingSGD(model.parameters(), lr=1e-2)


def counts(root: Path, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = engine_at(stage, optimizer=counting)
        take_steps(engine, range(3))
        engine.save_checkpoint(root / str(stage))
        expected = take_steps(engine, range(3, 5))
        engine.close()
        other = engine_at(stage, optimizer=counting, seed=8)
        other.load_checkpoint(root / str(stage))
        assert take_steps(other, range(3, 5)) == expected
        other.close()


def whole_parameters(model: nn.Module) -> torch.optim.Optimizer:
    """Its states of matrices are means over rows and over columns."""
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def states_of_other_shapes(root: Path) -> None:
    engine = engine_at(3, optimizer=whole_parameters)
    take_steps(engine, range(2))
    engine.save_checkpoint(root)
    expected = take_steps(engine, range(2, 4))
    engine.close()
    for stage in (3, 1):
        engine = engine_at(stage, optimizer=whole_parameters, seed=7)
        engine.load_checkpoint(root)
        assert take_steps(engine, range(2, 4)) == expected
        engine.close()


def test_states_of_other_shapes_than_the_parameters_come_back(tmp_path: Path) -> None:
    run_ranks(2, states_of_other_shapes, tmp_path)


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_a_number_that_an_optimizer_keeps_as_a_tensor_of_one_element_comes_back(
    stages: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(2, counts, tmp_path, stages)


def weights_alone(root: Path) -> None:
    engine = engine_at(1)
    take_steps(engine, range(3))
    engine.save_checkpoint(root)
    other = engine_at(3, optimizer=momentum, seed=8)
    take_steps(other, range(2))
    before = fingerprint(other)
    other.load_checkpoint(root, weights_only=True)
    expected = engine.full_state_dict()
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, expected[name]), name
    after = fingerprint(other)
    assert after[1:] == before[1:]
    momenta = {key for key in before[0] if key[0].startswith("optimizer.")}
    assert momenta and all(after[0][key] == before[0][key] for key in momenta)
    engine.close()
    other.close()


def test_weights_alone_leave_the_optimizer_as_it_is(tmp_path: Path) -> None:
    run_ranks(2, weights_alone, tmp_path)


def several(root: Path) -> None:
    engine = engine_at(2, checkpoint={"keep": 2})
    for number in range(4):
        take_steps(engine, range(number, number + 1))
        engine.save_checkpoint(root)
    if engine.rank == 0:
        assert CheckpointFolder(root).tags() == ["step-3", "step-4"]
        assert (root / "latest").read_text() == "step-4\n"
    engine.load_checkpoint(root, "step-3")
    assert engine.global_steps == 3
    engine.close()


def test_tags_name_the_steps_and_the_oldest_go(tmp_path: Path) -> None:
    run_ranks(2, several, tmp_path)


# -- refusing -------------------------------------------------------------------------------------


class Wider(TinyLM):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.head = nn.Linear(24, 62, bias=False)
        self.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))


def wider(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def refused(engine: zeroengine.Engine, *args: Any, **kwargs: Any) -> str:
    before = fingerprint(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(*args, **kwargs)
    assert fingerprint(engine) == before, "the engine is as it was"
    return str(caught.value)


def does_not_fit(root: Path) -> None:
    engine = engine_at(2)
    take_steps(engine, range(2))
    engine.save_checkpoint(root / "a")
    other = make_engine(Task(factory=Wider, optimizer=wider), 3)
    said = refused(other, root / "a")
    assert "is another model's: " in said
    assert "extra.0.weight is not there" in said and "more" in said and said.count("; ") == 10
    assert "head.weight has shape (61, 24) there and (62, 24) here" in refused(other, root / "a", strict=False)
    other.close()
    other = engine_at(2, optimizer=momentum)
    assert "holds the state of AdamW (exp_avg, exp_avg_sq, step), and the optimizer here is SGD" in refused(
        other, root / "a"
    )
    other.close()
    other = engine_at(2, optimizer=one_group)
    assert "the optimizer's groups hold other parameters" in refused(other, root / "a")
    other.close()
    engine.close()


def test_another_model_s_or_optimizer_s_is_refused(tmp_path: Path) -> None:
    run_ranks(2, does_not_fit, tmp_path)


def damaged(root: Path) -> None:
    engine = engine_at(3)
    for number in range(3):
        take_steps(engine, range(number, number + 1))
        engine.save_checkpoint(root)
    data = sorted((root / "step-3").glob("*.distcp"))[-1]
    if engine.rank == 0:
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        newest = sorted((root / "step-2").glob("*.distcp"))[0]
        newest.write_bytes(newest.read_bytes()[:-10])
    engine.group.all_gather_object(None)
    said = refused(engine, root)
    assert "checkpoint step-3 is damaged" in said and "its checksum differs" in said and "fallback=True" in said
    assert "not " in refused(engine, root, "step-2")
    engine.load_checkpoint(root, fallback=True)
    assert engine.global_steps == 1, "the newest that is whole"
    take_steps(engine, range(1))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    assert engine.resume(root) and engine.global_steps == 1
    assert len(lines) == (engine.rank == 0)
    if lines:
        assert lines[0].startswith("step-1, the newest checkpoint that is whole, is loaded: ")
        assert f"{data} has been changed" in lines[0] and f"{root}/step-2/__0_0.distcp has " in lines[0]
    said = refused(engine, root, "step-9")
    assert said.startswith("checkpoint 'step-9' in") and "does not exist; there are: step-1, step-2, step-3." in said
    assert "damaged" not in said and "fallback" not in said, "nothing comes before a name that was mistyped"
    assert "there is no folder" in refused(engine, root / "nowhere")
    if engine.rank == 0:
        (root / "step-1" / MANIFEST).write_text("{}")
    engine.group.all_gather_object(None)
    said = refused(engine, root, "step-1", fallback=True)
    assert said.startswith(f"every checkpoint in {root} is damaged") and all(f"/step-{n}/" in said for n in (1, 2, 3))
    engine.close()


def test_damage_is_said_and_the_newest_whole_one_offered(tmp_path: Path) -> None:
    run_ranks(2, damaged, tmp_path)


def not_now(root: Path) -> None:
    engine = engine_at(2, gradient_accumulation_steps=2)
    take_steps(engine, range(1))
    with pytest.raises(zeroengine.ZeroEngineError, match="between the micro-steps of a step would lose"):
        engine.save_checkpoint(root)
    take_steps(engine, range(1))
    with pytest.raises(CheckpointError, match=r'such as "step-1000"; found \'a/b\''):
        engine.save_checkpoint(root, "a/b")
    with pytest.raises(CheckpointError, match="client_state cannot be kept in a checkpoint"):
        engine.save_checkpoint(root, client_state=Task())
    if engine.rank == 0:
        (root / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file: checkpoints are kept in a folder"):
        engine.save_checkpoint(root / "file")
    assert sorted(os.listdir(root)) == ["file"]
    engine.close()


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    run_ranks(2, not_now, tmp_path)


def disk_full_on_rank_1(root: Path, background: bool) -> None:
    engine = engine_at(1, checkpoint={"async_save": background})
    take_steps(engine, range(1))
    engine.save_checkpoint(root)
    take_steps(engine, range(1))
    if background:
        engine.wait_for_checkpoint()
    if engine.rank == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(CheckpointError, match=r"step-2 in .* was not saved: .*File too large.*as they were"):
        engine.save_checkpoint(root)
        assert background
        engine.wait_for_checkpoint()
    if background:
        engine.wait_for_checkpoint()  # the error was raised once
        with pytest.raises(CheckpointError, match="File too large"):
            engine.save_checkpoint(root)
            assert engine.global_steps == 2
            engine.close()
    assert CheckpointFolder(root).tags() == ["step-1"] and CheckpointFolder(root).latest() == "step-1"
    assert not list(root.glob(".*.writing")), "nothing half done is left"
    assert take_steps(engine, range(2)) if not background else True, "training can go on"


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_disk_that_fills_up_is_an_error_on_every_rank(background: bool, tmp_path: Path) -> None:
    run_ranks(2, disk_full_on_rank_1, tmp_path, background)


def two_engines_in_one_folder(root: Path) -> None:
    first, second = engine_at(1), engine_at(2)
    take_steps(first, range(1))
    first.save_checkpoint(root, tag="first")
    with pytest.raises(CheckpointError, match="another job saves into"):
        second.save_checkpoint(root, tag="second")
    first.wait_for_checkpoint()
    take_steps(second, range(1))
    second.save_checkpoint(root, tag="second")
    second.wait_for_checkpoint()
    first.save_checkpoint(root, tag="third")
    assert CheckpointFolder(root).tags() == ["first", "second", "third"]
    first.close()
    second.close()


def test_after_waiting_another_engine_may_save_into_the_folder(tmp_path: Path) -> None:
    run_ranks(2, two_engines_in_one_folder, tmp_path)
