"""``deepspeed.zero.Init``: what scripts read of parameters before ``initialize``, nesting, and writes of one rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks
from zeroengine.errors import ZeroEngineError

STAGE3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "param_persistence_threshold": 0}}
BF16 = {**STAGE3, "bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
NOT_AVAILABLE = deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE


def check_attributes() -> None:
    with deepspeed.zero.Init(config_dict_or_path=STAGE3):
        assert dist.is_initialized()
        layer = nn.Linear(6, 3)
        assert layer.weight.ds_numel == 18
        layer.bias.data = torch.zeros(5)
    ordinary = nn.Linear(6, 3)
    assert not hasattr(ordinary.weight, "ds_id")
    assert layer.weight.ds_id != layer.bias.ds_id and layer.weight.ds_shape == (3, 6) and layer.bias.ds_numel == 5
    assert layer.weight.ds_status == NOT_AVAILABLE and layer.weight.ds_tensor.numel() == 0
    assert pickle.loads(pickle.dumps(layer.weight.ds_status)) is NOT_AVAILABLE
    assert deepspeed.runtime.zero.partition_parameters.is_zero_param(layer.weight)
    with deepspeed.zero.GatheredParameters(layer.weight):
        assert layer.weight.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE
    # At a lower stage nothing is partitioned, so the attributes end.
    engine, *_ = deepspeed.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 1})
    assert not hasattr(layer.weight, "ds_id")
    engine.destroy()


def test_parameters_have_deepspeeds_attributes_before_initialize() -> None:
    run_ranks(1, check_attributes)


def check_nesting() -> None:
    with deepspeed.zero.Init(config_dict_or_path=STAGE3):
        with deepspeed.runtime.zero.mics.MiCS_Init(config_dict_or_path=STAGE3):
            first = nn.Linear(4, 4)
        assert hasattr(first.weight, "ds_id")
        engine, *_ = deepspeed.initialize(model=first, config=STAGE3)
        engine(torch.ones(2, 4))
        second = nn.Linear(4, 4)
        with pytest.raises(ZeroEngineError, match="Leave the `with` first"), torch.device("cpu"):
            deepspeed.initialize(model=nn.Linear(2, 2), config=STAGE3)
    # What was built after the engine has no memory either, and the engine's parameters are as they were.
    assert second.weight.is_meta and second.weight.ds_id != first.weight.ds_id
    assert engine(torch.ones(2, 4)).shape == (2, 4)
    other, *_ = deepspeed.initialize(model=second, config=STAGE3)
    assert other(torch.ones(2, 4)).shape == (2, 4)


def test_initialize_inside_of_nested_contexts_makes_engines() -> None:
    run_ranks(1, check_nesting)


def built(**options: Any) -> nn.Linear:
    torch.manual_seed(0)
    with deepspeed.zero.Init(**options):
        return nn.Linear(8, 8)


def check_dtypes() -> None:
    rounded = built(enabled=False).weight.bfloat16()
    for options in ({"config_dict_or_path": BF16}, {"dtype": torch.bfloat16}):
        layer = built(**options)
        assert layer.weight.is_meta and layer.weight.dtype == layer.weight.ds_tensor.dtype == torch.bfloat16
        with deepspeed.zero.GatheredParameters(layer.weight):
            assert torch.equal(layer.weight, rounded)
    engine, *_ = deepspeed.initialize(model=layer, config=BF16)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(layer.weight), rounded.float())
    engine.destroy()
    assert built().weight.dtype == torch.float32


def test_parameters_are_cast_as_the_configuration_says() -> None:
    run_ranks(1, check_dtypes)


def check_writes() -> None:
    layer = built()
    rank = dist.get_rank()
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=1):
        layer.weight.data.fill_(float(rank))
    with deepspeed.zero.GatheredParameters(layer.weight):
        assert torch.equal(layer.weight, torch.ones(8, 8))
    section = {**STAGE3["zero_optimization"], "enable_sanity_checks": True}
    layer = built(config_dict_or_path={**STAGE3, "zero_optimization": section})
    for make_engine in (False, True):
        if make_engine:
            deepspeed.initialize(model=layer, config={**STAGE3, "zero_optimization": section})
        with pytest.raises(RuntimeError, match=r"in-place modification.*modifier_rank=0"):
            with deepspeed.zero.GatheredParameters(layer.weight), torch.no_grad():
                layer.weight.add_(0.0)
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
            layer.weight.add_(1.0)


def test_one_ranks_writes_count_before_initialize_and_others_can_be_refused() -> None:
    run_ranks(2, check_writes)


def test_mics_init_builds_without_memory_too() -> None:
    assert deepspeed.zero.MiCS_Init is deepspeed.zero.Init, "and initialize() reads mics_shard_size"
