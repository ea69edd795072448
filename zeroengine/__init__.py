"""zeroengine: train PyTorch models partitioned over data-parallel ranks (ZeRO stages 0 to 3)."""

from .access import (
    full_gradient,
    full_master,
    full_optimizer_state,
    set_full_gradient,
    set_full_master,
    set_full_optimizer_state,
)
from .engine import Engine, initialize
from .errors import ConfigError, DivergenceError, ReleasedParameterError, ZeroEngineError
from .memory import Memory
from .runtime import gathered

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Memory",
    "ReleasedParameterError",
    "ZeroEngineError",
    "full_gradient",
    "full_master",
    "full_optimizer_state",
    "gathered",
    "initialize",
    "set_full_gradient",
    "set_full_master",
    "set_full_optimizer_state",
]
