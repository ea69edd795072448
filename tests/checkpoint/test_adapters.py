"""Adapters on a frozen base: what is saved of them costs the bytes of the adapter, and the base is never gathered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeroengine
from tests.checkpoint.models import engine_at, momentum
from tests.checkpoint.test_engine_checkpoints import refused
from tests.distributed.models import WIDTH, TinyLM, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine.checkpoint.manifest import MANIFEST, read_manifest
from zeroengine.cli import checkpoint_commands
from zeroengine.errors import DivergenceError, ZeroEngineError

BF16 = {"bf16": {"enabled": True}}


class AdaptedLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class AdaptedLM(TinyLM):
    """Low-rank adapters in each block of a frozen base, whose head is tied to the embedding; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = AdaptedLinear(block.up)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return super().forward(ids, labels)


class TrainedNorm(AdaptedLM):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(True)


class Longer(AdaptedLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False))


def adapter_engine(
    stage: int, seed: int = 0, factory: Callable[[], nn.Module] = AdaptedLM, **more: Any
) -> zeroengine.Engine:
    start()
    return zeroengine.initialize(build(factory, seed), config=config(stage, **more))


def adapter_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if "lora_" in name}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@contextmanager
def gathered_units(engine: zeroengine.Engine) -> Iterator[list[str]]:
    """Collect the names of the units whose parameters are all-gathered."""
    gather = engine._parts.ranks.transport.gather
    names: list[str] = []

    def all_gather(full: torch.Tensor, shard: torch.Tensor, label: str, *ranks: Any) -> Any:
        names.append(label)
        return original(full, shard, label, *ranks)

    original = gather.all_gather
    with mock.patch.object(gather, "all_gather", all_gather):
        yield names


# -- state dicts and weights ----------------------------------------------------------------------


def some_names(root: Path) -> None:
    engine = adapter_engine(3, **BF16)
    take_steps(engine, range(2))
    everything = engine.full_state_dict()
    adapters = [unit.name for unit in engine.units if unit.trainable]
    assert len(adapters) == 3
    with gathered_units(engine) as units:
        assert_equal(engine.full_state_dict(trainable_only=True), adapter_of(everything))
        assert units == adapters
        units.clear()
        names = ["head.weight", "*.0.up.lora_?.weight", "seen"]
        some = {name: everything[name] for name in everything if name in names or "blocks.0.up.lora" in name}
        assert_equal(engine.full_state_dict(names=names), some)
        assert len(some) == 4 and len(units) == 2, "one block's adapter, and the unit of the embedding"
        units.clear()
        only_rank_0 = engine.full_state_dict(names="*lora_A*", trainable_only=True, rank0_only=True)
        assert len(only_rank_0) == (3 if engine.rank == 0 else 0) and units == adapters
        units.clear()
        engine.save_weights(root / "adapter", trainable_only=True)
        engine.save_weights(root / "some", names=names, dtype="bf16")
        assert units == [], "every rank writes what it owns"
    masters = {name: zeroengine.full_master(engine.module.get_parameter(name)) for name in adapter_of(everything)}
    assert_equal(load_file(root / "adapter" / "model.safetensors"), masters)
    assert_equal(load_file(root / "some" / "model.safetensors"), {name: v.bfloat16() for name, v in some.items()})
    other = adapter_engine(1, seed=5, **BF16)
    base = other.full_state_dict()
    loaded = other.load_weights(root / "adapter", strict=False)
    assert not loaded.unexpected_keys
    assert_equal(other.full_state_dict(), base | adapter_of(everything))
    for call in (engine.full_state_dict, lambda **more: engine.save_weights(root / "none", **more)):
        for wrong, message in {
            "blocks.0.up.loraA.weight": "nearest names are: blocks.0.up.lora_A.weight, ",
            "*.lora_C.*": r"'\*\.lora_C\.\*' matches no name",
            "norm.*": "matches only frozen parameters or buffers, which trainable_only=True leaves out",
        }.items():
            with pytest.raises(ZeroEngineError, match=message):
                call(names=["*.lora_A.*", wrong], trainable_only=True)
        with pytest.raises(ZeroEngineError, match="names is empty"):
            call(names=[])
        with pytest.raises(ZeroEngineError, match=r'such as "head.weight" or "\*.lora_A.\*"; found 3'):
            call(names=["norm.*", 3])
        with pytest.raises(
            DivergenceError, match=r"names is \['head.weight'\] on rank 0 and \['norm.bias'\] on rank 1"
        ):
            call(names=("head.weight", "norm.bias")[engine.rank])
    assert not (root / "none").exists()
    engine.close()
    other.close()


def test_an_adapter_is_read_and_written_by_names_without_its_base(tmp_path: Path) -> None:
    run_ranks(2, some_names, tmp_path)


# -- checkpoints without frozen parameters --------------------------------------------------------


