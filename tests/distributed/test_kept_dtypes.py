"""Parameters that keep their own dtype under bf16 and fp16, such as frozen bytes that are packed in floats."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, start
from zeroengine import ZeroEngineError
from zeroengine.weights.export import export

BF16 = {"bf16": {"enabled": True}}
KEEP = {"keep_dtype": ["*.packed", "router.weight", "scale"]}
BYTES = list(range(255, -1, -1))
NAMES = ("layers.0.packed", "layers.1.packed")


class Packed(nn.Module):
    """A frozen weight of 8 bits, four or two of which are packed in a float, and an adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # Every byte occurs, so some floats are NaNs with payloads.
        self.packed = nn.Parameter(torch.arange(256, dtype=torch.uint8).flip(0).view(dtype), requires_grad=False)
        self.adapter = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.packed.detach().view(torch.uint8).view(16, 16).to(x.dtype) / 256 - 0.5
        return F.linear(x, weight) + self.adapter(x)


class Mixture(nn.Module):
    """The packed weights come first. The router computes in fp32, and its weight has transposed strides."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x.float(), self.weight).softmax(-1).to(x.dtype)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Packed(dtype) for _ in range(2))
        self.router = self.Router()
        self.register_buffer("scale", torch.full((), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.router(x)).float().pow(2).mean() * self.scale


def bytes_of(tensor: torch.Tensor) -> list[int]:
    listed: list[int] = tensor.detach().contiguous().view(torch.uint8).flatten().tolist()
    return listed


def trained(dtype: torch.dtype, stage: int, meta: bool, more: dict[str, Any]) -> tuple[zeroengine.Engine, list[float]]:
    build = partial(Mixture, dtype)
    if meta:
        with zeroengine.meta_init():
            model = build()
    else:
        model = build()
    engine = zeroengine.initialize(model, None, config(stage, **more))
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + engine.rank)
        loss = engine(torch.randn(2, 16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def keeps(folder: Path | None, stages: tuple[int, ...], dtype: torch.dtype, meta: bool, more: dict[str, Any]) -> None:
    start()
    # Bytes are never cast, so a model of bytes is the reference.
    whole = {key: value for key, value in more.items() if key != "zero_optimization"}
    reference, expected = trained(torch.uint8, 0, False, {**whole, **KEEP})
    reference.release()
    for stage in stages:
        engine, losses = trained(dtype, stage, meta, {**more, **KEEP})
        assert losses == expected
        module: Any = engine.module
        assert module.router.weight.stride() == (16, 1) and module.router.weight.is_contiguous()
        states = [{name: tensor.clone() for name, tensor in engine.stream_weights(dtype="bf16")}]
        assert states[0]["layers.0.adapter.weight"].dtype is torch.bfloat16
        if folder is not None:
            engine.save_checkpoint(folder / f"{stage}")
            engine.save_weights(folder / f"{stage}" / "weights", dtype="bf16")
            engine.load_checkpoint(folder / f"{stage}")
            engine.load_weights(folder / f"{stage}" / "weights")
        states.append(engine.full_state_dict())
        engine.release()
        for values in (*states, module.state_dict()):
            assert {values[name].dtype for name in NAMES} == {dtype}
            assert {values[name].dtype for name in values.keys() & {"router.weight", "scale"}} == {torch.float32}
            assert all(bytes_of(values[name]) == BYTES for name in NAMES)
        assert module.router.weight.stride() == (1, 16)


def test_packed_bytes_a_router_and_a_buffer_keep_their_dtype_wherever_they_go() -> None:
    run_ranks(2, keeps, None, (3,), torch.float32, False, BF16 | {"data_types": {"buffer_dtype": "bf16"}})


OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_floats_of_any_dtype_hold_packed_bytes(
    tmp_path: Path, low: str, dtype: torch.dtype, meta: bool, offloaded: bool
) -> None:
    more: dict[str, Any] = {low: {"enabled": True}}
    if offloaded:
        more["zero_optimization"] = OFFLOADED
    run_ranks(3 if meta else 2, keeps, tmp_path, (3,) if offloaded else STAGES, dtype, meta, more)


def initialized(caplog: pytest.LogCaptureFixture, model: nn.Module, **more: Any) -> tuple[zeroengine.Engine, list[str]]:
    caplog.clear()
    engine = zeroengine.initialize(model, None, config(0, **more))
    return engine, [record.getMessage() for record in caplog.records]


def test_a_cast_that_changes_frozen_values_is_named_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engine, messages = initialized(caplog, Mixture(torch.float32), **BF16)
    (message,) = [message for message in messages if "rounded" in message]
    assert f"{NAMES[0]}, {NAMES[1]}. Weights" in message and f'"keep_dtype": ["{NAMES[0]}"]' in message
    assert "are contiguous until the engine ends" in " ".join(messages) and "router.weight" in " ".join(messages)
    engine.save_checkpoint(tmp_path)
    engine.close()
    # A cast that is exact loses nothing.
    with_exact = Mixture(torch.float32)
    for layer in with_exact.layers:
        layer.packed.data = torch.ones(64)
    engine, messages = initialized(caplog, with_exact, **BF16)
    assert "rounded" not in " ".join(messages)
    engine.close()
    engine, messages = initialized(caplog, Mixture(torch.float32), **BF16 | KEEP)
    assert "rounded" not in " ".join(messages)
    engine.save_checkpoint(tmp_path / "kept")
    values = load_file(next(export(tmp_path / "kept", tmp_path / "out", dtype="bf16").path.glob("*.safetensors")))
    assert bytes_of(values[NAMES[0]]) == BYTES and values["router.weight"].dtype is torch.float32
    assert values["layers.0.adapter.weight"].dtype is torch.bfloat16
    engine.load_checkpoint(tmp_path)
    assert f"{NAMES[0]} (bfloat16 there, float32 here)" in caplog.text
    engine.close()


def test_the_dtype_of_a_model_is_that_of_what_trains(caplog: pytest.LogCaptureFixture) -> None:
    engine, messages = initialized(caplog, Mixture(torch.float16), fp16={"enabled": "auto"})
    about_fp16 = [message for message in messages if "fp16" in message]
    assert not engine.config.fp16.enabled and about_fp16 == ['"auto" stands for fp16.enabled = false.']
    engine.close()
    model = Mixture(torch.float16)
    for layer in model.layers:
        layer.adapter.bfloat16()
    engine, _ = initialized(caplog, model, bf16={"enabled": "auto"}, **KEEP)
    assert engine.config.bf16.enabled
    engine.close()


def test_keep_dtype_names_what_it_does_not_fit() -> None:
    model = Mixture(torch.float32)
    with pytest.raises(ZeroEngineError, match=r"keep_dtype: .*'\*\.pakked' matches no parameter or buffer.*0\.packed"):
        zeroengine.initialize(model, None, config(0, keep_dtype=["*.pakked"]))
    quantized = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    with pytest.raises(ZeroEngineError, match=r"layers\.0\.packed is .*keep_dtype.* leave zero_quantized_weights out"):
        zeroengine.initialize(model, None, config(3) | BF16 | KEEP | quantized)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zeroengine.initialize(plain, None, config(0) | BF16 | {"keep_dtype": ["1.*"]})
    with pytest.raises(RuntimeError) as caught:
        engine(torch.randn(2, 4))
    assert "keep_dtype keeps 1.weight in float32" in caught.value.__notes__[0]
    engine.close()
