"""The configuration of each policy, the errors of settings without a counterpart, and the seams in torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from tests.integrations.fsdp.scripts import BF16, sharded, untied
from zeroengine.config import load
from zeroengine.integrations.fsdp import config_of_policies, policies

LOW = torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"zero_optimization": {"stage": 3}}),
        ({"reshard_after_forward": True}, {"zero_optimization": {"stage": 3}}),
        ({"reshard_after_forward": False}, {"zero_optimization": {"stage": 2}}),
        ({"reshard_after_forward": 1}, {"zero_optimization": {"stage": 2}}),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW)}, {"bf16": {"enabled": True}}),
        ({"mp_policy": BF16}, {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}),
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=LOW)}, {"communication_data_type": "bf16"}),
        (
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
            {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}},
        ),
        (
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "cpu", "pin_memory": False},
                    "offload_optimizer": {"device": "cpu", "pin_memory": False},
                }
            },
        ),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": "manual"}),
        ({"gradient_accumulation_steps": "manual"}, {"gradient_accumulation_steps": "manual"}),
    ],
)
def test_policies_become_keys(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of_policies(**arguments)
    load(config).resolve(world_size=2)
    assert {key: config.get(key) for key in expected} == expected


@pytest.mark.parametrize("in_own_dtype", [False, True])
@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_without_a_reduce_dtype_gradients_are_reduced_as_this_torch_does(
    in_own_dtype: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert policies.REDUCES_IN_OWN_DTYPE == ("versionchanged:: 2.15" in (MixedPrecisionPolicy.__doc__ or ""))
    monkeypatch.setattr(policies, "REDUCES_IN_OWN_DTYPE", in_own_dtype)
    config = config_of_policies(mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    assert config.get("communication_data_type") == ("fp32" if in_own_dtype else None)
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if in_own_dtype else None)
    told = config_of_policies(mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    assert not {"communication_data_type", "data_types"} & told.keys()


def test_a_number_of_ranks_to_reshard_over_is_the_degree_of_a_second_copy() -> None:
    config = config_of_policies(reshard_after_forward=4)
    assert config["zero_optimization"] == {"degrees": {"parameters": "all", "secondary_parameters": 4}}
    degrees = load(config).resolve(world_size=8).zero_optimization.degree_numbers
    assert degrees == {"optimizer": 8, "gradients": 8, "parameters": 8, "secondary": 4}


def test_a_model_in_low_precision_is_updated_in_it_as_by_fsdp2() -> None:
    config = config_of_policies(untied().to(LOW), mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
    assert "bf16" not in config


def mixed_model() -> nn.Module:
    model = untied()
    model.norm.to(LOW)
    return model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reshard_after_forward": "no"}, "reshard_after_forward: found 'no'; write True"),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}, "found param_dtype=torch.float64; write"),
        ({"mp_policy": MixedPrecisionPolicy(LOW, output_dtype=torch.float32)}, r"engine\(batch\).to\(torch.float32\)"),
        ({"mp_policy": MixedPrecisionPolicy(LOW, cast_forward_inputs=False)}, "leave cast_forward_inputs out"),
        ({"mp_policy": LOW}, "mp_policy: found dtype; write a MixedPrecisionPolicy of torch.distributed.fsdp"),
        ({"offload_policy": "cpu"}, "offload_policy: found str, which is neither OffloadPolicy nor CPUOffloadPolicy"),
        (
            {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False},
            "Write reshard_after_forward=True, or leave offload_policy out",
        ),
        ({"offload_policy": type("Other", (OffloadPolicy,), {})()}, "found Other, which is neither"),
        ({"shard_placement_fn": lambda param: None}, "Leave shard_placement_fn out"),
        ({"ignored_params": {nn.Parameter(torch.zeros(1))}}, r"param.requires_grad_\(False\)"),
        ({"dp_mesh_dims": object()}, r'process_group=mesh\["dp"\]'),
        ({"gradient_accumulation_steps": 0}, 'found 0; write the number of backwards before an update, or "manual"'),
        ({"model": 3}, "takes a torch.nn.Module, found int"),
        ({"model": mixed_model()}, "several dtypes: torch.bfloat16, torch.float32"),
        ({"model": untied().to(LOW), "mp_policy": MixedPrecisionPolicy(torch.float16)}, r"write model.float\(\)"),
    ],
)
def test_a_setting_without_a_counterpart_says_what_to_write(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(zeroengine.ZeroEngineError, match=words):
        config_of_policies(**arguments)


def sharded_models_and_meshes() -> dict[str, str]:
    """On two ranks: return what two dimensions of a mesh give, and the errors of models that are sharded."""
    start()
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    results = {
        "mesh": repr(config_of_policies(mesh=square)["zero_optimization"]),
        "kept": repr(config_of_policies(mesh=square, reshard_after_forward=False)["zero_optimization"]),
        "equal number": repr(config_of_policies(reshard_after_forward=2)["zero_optimization"]),
    }
    for name, call in (("policies", config_of_policies), ("initialize", zeroengine.initialize)):
        with pytest.raises(zeroengine.ZeroEngineError) as error:
            call(sharded())
        results[name] = str(error.value)
    return results


@cpu_alone("FSDP2 over Gloo")
def test_a_mesh_gives_degrees_and_a_sharded_model_is_an_error() -> None:
    results = run_ranks(2, sharded_models_and_meshes)[0]
    # Two replicas, each of which is partitioned over one rank.
    assert results["mesh"] == repr({"degrees": {"parameters": 1}})
    assert results["kept"] == repr({"degrees": {"gradients": 1}})
    # FSDP2 treats the number of all ranks as True.
    assert results["equal number"] == repr({"stage": 3})
    assert "Pass the plain model" in results["policies"]
    assert "leave fully_shard(...) out" in results["initialize"]


def test_torch_has_what_is_read() -> None:
    """The one test of what the integration takes from torch, beside public classes."""
    parameters = list(inspect.signature(inspect.unwrap(fully_shard)).parameters)
    own = list(inspect.signature(config_of_policies).parameters)
    # Another argument of fully_shard needs a counterpart or an error.
    assert parameters == ["module", *own[1:-1]]
    assert set(inspect.signature(MixedPrecisionPolicy).parameters) == {
        "param_dtype",
        "reduce_dtype",
        "output_dtype",
        "cast_forward_inputs",
    }
    assert set(inspect.signature(CPUOffloadPolicy).parameters) == {"pin_memory"}
