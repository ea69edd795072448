"""Names of DeepSpeed that zeroengine does not serve: importing one works, and using it says what to write instead."""

from __future__ import annotations

from typing import Any

from zeroengine.errors import ZeroEngineError

_DATA_PARALLEL = "ranks are data-parallel or share samples, without pipeline, tensor or expert parallelism"


class UnavailableClass:
    """The base of classes that are not served. Subclassing one works, and making an object of it raises."""

    _advice = ""

    def __init__(self, *args: object, **options: object) -> None:
        name = next(base.__name__ for base in type(self).__mro__ if "_advice" in vars(base))
        raise ZeroEngineError(f"deepspeed's {name} is not served by zeroengine: {self._advice}")


def _unavailable_class(name: str, advice: str) -> type[UnavailableClass]:
    return type(name, (UnavailableClass,), {"_advice": advice, "__doc__": f"Not served: {advice}."})


def _unavailable_function(name: str, advice: str) -> Any:
    def refuse(*args: object, **options: object) -> None:
        raise ZeroEngineError(f"deepspeed's {name}() is not served by zeroengine: {advice}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_ADVICE_OF_CLASSES = {
    "LayerSpec MoE PipelineEngine PipelineModule TiedLayerSpec": _DATA_PARALLEL,
    "DeepSpeedHybridEngine InferenceEngine": "there is no inference engine; evaluate inside zeroengine.gathered(model)",
    "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig": (
        "pass the section as a dict to initialize(config=...)"
    ),
    "BF16_Optimizer FP16_Optimizer FP16_UnfusedOptimizer": "initialize() makes the optimizer of every precision",
    "FusedLamb": "pass a LAMB of another package to initialize(), which runs at every stage",
    "TiledLinear TiledLinearReturnBias": 'write several torch.nn.Linear, each of which can be one of the "units"',
    "OnebitAdam OnebitLamb ZeroOneAdam": "it compresses its communication, which changes results; use Adam",
}
_ADVICE_OF_FUNCTIONS = {
    "get_model_ckpt_name_for_rank": (
        "a checkpoint is one directory of torch Distributed Checkpoint; read its weights with zero_to_fp32, or export "
        "them with zero-export"
    ),
    "init_inference": "evaluate inside `with torch.no_grad(), zeroengine.gathered(model):`",
    "tp_model_init": _DATA_PARALLEL,
}
NAMES: dict[str, Any] = {
    name: _unavailable_class(name, advice) for names, advice in _ADVICE_OF_CLASSES.items() for name in names.split()
}
NAMES |= {name: _unavailable_function(name, advice) for name, advice in _ADVICE_OF_FUNCTIONS.items()}
