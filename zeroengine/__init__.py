"""zeroengine: train PyTorch models partitioned over data-parallel ranks (ZeRO stages 0 to 3)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

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

# Imported when first used: the commands that need no torch start without it.
_HOMES = {
    "Engine": "engine",
    "Memory": "memory",
    "gathered": "runtime",
    "initialize": "start",
    "meta_init": "birth",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "errors" if name.endswith("Error") else _HOMES.get(name, "access")
    value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # a training script: it loads the engine here, not in the midst of its own start
    importlib.import_module(".start", __name__)
