"""Saved at any stage, number of ranks and precision; loaded at any other."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.checkpoint.models import adamw, engine_at, momentum
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from tests.distributed.whole_states import whole_states

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
# Precision, stage and number of ranks of the save, stage and number of ranks of the load.
Load = tuple[str, int, int, int, int]
KEYS = {adamw: ("exp_avg", "exp_avg_sq", "step"), momentum: ("momentum_buffer", "step")}


def train(engine: zeroengine.Engine, steps: range) -> list[float]:
    """Every rank sees the same data, so the number of ranks changes nothing but rounding."""
    return take_steps(engine, steps, lambda number, rank: batch(number, 0))


def whole_state(engine: zeroengine.Engine, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers() if name == "seen"}
    return buffers | whole_states(engine, keys)


def check_shards(engine: zeroengine.Engine, expected: dict[str, torch.Tensor], what: str) -> None:
    """Whether what this rank owns is its part of ``expected``, bit for bit."""
    owned = engine._checkpoints.tensors
    seen = set()
    for name, entry in (owned.model_entries(once=False) | owned.optimizer_entries(once=False)).items():
        whole = expected[readable(name)]
        assert entry.shape == tuple(whole.shape), (what, name)
        seen.add(readable(name))
        for box, piece in entry.pieces:
            part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(piece.float(), part), (what, name, box)
    missing = expected.keys() - seen
    assert not missing or (engine.world_size > 1 and all(" " in name for name in missing)), (what, missing)


def readable(name: str) -> str:
    """``optimizer.state.head.weight.exp_avg`` as ``head.weight exp_avg``, as in ``whole_state``."""
    if name == "seen":
        return "buffer seen"
    if not name.startswith("optimizer.state."):
        return name
    return " ".join(name.removeprefix("optimizer.state.").rsplit(".", 1))


def save_all(root: Path, optimizer: Any, stages: Sequence[int] = STAGES, part: bool = False) -> None:
    """Save at each of the stages in each precision, or at each stage in one of the precisions."""
    for precision, stage in itertools.product(PRECISIONS, stages):
        if part and (stage + int(os.environ["WORLD_SIZE"]) + (precision == "bf16")) % 2:
            continue
        engine = engine_at(stage, optimizer=optimizer, **PRECISIONS[precision])
        train(engine, range(3))
        folder = root / f"{precision} {stage} of {engine.world_size}"
        engine.save_checkpoint(folder, client_state={"stage": stage})
        state = whole_state(engine, KEYS[optimizer])
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        found = {"state": state, "losses": train(engine, range(3, 5)), "rates": rates}
        if engine.rank == 0:
            torch.save(found, f"{folder}.pt")
        engine.close()


def load_all(root: Path, optimizer: Any, part: bool) -> list[Load]:
    """Load each checkpoint at each stage, or a part of them in which any two values of different axes meet."""
    loaded = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        expected = torch.load(f"{folder}.pt")
        precision, saved_at, _, saved_by = folder.name.split()
        for stage in STAGES:
            world_size = int(os.environ["WORLD_SIZE"])
            if part and (int(saved_at) + stage + 3 * (precision == "bf16") + world_size) % 6:
                continue
            engine = engine_at(stage, optimizer=optimizer, seed=7, **PRECISIONS[precision])
            train(engine, range(1))  # what is there gives way
            client_state = engine.load_checkpoint(folder)
            assert saved_at == str(client_state["stage"])
            assert (engine.global_steps, engine.micro_steps) == (3, 3)
            assert [group["lr"] for group in engine.optimizer.param_groups] == expected["rates"]
            what = f"{folder.name} at stage {stage} of {engine.world_size}"
            check_shards(engine, expected["state"], what)
            losses = train(engine, range(3, 5))
            assert losses[0] == expected["losses"][0], what
            assert losses == pytest.approx(expected["losses"], rel=1e-2 if precision == "bf16" else 1e-5), what
            engine.close()
            loaded.append((precision, int(saved_at), int(saved_by), stage, world_size))
    return loaded


@pytest.mark.parametrize(
    ("optimizer", "worlds", "loaded_by", "part"),
    [
        pytest.param(adamw, (1, 2), (1, 2, 3), True, id="AdamW, pairs"),
        pytest.param(adamw, (1, 2, 4), (1, 2, 3, 4), False, id="AdamW", marks=pytest.mark.slow),
        pytest.param(momentum, (2,), (1, 2, 3, 4), False, id="SGD", marks=pytest.mark.slow),
    ],
)
def test_any_stage_and_number_of_ranks_to_any_other(
    optimizer: Any, worlds: tuple[int, ...], loaded_by: tuple[int, ...], part: bool, tmp_path: Path
) -> None:
    for world_size in worlds:
        run_ranks(world_size, save_all, tmp_path, optimizer, STAGES, part)
    loads: list[Load] = []
    for world_size in loaded_by:
        first, *others = run_ranks(world_size, load_all, tmp_path, optimizer, part, timeout=300)
        assert all(other == first for other in others)
        loads += first
    axes = (tuple(PRECISIONS), STAGES, worlds, STAGES, loaded_by)
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(load[i], load[j]) for load in loads} == set(itertools.product(axes[i], axes[j]))
    assert part or len(loads) == math.prod(map(len, axes))


def across_precisions(root: Path) -> None:
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        expected = torch.load(f"{folder}.pt")["state"]
        for precision in PRECISIONS:
            engine = engine_at(2, seed=7, **PRECISIONS[precision])
            engine.load_checkpoint(folder)
            for name, value in whole_state(engine, KEYS[adamw]).items():
                frozen = name.startswith("blocks.1")  # kept in the compute dtype, which rounds
                assert torch.equal(value, expected[name]) or (
                    frozen and torch.equal(value, expected[name].bfloat16().float())
                ), (folder.name, precision, name)
            engine.close()


@pytest.mark.slow  # test_state_formats loads moments and masters at another precision
@pytest.mark.parametrize("stages", [(0, 3), STAGES], ids=str)
def test_any_precision_to_any_other(stages: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(2, save_all, tmp_path, adamw, stages)
    run_ranks(2, across_precisions, tmp_path)
