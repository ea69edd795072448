"""A checkpoint of a split model loads at any number of slices, ranks and at any stage, with the same bits, and back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import WIDTH
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from tests.emulated import cpu_alone
from tests.recovery.test_snapshots import memory
from tests.slices.split_models import Factory, make_split_engine, one_block_lm, small_lm, uneven_lm

__all__ = ["memory"]

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

States = dict[str, torch.Tensor]
# The number of ranks, of slices, and the stage.
HOME = (4, 2, 3)
OTHERS = [(3, 1, 1), (4, 4, 0), (2, 2, 3)]


def whole_states(engine: zeroengine.Engine) -> States:
    """Return the masters and the optimizer's states of all parameters. A collective."""
    states = {}
    for name, param in engine.module.named_parameters():
        states[name] = zeroengine.full_master(param)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            states[f"{name} {key}"] = zeroengine.full_optimizer_state(param, key)
    return states


def train_and_save(engine: zeroengine.Engine, folder: Path) -> tuple[States, list[float]]:
    """On one rank: the states that are saved after two steps, and the losses of two more."""
    take_steps(engine, range(2), share=engine.sample_group)
    saved = whole_states(engine)
    engine.save_checkpoint(folder)
    losses = take_steps(engine, range(2, 4), share=engine.sample_group)
    engine.close()
    return saved, losses


def train_split_model(size: int, stage: int, factory: Factory, folder: Path) -> tuple[States, list[float]]:
    return train_and_save(make_split_engine(size, stage, factory), folder)


def load_and_save(size: int, stage: int, factory: Factory, source: Path, target: Path) -> States:
    """On one rank: the states that are loaded. They are saved again, as this rank has them."""
    engine = make_split_engine(size, stage, factory)
    engine.load_checkpoint(source)
    loaded = whole_states(engine)
    engine.save_checkpoint(target)
    engine.close()
    return loaded


def load_each(size: int, stage: int, factory: Factory, sources: list[Path]) -> list[tuple[States, list[float]]]:
    """On one rank and for each checkpoint: the states that are loaded, and the losses of two steps."""
    found = []
    for source in sources:
        engine = make_split_engine(size, stage, factory)
        engine.load_checkpoint(source)
        found.append((whole_states(engine), take_steps(engine, range(2, 4), share=engine.sample_group)))
        engine.close()
    return found


def assert_same(found: States, expected: States, what: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), (what, name)


def check_round_trips(factory: Factory, others: list[tuple[int, int, int]], folder: Path) -> None:
    """Check that checkpoints keep all bits on the way to other numbers of ranks and slices, and back."""
    ranks, size, stage = HOME
    trained = run_ranks(ranks, train_split_model, size, stage, factory, folder / "home")
    saved, _ = trained[0]
    copies = [folder / "home"]
    for other in others:
        other_ranks, other_size, other_stage = other
        copy = folder / "-".join(map(str, other))
        for found in run_ranks(other_ranks, load_and_save, other_size, other_stage, factory, folder / "home", copy):
            assert_same(found, saved, other)
        copies.append(copy)
    for rank, returned in enumerate(run_ranks(ranks, load_each, size, stage, factory, copies)):
        for copy, (loaded, losses) in zip(copies, returned, strict=True):
            assert_same(loaded, saved, copy.name)
            # The second loss follows from an update by the loaded states.
            assert losses == trained[rank][1], copy.name


def test_a_checkpoint_moves_to_other_numbers_of_slices_and_back_with_equal_bits(tmp_path: Path) -> None:
    check_round_trips(one_block_lm, OTHERS[:2], tmp_path)


@pytest.mark.slow  # as of even slices, to further numbers
def test_a_checkpoint_of_uneven_slices_moves_to_other_numbers_of_slices_and_back(tmp_path: Path) -> None:
    check_round_trips(uneven_lm, OTHERS, tmp_path)


def save_whole(folder: Path) -> States:
    engine = make_split_engine(1, 2, one_block_lm)
    take_steps(engine, range(2), share=engine.sample_group)
    saved = whole_states(engine)
    engine.save_checkpoint(folder)
    engine.close()
    return saved


@pytest.mark.slow  # the round trip above loads what one slice has saved
def test_a_checkpoint_of_a_whole_model_loads_into_a_split_one(tmp_path: Path) -> None:
    saved = run_ranks(2, save_whole, tmp_path / "whole")[0]
    for found in run_ranks(4, load_and_save, 2, 3, one_block_lm, tmp_path / "whole", tmp_path / "copy"):
        assert_same(found, saved, "split")


def wide_lm() -> nn.Module:
    """Return a model whose split layers are larger than the margin of predictions."""
    model = small_lm()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)
    return model


def states_of_snapshots(memory: Path, size: int, steps: int, num_hosts: int) -> tuple[bool, States]:
    """On one rank: whether it went on from a snapshot, and the states of the one that is taken after ``steps``."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["ZEROENGINE_HOST"] = host = f"node-{rank * num_hosts // num_ranks}"
    os.environ["ZEROENGINE_SNAPSHOT_FOLDER"] = str(memory / host)
    engine = make_split_engine(size, 3, wide_lm, {"snapshots": {"every_seconds": 1e6}})
    resumed = engine.resume()
    take_steps(engine, range(steps), share=engine.sample_group)
    states, snapshots = whole_states(engine), engine._parts.loop.snapshots
    assert snapshots is not None
    engine._checkpoints.take_snapshot(snapshots)
    snapshots.find()
    needs = engine._parts.setup.state_memory
    assert 0 < snapshots.copy_bytes <= needs.requirement(needs.current()).states.snapshot
    # This step is lost.
    take_steps(engine, range(1), share=engine.sample_group)
    engine.close()
    return resumed, states


def test_snapshots_hold_whole_states_and_go_on_without_a_host_at_any_number_of_slices(memory: Path) -> None:
    (_, expected), *_ = run_ranks(4, states_of_snapshots, memory, 2, 2, 2)
    for num_ranks, size, num_hosts in ((4, 2, 2), (2, 1, 1)):
        shutil.rmtree(memory / "node-1", ignore_errors=True)
        for resumed, states in run_ranks(num_ranks, states_of_snapshots, memory, size, 0, num_hosts):
            assert resumed and states.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in states.items())
