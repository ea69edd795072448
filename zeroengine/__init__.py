"""zeroengine: train PyTorch models partitioned over data-parallel ranks (ZeRO stages 0 to 3)."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any


def _import(module: str) -> Any:
    # Classes and functions that are new here start collections of garbage, which look at all objects of torch and
    # find nothing. They take a third of the import.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()


if TYPE_CHECKING:
    from zeroengine.deferred_init.meta_init import meta_init
    from zeroengine.engine.engine import Engine
    from zeroengine.engine.gathered import gathered
    from zeroengine.engine.initialize import engine_of, initialize
    from zeroengine.engine.memory import Memory
    from zeroengine.engine.parallelize import parallelize
    from zeroengine.engine.parameter_access import (
        full_gradient,
        full_master,
        full_optimizer_state,
        set_full_gradient,
        set_full_master,
        set_full_optimizer_state,
    )
    from zeroengine.errors import (
        CheckpointError,
        ConfigError,
        DivergenceError,
        LossScaleError,
        OffloadError,
        ReleasedParameterError,
        SkippedStepsError,
        ZeroEngineError,
    )
    from zeroengine.optim.mixed_optimizer import MixedOptimizer
    from zeroengine.optim.muon import Muon
    from zeroengine.plan.api import plan
    from zeroengine.sequence import sequence_parallel
    from zeroengine.sequence.batches import shard_sequence
    from zeroengine.sequence.mean_loss import mean_loss
    from zeroengine.sequence.tiled_loss import tiled_loss
    from zeroengine.sequence.tiled_mlp import tiled_mlp
    from zeroengine.weights.changes import WeightsToken
    from zeroengine.weights.transfer import receive_weights
else:  # Names are imported when they are first used, so the commands that need no torch start without it.
    _MODULES = {
        "zeroengine.deferred_init.meta_init": ["meta_init"],
        "zeroengine.engine.engine": ["Engine"],
        "zeroengine.engine.parameter_access": [
            "full_gradient",
            "full_master",
            "full_optimizer_state",
            "set_full_gradient",
            "set_full_master",
            "set_full_optimizer_state",
        ],
        "zeroengine.engine.gathered": ["gathered"],
        "zeroengine.engine.initialize": ["engine_of", "initialize"],
        "zeroengine.engine.memory": ["Memory"],
        "zeroengine.engine.parallelize": ["parallelize"],
        "zeroengine.errors": [
            "CheckpointError",
            "ConfigError",
            "DivergenceError",
            "LossScaleError",
            "OffloadError",
            "ReleasedParameterError",
            "SkippedStepsError",
            "ZeroEngineError",
        ],
        "zeroengine.optim.mixed_optimizer": ["MixedOptimizer"],
        "zeroengine.optim.muon": ["Muon"],
        "zeroengine.sequence.batches": ["shard_sequence"],
        "zeroengine.sequence.mean_loss": ["mean_loss"],
        "zeroengine.sequence.tiled_loss": ["tiled_loss"],
        "zeroengine.sequence.tiled_mlp": ["tiled_mlp"],
        "zeroengine.weights.changes": ["WeightsToken"],
        "zeroengine.weights.transfer": ["receive_weights"],
    }
    # `plan` is a package that can be called.
    _SUBMODULES = {"plan": "zeroengine.plan", "sequence_parallel": "zeroengine.sequence.sequence_parallel"}
    _MODULE_OF_NAME = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(_SUBMODULES[name])
        if name not in _MODULE_OF_NAME:
            from zeroengine.migration.messages import module_attribute

            hint = module_attribute(name)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f'. {hint}' if hint else ''}")
        value = getattr(_import(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF_NAME, *_SUBMODULES})


__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "Engine",
    "LossScaleError",
    "Memory",
    "MixedOptimizer",
    "Muon",
    "OffloadError",
    "ReleasedParameterError",
    "SkippedStepsError",
    "WeightsToken",
    "ZeroEngineError",
    "engine_of",
    "full_gradient",
    "full_master",
    "full_optimizer_state",
    "gathered",
    "initialize",
    "mean_loss",
    "meta_init",
    "parallelize",
    "plan",
    "receive_weights",
    "sequence_parallel",
    "set_full_gradient",
    "set_full_master",
    "set_full_optimizer_state",
    "shard_sequence",
    "tiled_loss",
    "tiled_mlp",
]

if "torch" in sys.modules:  # a training script: it loads the engine here, not in the midst of its own start
    _import("zeroengine.engine.initialize")
