"""zeroengine: train PyTorch models partitioned over data-parallel ranks (ZeRO stages 0 to 3)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .lazy import exports

if TYPE_CHECKING:
    from .access import (
        full_gradient,
        full_master,
        full_optimizer_state,
        set_full_gradient,
        set_full_master,
        set_full_optimizer_state,
    )
    from .birth import meta_init
    from .engine import Engine
    from .errors import (
        CheckpointError,
        ConfigError,
        DivergenceError,
        OffloadError,
        ReleasedParameterError,
        ZeroEngineError,
    )
    from .memory import Memory
    from .runtime.gathered import gathered
    from .start import initialize
else:  # imported when first used: the commands that need no torch start without it

    def _of_another_library(name: str) -> str | None:
        from .migration import module_attribute

        return module_attribute(name)

    __getattr__, __dir__ = exports(
        __name__,
        _of_another_library,
        access=[
            "full_gradient",
            "full_master",
            "full_optimizer_state",
            "set_full_gradient",
            "set_full_master",
            "set_full_optimizer_state",
        ],
        birth=["meta_init"],
        engine=["Engine"],
        errors=[
            "CheckpointError",
            "ConfigError",
            "DivergenceError",
            "OffloadError",
            "ReleasedParameterError",
            "ZeroEngineError",
        ],
        memory=["Memory"],
        runtime=["gathered"],
        start=["initialize"],
    )

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Memory",
    "OffloadError",
    "ReleasedParameterError",
    "ZeroEngineError",
    "full_gradient",
    "full_master",
    "full_optimizer_state",
    "gathered",
    "initialize",
    "meta_init",
    "set_full_gradient",
    "set_full_master",
    "set_full_optimizer_state",
]

if "torch" in sys.modules:  # a training script: it loads the engine here, not in the midst of its own start
    importlib.import_module(".start", __name__)
