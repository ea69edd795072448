"""States in 8 and 16 bits and every fused rule: the same bits on any number of ranks, at any stage, in any place."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.engine.initialize import make_engine

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
LION = {"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.1}}
MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}}
# The value does not fit a byte.
ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 256.0}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
IN_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
FORMATS: dict[str, dict[str, Any]] = {
    "AdamW, 8 bits": {"optimizer": {**ADAMW, "type": "AdamW8bit"}},
    "Lion, 8 bits in bf16": {"optimizer": {**LION, "type": "Lion8bit"}, "bf16": {"enabled": True}},
    "momentum, 8 bits": {"optimizer": MOMENTUM, "optimizer_state_dtype": "int8"},
    "Adagrad, 8 bits": {"optimizer": ADAGRAD, "optimizer_state_dtype": "int8"},
    "AdamW, moments in bf16": {"optimizer": ADAMW, "optimizer_state_dtype": "bf16"},
    "AdamW, bf16 masters": {"optimizer": ADAMW, "bf16": IN_BF16},
    "AdamW, all in bf16": {"optimizer": ADAMW, "bf16": IN_BF16, "optimizer_state_dtype": "bf16"},
    "AdamW, bf16 masters, 8 bits": {"optimizer": ADAMW, "bf16": IN_BF16, "optimizer_state_dtype": "int8"},
    "AdamW, fp16 masters": {
        "optimizer": ADAMW,
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 4},
    },
    "Lion": {"optimizer": LION},
    "momentum in bf16": {"optimizer": MOMENTUM, "bf16": {"enabled": True}},
    "Adagrad": {"optimizer": ADAGRAD},
    "SGD": {"optimizer": SGD},
}


class Layer(nn.Module):
    """A layer with a large weight, whose size is no multiple of a block, and small parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.Linear(4, 4), nn.Linear(width, 73)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * y).sum() + (self.norm(x[..., :4]) * y[..., :4]).sum()