def resumes_over_its_base(root: Path) -> None:
    for stage, more in ((3, BF16), (1, {"checkpoint": {"async_save": True}})):
        folder = root / str(stage)
        engine = adapter_engine(stage, **more)
        take_steps(engine, range(2))
        with gathered_units(engine) as units:
            engine.save_checkpoint(folder, "adapter", {"epoch": 1}, frozen=False)
            engine.wait_for_checkpoint()
        assert units == [] or stage == 1
        expected = take_steps(engine, range(2, 4))
        other = adapter_engine(stage, **more)
        assert other.load_checkpoint(folder) == {"epoch": 1}
        assert take_steps(other, range(2, 4)) == expected
        assert_equal(other.full_state_dict(), engine.full_state_dict())
        other.close()
        # Another base keeps its values.
        other = adapter_engine(3 - stage, seed=5, **more)
        base = other.full_state_dict()
        other.load_checkpoint(folder, weights_only=True)
        engine.load_checkpoint(folder)
        changed = adapter_of(engine.full_state_dict()) | {"seen": engine.module.seen}
        assert_equal(other.full_state_dict(), base | changed)
        other.close()
        engine.close()


def test_an_adapters_checkpoint_resumes_over_its_base_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(2, resumes_over_its_base, tmp_path)
    manifest = read_manifest(tmp_path / "3" / "adapter" / MANIFEST)
    assert {"tok.weight", "head.weight", "blocks.1.up.base_layer.weight"} < set(manifest.left_out)
    assert not any("lora" in name for name in manifest.left_out)


def is_no_whole_model(root: Path) -> None:
    engine = adapter_engine(2)
    take_steps(engine, range(1))
    engine.save_checkpoint(root, "adapter", frozen=False)
    engine.save_checkpoint(root / "whole")
    expected = adapter_of(engine.full_state_dict())
    engine.close()
    other = adapter_engine(3, factory=TrainedNorm)
    said = refused(other, root)
    assert "was saved with frozen=False, without parameters that are trained here: norm.bias, norm.weight. " in said
    other.load_checkpoint(root, weights_only=True, strict=False)
    assert_equal(adapter_of(other.full_state_dict()), expected)
    other.close()
    other = adapter_engine(3, factory=Longer)
    assert "blocks.3.0.bias is not there" in refused(other, root)
    other.close()
    with zeroengine.meta_init(values=False):
        model = AdaptedLM()
    other = zeroengine.initialize(model, config=config(2))
    said = refused(other, root)
    assert "have no values here: blocks.0.down.bias, " in said and "engine.load_weights(base, strict=False)" in said
    other.load_checkpoint(root / "whole", weights_only=True)
    other.load_checkpoint(root)
    take_steps(other, range(1))
    other.close()


def test_an_adapters_checkpoint_is_not_taken_for_a_whole_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, is_no_whole_model, tmp_path)
    assert checkpoint_commands.export([str(tmp_path), str(tmp_path / "weights")]) == 2
    error = capsys.readouterr().err
    assert "was saved with frozen=False, without " in error and "engine.save_weights(directory)" in error
    assert not (tmp_path / "weights").exists()
    assert checkpoint_commands.inspect([str(tmp_path)]) == 0
    assert "whole, without frozen parameters, latest" in capsys.readouterr().out
    assert checkpoint_commands.inspect([str(tmp_path), "--json"]) == 0
    (checkpoint,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert checkpoint["left_out"] == len(read_manifest(tmp_path / "adapter" / MANIFEST).left_out)
    assert checkpoint_commands.inspect([str(tmp_path / "whole")]) == 0
    assert "frozen" not in capsys.readouterr().out


# -- another optimizer ----------------------------------------------------------------------------

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


def other_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=1e-2)


def starts_anew(root: Path) -> None:
    engine = engine_at(3, **FP16)
    loader = engine.dataloader(list(range(64)))
    next(iter(loader))
    take_steps(engine, range(3))
    engine.save_checkpoint(root, client_state={"epoch": 2})
    masters = {name: zeroengine.full_master(param) for name, param in engine.module.named_parameters()}
    counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.loss_scale)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    for change in ({}, {"optimizer": momentum}):
        other = engine_at(2, seed=8, **FP16, **change)
        other_loader = other.dataloader(list(range(64)))
        take_steps(other, range(5))
        betas = [group.get("betas", group.get("momentum")) for group in other.optimizer.param_groups]
        if not change:
            assert other.load_checkpoint(root, optimizer=False) == {"epoch": 2}
            assert [group["lr"] for group in other.optimizer.param_groups] == rates
            for param in filter(lambda p: p.requires_grad, other.module.parameters()):
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    assert not zeroengine.full_optimizer_state(param, key).any()
        else:
            assert "its LR schedule has rates for 2 groups" in refused(other, root, optimizer=False)
            other.lr_scheduler = None
            assert other.load_checkpoint(root, optimizer=False) == {"epoch": 2}
            for param in filter(lambda p: p.requires_grad, other.module.parameters()):
                assert not zeroengine.full_optimizer_state(param, "momentum_buffer").any(), "as before any step"
        assert [group.get("betas", group.get("momentum")) for group in other.optimizer.param_groups] == betas
        assert (other.global_steps, other.micro_steps, other.skipped_steps, other.loss_scale) == counters
        assert other_loader.state_dict() == loader.state_dict()
        for name, param in other.module.named_parameters():
            assert torch.equal(zeroengine.full_master(param), masters[name]), name
        take_steps(other, range(1))
        other.close()
    engine.close()


def test_without_the_optimizers_state_everything_else_comes_back_and_moments_start_anew(tmp_path: Path) -> None:
    run_ranks(2, starts_anew, tmp_path)
