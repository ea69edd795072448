"""Which modules keep fp32, and what torch computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import config
from zeroengine import ZeroEngineError
from zeroengine.config import load
from zeroengine.runtime import mixed_precision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(4)
        self.plain_batch_norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tok.weight


def kept(patterns: list[str] | None, **more: Any) -> list[str]:
    model = Net()
    settings = load({"bf16": {"enabled": True}, "keep_fp32_modules": patterns, **more}).resolve(world_size=1)
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in mixed_precision.fp32_modules(model, settings)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (None, []),
        ([], []),
        (["LayerNorm"], ["layers.0.1", "layers.1.1"]),
        (["layers.*.0"], ["layers.0.0", "layers.1.0"]),
        (["layers.1*", "layers.1.0"], ["layers.1"]),
        (["layers"], ["layers.0", "layers.1"]),
        (["ModuleList"], ["layers.0", "layers.1"]),
        (["head"], ["tok", "head"]),
    ],
)
def test_patterns_choose_the_outermost_modules_that_are_called(patterns: list[str] | None, expected: list[str]) -> None:
    """And BatchNorm, while its statistics are fp32."""
    assert sorted(kept(patterns)) == sorted([*expected, "batch_norm"])
    assert sorted(kept(patterns, data_types={"buffer_dtype": "bf16"})) == sorted(expected)


def test_fp32_checks_keep_fp32_patterns() -> None:
    assert kept(["LayerNorm"], bf16={"enabled": False}) == []
    with pytest.raises(ZeroEngineError, match=r"'RMSNorm' matches no module.*classes are Embedding, ModuleList"):
        kept(["RMSNorm"], bf16={"enabled": False})


def test_a_dtype_that_torch_does_not_compute_in_is_named() -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float16):
        mixed_precision.check_supported(dtype, cpu)
    with pytest.raises(ZeroEngineError, match=r"does not compute in float8_e4m3fn on cpu: .* Write another precision"):
        mixed_precision.check_supported(torch.float8_e4m3fn, cpu)


class Masked(nn.Module):
    """Attention in windows, as in Swin: the block has the mask, and hands it to its attention."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, self.mask)


def masked() -> nn.Module:
    model = nn.Sequential(Masked(), Masked(), nn.BatchNorm1d(4))
    model.register_buffer("frequencies", torch.ones(4))
    return model


def spectral(norm: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), norm(nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("factory", "buffers", "owner"),
    [
        (masked, "0.mask (float32)", "0"),
        (lambda: spectral(nn.utils.spectral_norm), "1.weight_u (float32), 1.weight_v (float32)", "1"),
        (
            lambda: spectral(nn.utils.parametrizations.spectral_norm),
            "1.parametrizations.weight.0._u (float32), 1.parametrizations.weight.0._v (float32)",
            "1",
        ),
    ],
)
def test_an_error_of_dtypes_in_a_forward_names_buffers_and_the_keys_that_help(
    factory: Callable[[], nn.Module], buffers: str, owner: str
) -> None:
    def train(**more: Any) -> None:
        settings = config(3, bf16={"enabled": True}, **more)
        with contextlib.closing(zeroengine.initialize(factory(), config=settings)) as engine:
            engine.backward(engine(torch.randn(2, 4, 8)).float().square().mean())
            engine.step()

    with pytest.raises(RuntimeError, match="type") as error:
        train()
    (note,) = error.value.__notes__
    assert f"buffers keep their dtype: {buffers}. " in note
    assert '"data_types": {"buffer_dtype": "bf16"}' in note and f'"keep_fp32_modules": ["{owner}"]' in note
    train(data_types={"buffer_dtype": "bf16"})
    train(keep_fp32_modules=["Masked"] if owner == "0" else [owner])


def test_other_errors_of_a_forward_have_no_note_about_buffers() -> None:
    engine = zeroengine.initialize(masked(), config=config(3, bf16={"enabled": True}))
    with contextlib.closing(engine), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        engine(torch.randn(2, 4, 7))
    assert not hasattr(error.value, "__notes__")
