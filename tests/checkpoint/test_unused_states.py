"""What a checkpoint has and a run does not use is in the run's own checkpoints as well, or is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.counter import Counter
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start, take_steps
from zeroengine.checkpoint.dcp_load import load_files
from zeroengine.checkpoint.dcp_metadata import read_metadata
from zeroengine.checkpoint.unused_states import own_memory
from zeroengine.partition.boxes import Box

FROZEN = "blocks.0."
STEPS = 2  # of each run


def model_of_run(run: int) -> nn.Module:
    """The block is frozen in all runs but the first and the last."""
    model = build(TinyLM)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN) or run in (0, 3))
    return model


def same_on_all_ranks(step: int, rank: int) -> tuple[Any, ...]:
    return batch(step, 0)


def on_ranks(*arguments: Any) -> dict[str, torch.Tensor]:
    start()
    return train_runs(*arguments)


def train_runs(root: Path, runs: dict[int, int], more: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take runs at their stages, each from the checkpoint of the one before, and return the last one's weights."""
    state = {}
    for run, stage in runs.items():
        model = model_of_run(run)
        # An optimizer of the user's has all parameters, and one of the configuration those that are trained.
        given = None if "optimizer" in more else adamw(model)
        settings = {"gradient_clipping": 0.0, "optimizer": None, "checkpoint": {"keep": 1}} | more
        engine = zeroengine.initialize(model, given, config(stage, **settings))
        if run:
            engine.load_checkpoint(root)
            assert engine.rank or (engine.memory().checkpoint > 0) == (run in (1, 2)), "what is held is counted"
        take_steps(engine, range(run * STEPS, (run + 1) * STEPS), same_on_all_ranks)
        engine.save_checkpoint(root)
        engine.wait_for_checkpoint()
        state = engine.full_state_dict()
        engine.close()
    return state


def plain_weights(runs: Sequence[int]) -> dict[str, torch.Tensor]:
    model = build(TinyLM)
    optimizer = adamw(model)
    for step in (step for run in runs for step in range(run * STEPS, (run + 1) * STEPS)):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(FROZEN) or step // STEPS in (0, 3))
        optimizer.zero_grad()
        model(*batch(step, 0)).backward()
        optimizer.step()
    return model.state_dict()


def assert_like_plain_pytorch(state: dict[str, torch.Tensor], runs: Sequence[int]) -> None:
    for name, expected in plain_weights(runs).items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-5, msg=name)


def frozen_states(root: Path) -> dict[str, torch.Tensor]:
    """Everything but the values that the only checkpoint has of the frozen block."""
    (path,) = root.glob("step-*")
    metadata = read_metadata(path)
    names = [name for name in metadata.tensors if FROZEN in name and not name.startswith("model.")]
    entries = {name: own_memory(metadata.tensors[name], [Box.whole(metadata.tensors[name].shape)]) for name in names}
    load_files(path, metadata, entries, (), lambda nbytes: None)
    return {name: entry.pieces[0][1] for name, entry in entries.items()}


def test_a_layer_that_a_run_freezes_goes_on_with_its_moments_when_a_later_run_trains_it(tmp_path: Path) -> None:
    more = {"checkpoint": {"keep": 1, "async_save": True}}
    runs = {0: 3, 1: 1, 3: 2}
    assert_like_plain_pytorch(run_ranks(2, on_ranks, tmp_path, runs, more)[0], [*runs])


ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}}
OUTER = {"outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
CPU = {"device": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, {"optimizer"}),
        ({"optimizer": ADAMW}, {"optimizer"}),
        ({"optimizer": ADAMW, "optimizer_state_dtype": "int8"}, {"optimizer"}),
        ({"bf16": {"enabled": True}}, {"optimizer"}),
        ({"ema": {"decay": 0.9}}, {"optimizer", "ema"}),
        ({"local_steps": {"steps": 2, "replica_ranks": 1} | OUTER}, {"optimizer", "local_steps"}),
        ({"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}}, {"optimizer"}),
    ],
    ids=["fp32", "of the configuration", "8 bits", "bf16", "averages", "outer momentum", "in CPU memory"],
)
def test_on_other_numbers_of_ranks_and_stages_the_states_keep_their_bits(
    more: dict[str, Any], kinds: set[str], tmp_path: Path
) -> None:
    stages = (3, 3, 3, 3) if "zero_optimization" in more else (3, 1, 3, 0)
    saved: dict[str, torch.Tensor] = {}
    for run, (world_size, stage) in enumerate(zip((2, 3, 2, 3), stages, strict=True)):
        state = run_ranks(world_size, on_ranks, tmp_path, {run: stage}, more)[0]
        found = frozen_states(tmp_path)
        assert {name.partition(".")[0] for name in found} == kinds
        if run == 0:
            saved = found
        equal = [name for name in saved if torch.equal(saved[name], found[name])]
        assert len(equal) == len(saved) if run < 3 else len(equal) < len(saved) / 2
    if not {"bf16", "local_steps", "optimizer_state_dtype"} & more.keys():
        assert_like_plain_pytorch(state, range(4))


@pytest.mark.slow
def test_states_on_disks_and_saves_without_frozen_parameters_name_what_they_do_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_runs(tmp_path, {0: 3}, {})
    held = zeroengine.initialize(model := model_of_run(1), adamw(model), config(3, optimizer=None))
    held.load_checkpoint(tmp_path)
    assert "does not use" not in caplog.text
    for _ in range(2):
        held.save_checkpoint(tmp_path / "held", frozen=False)
    assert caplog.text.count("this save does not hold states of ") == 1
    assert ": optimizer.state.blocks.0.down.bias.exp_avg, " in caplog.text
    caplog.clear()
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    disk = zeroengine.initialize(
        model := model_of_run(1), adamw(model), config(3, optimizer=None, zero_optimization=zero)
    )
    disk.load_checkpoint(tmp_path)
    assert "will not hold: optimizer.state.blocks.0.down.bias.exp_avg, " in caplog.text
    for engine in (held, disk):
        engine.close()


def test_states_that_a_run_has_nothing_for_are_named_by_the_load_and_by_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"scheduler": {"type": "WarmupLR", "params": {}}, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = zeroengine.initialize(build(TinyLM), config=config(3, **more))
    for name in ("early", "late", "never"):
        counter = Counter()
        counter.count = 5
        engine.register_stateful(name, counter)
    take_steps(engine, range(2))
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    engine.close()
    other = zeroengine.initialize(build(TinyLM), config=config(3))
    early, late = Counter(), Counter()
    other.register_stateful("early", early)
    assert other.resume(tmp_path)
    assert "will not hold: loss_scaler; zeroengine.lr_scheduler\n" in caplog.text
    assert "resume() does not return the client_state" in caplog.text
    # Weights alone leave what was loaded before.
    other.load_checkpoint(tmp_path, weights_only=True)
    other.register_stateful("late", late)
    assert early.count == late.count == 5
    take_steps(other, range(2))
    for _ in range(2):
        caplog.clear()
        other.save_checkpoint(tmp_path / "other", "a")
    assert "does not hold" not in caplog.text
    other.load_checkpoint(tmp_path)
    other.save_checkpoint(tmp_path / "other", "b")
    assert ": loss_scaler; never; zeroengine.lr_scheduler\n" in caplog.text
    other.close()
