"""The state dict of an engine is the model's own, with its hooks, overrides and extra state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.state_dict_models import WIDTH, Peculiar
from tests.distributed.training import STAGES, start
from zeroengine.utils.tensors import leaves_in


def build(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Peculiar(**options)


def engine_of(model: nn.Module, stage: int) -> zeroengine.Engine:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    # A hook that joins parameters needs the values of several units at once.
    units = {"units": ["blocks.*", "fused.*"]} if isinstance(model, Peculiar) else {}
    return zeroengine.initialize(model, optimizer, {"zero_optimization": zero, **units})


def train(engine: zeroengine.Engine, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)))
        engine.step()


def assert_same_state(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        for own, other in zip(leaves_in(found[key]), leaves_in(value), strict=True):
            if isinstance(other, torch.Tensor):
                assert torch.equal(own, other) and own.dtype == other.dtype, key
            else:
                assert own == other, key


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def compare_with_the_plain_state_dict() -> None:
    start()
    for stage in STAGES:
        engine = engine_of(build(), stage)
        train(engine)
        state, on_rank_0 = engine.full_state_dict(), engine.full_state_dict(rank0_only=True)
        with zeroengine.gathered(engine.module):
            expected = engine.module.state_dict()
            assert_same_state(state, expected)
        assert state._metadata == expected._metadata
        assert list(on_rank_0) == (list(state) if engine.rank == 0 else [])
        plain = build(1, wrapped=False)
        plain.load_state_dict(state)
        assert plain.blocks[1].history["calls"] == 4
        some = engine.full_state_dict(names=["*.kernel", "*._extra_state"])
        assert len(some) == 4 and torch.equal(some["renamed.kernel"], state["renamed.kernel"])
        trainable = engine.full_state_dict(trainable_only=True)
        assert "renamed.kernel" in trainable and not {"renamed.frozen", "norm.running_mean"} & trainable.keys()
        assert not any(unit.is_gathered for unit in engine.units if unit.is_releasable)
        train(engine, 1)


def draw_a_buffer(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state[f"{prefix}norm.running_mean"] = torch.randn(WIDTH)


def save_and_load(folder: Path) -> None:
    start()
    for number, stage in enumerate(STAGES):
        path = folder / str(stage)
        engine = engine_of(build(), stage)
        train(engine)
        expected = engine.full_state_dict()
        engine.save_checkpoint(path, "first")
        engine.save_weights(path / "weights")
        if engine.rank == 0:
            torch.save(expected, path / "weights.pt")
        engine.wait_for_checkpoint()
        dist.barrier()
        train(engine, 1)
        after = engine.full_state_dict()
        # Another stage, and a model without the wrapper, take over the run.
        other = engine_of(build(1, wrapped=bool(number % 2)), STAGES[number - 1])
        other.load_checkpoint(path, "first")
        assert_same_state(other.full_state_dict(), expected)
        train(other, 1)
        # Without the wrapper a step calls each block once.
        assert_same_state(tensors_of(other.full_state_dict()), tensors_of(after))
        # Weights come by the model's own load_state_dict, which sets what it does not hold.
        plain = build(1)
        plain.load_state_dict(torch.load(path / "weights.pt"))
        for weights in (expected if engine.rank == 0 else None, path / "weights.pt"):
            other = engine_of(build(2), stage)
            other.load_weights(weights)
            assert_same_state(other.full_state_dict(), plain.state_dict())
            with zeroengine.gathered(other.module):
                assert not other.module.renamed.dropped.any()
        drawing = build(2)
        drawing.register_load_state_dict_pre_hook(draw_a_buffer)
        other = engine_of(drawing, stage)
        torch.manual_seed(engine.rank)
        for weights in (expected if engine.rank == 0 else None, path / "weights.pt"):
            other.load_weights(weights)
            means: list[Any] = [None, None]
            dist.all_gather_object(means, drawing.norm.running_mean.tolist())
            assert means[0] == means[1], "what the model's code draws is one on all ranks"
        other = engine_of(build(2), stage)
        assert not any(other.load_weights(path / "weights"))
        assert_same_state(tensors_of(other.full_state_dict()), tensors_of(plain.state_dict()))
        without = {
            key: value for key, value in expected.items() if key not in ("renamed.kernel", "blocks.0._extra_state")
        }
        with pytest.raises(zeroengine.CheckpointError, match=r"renamed.weight is not there; blocks.0._extra_state"):
            other.load_weights(without | {"unknown": torch.zeros(1)})
        assert set(other.load_weights(without, strict=False).missing_keys) == {
            "renamed.weight",
            "blocks.0._extra_state",
        }


class Holding(nn.Linear):
    """Has any object as its extra state."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


def write_in_place(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"].mul_(2)


def refuse_and_read_older(folder: Path) -> None:
    start()
    older = engine_of(nn.Sequential(nn.Linear(WIDTH, WIDTH)), 3)
    older.save_checkpoint(folder, "older")
    older.wait_for_checkpoint()
    engine = engine_of(nn.Sequential(Holding(WIDTH, WIDTH)), 3)
    engine.module[0].held = "kept"
    # A checkpoint of before the module had extra state leaves that as it is.
    engine.load_checkpoint(folder)
    assert engine.module[0].held == "kept"
    engine.module[0].held = object()
    with pytest.raises(
        zeroengine.CheckpointError, match=r"'0._extra_state' of the model's state dict .* tensors, numbers"
    ):
        engine.save_checkpoint(folder, "newer")
    with pytest.raises(zeroengine.CheckpointError, match=r"0.scale is complex64 there and float32 here"):
        complex_model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        complex_model[0].register_buffer("scale", torch.ones(2, dtype=torch.complex64))
        other = engine_of(complex_model, 3)
        other.save_checkpoint(folder, "complex")
        other.wait_for_checkpoint()
        complex_model[0].register_buffer("scale", torch.ones(2))
        other.load_checkpoint(folder, "complex")
    # Released parameters may be part of it: their values are saved.
    engine.module[0].held = {"weight": engine.module[0].weight}
    held = engine.full_state_dict()
    assert torch.equal(held["0._extra_state"]["weight"], held["0.weight"])
    engine.module[0].register_state_dict_post_hook(write_in_place)
    with pytest.raises(zeroengine.ZeroEngineError, match=r"writes in place to 0.weight.*state_dict\[key\] \* 2"):
        engine.full_state_dict()


def test_what_a_state_dict_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, refuse_and_read_older, tmp_path)


def test_saves_and_loads_go_through_the_models_own_code(tmp_path: Path) -> None:
    run_ranks(2, save_and_load, tmp_path)


def test_the_full_state_dict_has_what_hooks_and_modules_put_into_it() -> None:
    for world_size in (2, 3):
        run_ranks(world_size, compare_with_the_plain_state_dict)
