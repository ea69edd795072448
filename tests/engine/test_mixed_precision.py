"""Which modules keep fp32, and what torch computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroengine import ZeroEngineError
from zeroengine.config import load
from zeroengine.engine import mixed_precision


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
    config = load({"bf16": {"enabled": True}, "keep_fp32_modules": patterns, **more}).resolve(world_size=1)
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in mixed_precision.fp32_modules(model, config)]


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
