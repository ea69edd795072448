"""``TiledLinear`` computes what the layer does that it is cut from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks
from zeroengine.integrations.deepspeed.tiling import TiledLinear, TiledLinearReturnBias


class BiasBeside(nn.Linear):
    """Returns its bias, as the layers of Megatron-LM do."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:  # type: ignore[override]
        return nn.functional.linear(inputs, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 2), (7, 5)])
def test_tiles_compute_what_the_whole_layer_does(in_splits: int, out_splits: int, bias: bool) -> None:
    whole = nn.Linear(7, 5, bias=bias)
    tiled = TiledLinear(7, 5, bias, in_splits, out_splits, init_linear=whole)
    inputs = torch.randn(4, 7)
    torch.testing.assert_close(tiled(inputs), whole(inputs))
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in whole.parameters())
    beside = TiledLinearReturnBias(7, 5, bias, in_splits, out_splits, linear_cls=BiasBeside, init_linear=whole)
    output, returned = beside(inputs)
    assert (returned is None) == (not bias)
    torch.testing.assert_close(output if returned is None else output + returned, whole(inputs))


def test_inputs_and_outputs_may_stay_split() -> None:
    whole = nn.Linear(7, 5)
    tiled = TiledLinear(7, 5, True, 3, 2, input_is_already_split=True, combine_out_splits=False, init_linear=whole)
    inputs = torch.randn(4, 7)
    rows = tiled(inputs.split([tiled.in_parts[i + 1] - tiled.in_parts[i] for i in range(3)], dim=-1))
    torch.testing.assert_close(torch.cat(rows, dim=-1), whole(inputs))


@pytest.mark.parametrize("splits", [0, 8])
def test_more_tiles_than_elements_are_an_error(splits: int) -> None:
    with pytest.raises(RuntimeError, match=rf"in_splits={splits}\): write a number from 1 to 7"):
        TiledLinear(7, 5, in_splits=splits)


def train_tiles() -> None:
    whole = nn.Linear(7, 5)
    with deepspeed.zero.Init():
        tiled = deepspeed.zero.TiledLinear(7, 5, in_splits=2, out_splits=2, init_linear=whole)
    inputs = torch.randn(4, 7)
    expected = whole(inputs)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=tiled, config=config)
    output = engine(inputs)
    torch.testing.assert_close(output, expected)
    engine.backward(output.sum())
    engine.step()
    engine.destroy()


def test_tiles_train_at_stage_3() -> None:
    run_ranks(1, train_tiles)
