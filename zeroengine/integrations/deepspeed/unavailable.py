"""Names of DeepSpeed that zeroengine does not serve: importing one works, and using it says what to write instead."""

from __future__ import annotations

from typing import Any

from zeroengine.errors import ZeroEngineError

_DATA_PARALLEL = "ranks are data-parallel alone, without pipeline, tensor, sequence or expert parallelism"


class UnavailableClass:
    """The base of classes that are not served. Subclassing one works, and making an object of it raises."""

    _advice = ""

    def __init__(self, *args: object, **options: object) -> None:
        name = next(base.__name__ for base in type(self).__mro__ if "_advice" in vars(base))
        raise ZeroEngineError(f"deepspeed's {name} is not served by zeroengine: {self._advice}")


def unavailable_class(name: str, advice: str) -> type[UnavailableClass]:
    """Return a class that raises ``advice`` when an object of it is made."""
    return type(name, (UnavailableClass,), {"_advice": advice, "__doc__": f"Not served: {advice}."})


def unavailable_function(name: str, advice: str) -> Any:
    """Return a function that raises ``advice``."""

    def refuse(*args: object, **options: object) -> None:
        raise ZeroEngineError(f"deepspeed's {name}() is not served by zeroengine: {advice}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


CLASSES = {
    **{
        name: unavailable_class(name, _DATA_PARALLEL)
        for name in ("LayerSpec", "MoE", "PipelineEngine", "PipelineModule", "TiedLayerSpec")
    },
    **{
        name: unavailable_class(name, "there is no inference engine; evaluate inside zeroengine.gathered(model)")
        for name in ("DeepSpeedHybridEngine", "InferenceEngine")
    },
    **{
        name: unavailable_class(name, "pass the section as a dict to initialize(config=...)")
        for name in ("DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
    },
    "BF16_Optimizer": unavailable_class("BF16_Optimizer", "initialize() makes the optimizer of every precision"),
    "FP16_Optimizer": unavailable_class("FP16_Optimizer", "initialize() makes the optimizer of every precision"),
    "FP16_UnfusedOptimizer": unavailable_class(
        "FP16_UnfusedOptimizer", "initialize() makes the optimizer of every precision"
    ),
    "FusedLamb": unavailable_class(
        "FusedLamb", "its update looks at whole parameters, which are partitioned; use Adam"
    ),
    "OnebitAdam": unavailable_class("OnebitAdam", "it compresses its communication, which changes results; use Adam"),
    "OnebitLamb": unavailable_class("OnebitLamb", "it compresses its communication, which changes results; use Adam"),
    "ZeroOneAdam": unavailable_class("ZeroOneAdam", "it compresses its communication, which changes results; use Adam"),
}
FUNCTIONS = {
    "get_model_ckpt_name_for_rank": unavailable_function(
        "get_model_ckpt_name_for_rank",
        "a checkpoint is one directory of torch Distributed Checkpoint; read its weights with zero_to_fp32, or export "
        "them with zero-export",
    ),
    "init_inference": unavailable_function(
        "init_inference", "evaluate inside `with torch.no_grad(), zeroengine.gathered(model):`"
    ),
    "split_params_into_different_moe_groups_for_optimizer": unavailable_function(
        "split_params_into_different_moe_groups_for_optimizer", _DATA_PARALLEL
    ),
    "tp_model_init": unavailable_function("tp_model_init", _DATA_PARALLEL),
}