class ExactGradients(nn.Module):
    """The gradients do not depend on the parameters, and have so few bits that sums over ranks are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(65), Layer(97)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[..., : layer.linear.in_features], y) for layer in self.layers)  # type: ignore[return-value]


def digest_after_steps(settings: dict[str, Any], steps: int = 3) -> str:
    torch.manual_seed(0)
    model = ExactGradients()
    engine = zeroengine.initialize(model, config={"train_micro_batch_size_per_gpu": 2, **settings})
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, y = (torch.randint(-3, 4, (2, width), generator=generator).float() for width in (97, 73))
        engine.backward(engine(x, y))
        engine.step()
    digest = hashlib.sha256()
    for param in model.parameters():
        values = [zeroengine.full_master(param)]
        keys = [key for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") if key in states_of(engine)]
        values += [zeroengine.full_optimizer_state(param, key) for key in keys]
        for value in values:
            digest.update(value.numpy().tobytes())
    engine.close()
    return digest.hexdigest()


def states_of(engine: zeroengine.Engine) -> frozenset[str]:
    shard = engine.optimizer.shards[0]
    return engine.optimizer.state_of(shard).keys(shard) or frozenset()


def digests(folder: str, where: list[str], names: list[str]) -> dict[tuple[str, str], str]:
    start()
    disk = {"device": "nvme", "nvme_path": folder}
    places: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in (0, 2, 3)}
    places["NVMe"] = {"stage": 3, "offload_optimizer": {**disk, "buffer_size": 4096}, "offload_param": disk}
    return {
        (name, place): digest_after_steps(
            {**FORMATS[name], "zero_optimization": {"param_persistence_threshold": 0, **places[place]}}
        )
        for name, place in itertools.product(names, where)
    }


ALL_PLACES = ["stage 0", "stage 2", "stage 3", "NVMe"]


@pytest.mark.parametrize(
    ("places", "every"),
    [
        # Two, three and four ranks run every third format each.
        ({1: ["stage 0"], 2: ["NVMe"], 3: ["stage 3"], 4: ["stage 2"]}, 3),
        pytest.param(dict.fromkeys((1, 2, 3, 4), ALL_PLACES), 1, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_every_rule_and_format_gives_the_same_bits_on_any_ranks_at_any_stage_and_on_nvme(
    places: dict[int, list[str]], every: int, tmp_path: Path
) -> None:
    names = {n: list(FORMATS)[n % every :: every] if n > 1 else list(FORMATS) for n in places}
    by_ranks = {n: run_ranks(n, digests, str(tmp_path), where, names[n])[0] for n, where in places.items()}
    expected = {name: by_ranks[1][name, "stage 0"] for name in FORMATS}
    assert len(set(expected.values())) == len(FORMATS)
    for n, found in by_ranks.items():
        differing = [(n, *key) for key, digest in found.items() if digest != expected[key[0]]]
        assert not differing


def state_bytes(settings: dict[str, Any]) -> tuple[int, int]:
    start()
    with torch.device("cpu"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(4)))
    engine = zeroengine.initialize(model, config={"optimizer": ADAMW, "zero_optimization": {"stage": 1}, **settings})
    memory = engine.memory()
    engine.close()
    return memory.optimizer, memory.master


@pytest.mark.parametrize(
    ("settings", "moments", "masters"),
    [
        ({}, 8.0, 0.0),
        ({"optimizer_state_dtype": "int8"}, 2 + 8 / 256, 0.0),
        ({"optimizer_state_dtype": "int8", "bf16": {"enabled": True}}, 2 + 8 / 256, 4.0),
        ({"bf16": IN_BF16, "optimizer_state_dtype": "bf16"}, 4.0, 0.0),
    ],
)
def test_states_take_the_bytes_that_their_formats_say(settings: dict[str, Any], moments: float, masters: float) -> None:
    parameters = 4 * 256 * 256
    found = run_ranks(2, state_bytes, settings)
    assert found == [(moments * parameters / 2, masters * parameters / 2)] * 2


def refusals() -> dict[str, str]:
    start()
    messages = {}
    for name, settings in {
        "RAdam": {"optimizer": {"type": "torch.optim.RAdam"}, "optimizer_state_dtype": "int8"},
        "AMSGrad": {
            "optimizer": {"type": "torch.optim.Adam", "params": {"amsgrad": True}},
            "optimizer_state_dtype": "int8",
        },
        "RAdam, bf16 masters": {"optimizer": {"type": "torch.optim.RAdam"}, "bf16": IN_BF16},
        "Muon": {"optimizer": {"type": "Muon"}, "optimizer_state_dtype": "int8"},
        "replicas": {"optimizer": {**ADAMW, "type": "AdamW8bit"}, "local_steps": {"steps": 2, "replica_ranks": 1}},
        "replicas in bf16": {"optimizer": ADAMW, "bf16": IN_BF16, "local_steps": {"steps": 2, "replica_ranks": 1}},
        "two": {"optimizer": {**ADAMW, "type": "AdamW8bit"}, "optimizer_state_dtype": "bf16"},
    }.items():
        for async_step in (False, True):
            try:
                make_engine(ExactGradients(), None, settings, async_step=async_step)
                messages[f"{name} {async_step}"] = "no error"
            except zeroengine.ZeroEngineError as error:
                messages[f"{name} {async_step}"] = str(error)
    model = ExactGradients().double()
    try:
        zeroengine.initialize(model, config={"optimizer": ADAMW, "optimizer_state_dtype": "int8"})
    except zeroengine.ZeroEngineError as error:
        messages["fp64"] = str(error)
    for cls, key, value in ((torch.optim.SGD, "momentum", 0.9), (torch.optim.Adam, "amsgrad", True)):
        for async_step in (False, True):
            model = ExactGradients()
            engine = make_engine(model, cls(model.parameters(), lr=0.1), {}, async_step=async_step)
            engine.backward(engine(torch.ones(1, 97), torch.ones(1, 73)))
            before, engine.optimizer.param_groups[0][key] = engine.full_state_dict(), value
            with pytest.raises(zeroengine.ZeroEngineError, match=f"has {key} = {value} now"):
                engine.step()
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
            engine.close()
    return messages


def test_formats_that_a_rule_or_dtype_does_not_serve_are_refused() -> None:
    for messages in run_ranks(2, refusals):
        for async_step in (False, True):
            assert "keep moments in bf16 and int8, not RAdam" in messages[f"RAdam {async_step}"]
            assert "not Adam with amsgrad" in messages[f"AMSGrad {async_step}"]
            assert "update parameters without fp32 masters, not RAdam" in messages[f"RAdam, bf16 masters {async_step}"]
            assert "not Muon" in messages[f"Muon {async_step}"]
            assert "moments of 8 bits would round" in messages[f"replicas {async_step}"]
            assert "parameters without fp32 masters would round" in messages[f"replicas in bf16 {async_step}"]
            assert "name different dtypes of moments" in messages[f"two {async_step}"]
        assert re.search("of parameters in fp32, bf16 and fp16 .* not AdamW of other dtypes", messages["fp64"])
